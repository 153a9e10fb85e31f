"""Map-style Datasets: of torch, of Hugging Face, or any object with `__len__` and `__getitem__`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from idletrain.errors import JobError
from idletrain.nn.data.batches import LABEL_NAMES, fields_of, is_of_numbers, map_leaves, sample_count, stacked
from idletrain.nn.data.graphs import is_graph, join_graphs
from idletrain.nn.data.values import NUMBER_KINDS, as_array, as_label, part_of, stack_labels, stack_parts


@dataclass(frozen=True)
class Loading:
    """What a DataLoader says of how its samples are read.

    Attributes:
        batch_size: Samples of a batch, or None if it does not say.
        sampler: Yields sample numbers, or batches of these, in the order of an epoch; None: shuffled anew each time.
        num_workers: Processes that read ahead.
        notes: What of it cannot be kept, one sentence each.
    """

    batch_size: int | None = None
    sampler: Any = None
    num_workers: int = 0
    notes: tuple[str, ...] = ()


def loading_of(samples: Any) -> Loading:
    """Return how samples are read; arrays say nothing of it."""
    loading: Loading = getattr(samples, "loading", Loading())
    return loading


@dataclass(frozen=True)
class MapStyleSource:
    """A map-style Dataset of (input, label) pairs, of tuples that end in the label, of parts by name, of graphs, or of
    inputs alone, which are then their own target.

    Attributes:
        dataset: The Dataset.
        collate: Makes a batch from a list of items, which may then be of any kind, and joined in other ways than row by
            row; None: they are stacked.
        loading: How it is read.
        names: The parts by name that are kept; all of them if None.
        integers: Whether 8-bit inputs stay integers.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    loading: Loading = field(default_factory=Loading)
    names: frozenset[str] | None = None
    integers: bool = False

    def open(self) -> MapStyleSource:
        return self

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:
        numbers = [int(i) for i in index]
        several = getattr(self.dataset, "__getitems__", None)
        return self.joined(several(numbers) if several else [self.dataset[i] for i in numbers])

    def joined(self, items: Sequence[Any]) -> tuple[Any, Any]:
        """Return inputs and target of some items."""
        if self.names is not None:
            items = [{name: part for name, part in item.items() if name in self.names} for item in items]
        if self.collate is not None:
            return self._collated(self.collate(list(items)), len(items))
        if is_graph(items[0]):
            return self._collated(join_graphs(items), len(items))
        stack_inputs = partial(stack_parts, integers=self.integers)
        if fields_of(items[0]) is not None:
            whole = stacked(items, stack_inputs)
            return whole, whole
        if isinstance(items[0], tuple | list) and len(items[0]) == 1:
            items = [item[0] for item in items]
        if getattr(items[0], "shape", ()):  # its own target, as for an autoencoder
            whole = stacked(items, stack_inputs)
            return whole, whole
        if not isinstance(items[0], tuple | list) or len(items[0]) < 2:
            raise TypeError(f"an item is a {type(items[0]).__name__}")
        if any(len(item) != len(items[0]) for item in items):
            raise ValueError("items are tuples of several lengths")
        inputs = [item[0] if len(item) == 2 else tuple(item[:-1]) for item in items]
        return stacked(inputs, stack_inputs), stacked([item[-1] for item in items], stack_labels)

    def _collated(self, batch: Any, count: int) -> tuple[Any, Any]:
        """Return inputs and target of a batch that `collate` made of `count` items."""
        pair: tuple[Any, Any]
        if fields_of(batch) is not None:
            whole = map_leaves(self._converted, batch)
            pair = whole, whole
        elif isinstance(batch, tuple | list) and len(batch) > 1:
            inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
            labels = map_leaves(lambda _name, part: as_label(as_array(part)) if _is_numeric(part) else part, batch[-1])
            pair = map_leaves(self._converted, inputs), labels
        else:
            kind = type(batch).__name__
            raise TypeError(f"collate_fn returned a {kind}; it should return inputs and labels, or a dict with labels")
        kept = sample_count(*pair)
        if kept != count:
            raise ValueError(
                f"collate_fn returned {kept} samples for {count} items; it should return one for each, so leave what "
                "should not be trained on out of the Dataset"
            )
        return pair

    def _converted(self, name: str, part: Any) -> Any:
        return part_of(name, as_array(part), integers=self.integers) if _is_numeric(part) else part


def _is_numeric(part: Any) -> bool:
    is_array = isinstance(part, np.ndarray) and part.dtype.kind in NUMBER_KINDS
    return isinstance(part, Tensor) or is_array or is_of_numbers(part)


def kept_names(dataset: Any, taken: Sequence[str] | None) -> frozenset[str] | None:
    """Return the columns of a `datasets.Dataset` that a model takes, and the labels; None for other Datasets.

    Its rows often hold the text that they were made of, which Hugging Face's Trainer leaves out, too.
    """
    columns = getattr(dataset, "column_names", None)
    if taken is None or not isinstance(columns, list) or not hasattr(dataset, "with_format"):
        return None
    kept = frozenset(columns) & {*taken, *LABEL_NAMES}
    return kept or None


def check_classes(train: Any, test: Any) -> None:
    """Check that the classes which the Datasets of a call name have the same numbers in both.

    Raises:
        JobError: one has another number in the test data, as where a folder of images lacks one of the classes.
    """
    numbers, of_test = _numbers_of_classes(train), _numbers_of_classes(test)
    if wrong := [name for name, number in of_test.items() if numbers and numbers.get(name) != number]:
        there = numbers.get(wrong[0], "none")
        raise JobError(
            f"test: its class {wrong[0]!r} has the number {of_test[wrong[0]]}, and in train {there}; give idletrain's "
            "ImageFolder classes=train.classes, or the folder of torchvision's all classes (with allow_empty=True)"
        )


def _numbers_of_classes(data: Any) -> Mapping[str, int]:
    """Return the numbers of the classes that a Dataset says its labels to be; empty if it does not say."""
    while isinstance(data, DataLoader | Subset):
        data = data.dataset
    if getattr(data, "target_transform", None) is not None:  # which may number them itself
        return {}
    names, numbers = getattr(data, "classes", None), getattr(data, "class_to_idx", None)
    if isinstance(numbers, Mapping):
        return numbers
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        return {}
    return {name: number for number, name in enumerate(names)} if len(set(names)) == len(names) else {}
