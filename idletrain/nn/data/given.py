"""Samples of whatever a call or a factory gives: arrays, tables, sparse matrices, Datasets, DataLoaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate

from idletrain.errors import JobError
from idletrain.nn.data.arrays import ArraySource, ArrayTree, Samples
from idletrain.nn.data.batches import fields_of, map_leaves, named_parts
from idletrain.nn.data.datasets import Loading, MapStyleSource
from idletrain.nn.data.graphs import is_graph
from idletrain.nn.data.streams import StreamSource
from idletrain.nn.data.tables import frame_array, is_frame, is_sparse, sparse_table
from idletrain.nn.data.values import Array, array_at_hand
from idletrain.nn.faults import made


@dataclass(frozen=True)
class FactorySource:
    """Data created by code on every machine: a factory returns `(train, test)`, `{"train": ..., "test": ...}`, or a
    Dataset or DataLoader for training alone; each part is what `idletrain.fit` takes.

    Attributes:
        factory: The function.
        part: 0 for training data, 1 for test data.
        args: Its keyword arguments.
    """

    factory: Callable[..., Any]
    part: int
    args: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Samples:
        return as_samples(self.parts()[self.part])

    def parts(self) -> tuple[Any, Any]:
        """Return training and test data, None without."""
        name = getattr(self.factory, "__name__", repr(self.factory))
        data = made(self.factory, name, self.args, "data")
        if isinstance(data, Mapping) and "train" in data:
            return data["train"], data.get("test")
        if _is_dataset(data) or _is_stream(data):
            return data, None
        if not isinstance(data, Sequence) or len(data) != 2:
            raise JobError(f"data.factory: {name} should return (train, test), or a Dataset or DataLoader")
        return data[0], data[1]


def as_samples(data: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> Samples:
    """Make samples from arrays (a pair, a tuple that ends in the labels, or by name), a Dataset or a DataLoader.

    Args:
        data: The data.
        collate_fn: Makes a batch from a list of a Dataset's items.

    Raises:
        JobError: it is none of these.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, collate_fn)
    if hasattr(data, "train_dataloader"):
        raise JobError(
            f'data: a {type(data).__name__} holds several; call setup("fit") and give its train_dataloader()'
        )
    data = [data] if is_graph(data) else data
    if _is_stream(data):
        return StreamSource(data, collate_fn)
    samples = _dataset(data, collate_fn) if _is_dataset(data) else _arrays(data)
    if collate_fn is not None and not isinstance(samples, MapStyleSource):
        raise JobError("collate_fn: is for the items of a Dataset, and the data are arrays; leave it out")
    return samples


def _is_stream(data: Any) -> bool:
    """Return True for what can only be read from its beginning."""
    is_numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not is_numbered)


def _is_dataset(data: Any) -> bool:
    is_map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    is_array = isinstance(data, Tensor | np.ndarray) or is_sparse(data)
    is_of_arrays = isinstance(data, Mapping) or is_array or (isinstance(data, Sequence) and _is_of_arrays(data))
    return isinstance(data, DataLoader) or (is_map_style and not is_of_arrays and not is_frame(data))


def _is_of_arrays(data: Sequence[Any]) -> bool:
    """Return True for a pair, and for a longer tuple of arrays; other sequences are those of items."""
    if data and is_graph(data[0]):
        return False
    return len(data) == 2 or (isinstance(data, tuple) and all(hasattr(part, "shape") for part in data))


def _dataset(dataset: Any, collate_fn: Any, loading: Loading | None = None) -> MapStyleSource:
    if not len(dataset):
        raise JobError(f"data: the {type(dataset).__name__} holds no samples")
    return MapStyleSource(dataset, collate_fn, loading or Loading())


# --- arrays -----------------------------------------------------------------------------------------------------------


def _arrays(data: Any) -> Samples:
    _check_target(data)
    if isinstance(data, tuple) and len(data) == 1:
        (data,) = data
        if isinstance(data, Tensor | np.ndarray):
            return _tree(_array(data, "samples"), None)
    if fields_of(data) is not None:
        return _tree(_by_name(data), None)
    if not isinstance(data, Sequence) or len(data) < 2:
        kind = type(data).__name__
        raise JobError(f"data: a {kind} is neither arrays, such as (inputs, labels), nor a Dataset or DataLoader")
    inputs = data[0] if len(data) == 2 else tuple(data[:-1])
    labels = _array(data[-1], "labels")
    if fields_of(inputs) is not None:
        return _tree(_by_name(inputs), labels)
    if isinstance(inputs, tuple) and inputs and all(hasattr(part, "shape") and part.shape for part in inputs):
        return _tree(tuple(_array(part, f"inputs[{i}]") for i, part in enumerate(inputs)), labels)
    if is_sparse(inputs):
        return sparse_table(inputs, labels)
    x = _array(inputs, "inputs")
    if len(x) != len(labels) or not len(x):
        raise JobError(f"data: {len(x)} inputs and {len(labels)} labels; there should be as many, and at least one")
    return ArraySource(x, labels)


def _check_target(data: Any) -> None:
    """Refuse a table or an array alone, which does not say what its target is.

    Raises:
        JobError: it is one.
    """
    if is_frame(data):
        raise JobError("data: a DataFrame alone does not say what the labels are; give (frame[inputs], frame[label])")
    if isinstance(data, Tensor | np.ndarray):
        kind = "tensor" if isinstance(data, Tensor) else "array"
        raise JobError(f"data: the {kind} has no labels; give (x, y), or (x,) if x is its own target")


def _array(part: Any, name: str) -> Array:
    if is_sparse(part):
        raise JobError(
            f"data: the {name} are a sparse matrix, as only the inputs of (inputs, labels) may be; use toarray()"
        )
    return frame_array(part, name) if is_frame(part) else array_at_hand(part, name)


def _by_name(data: Any) -> Any:
    """Return the same containers with arrays in them."""
    parts = list((fields_of(data) or {}).items())
    if parts and all(_is_dataset(p) and not is_sparse(p) and not isinstance(p, Sequence) for _, p in parts):
        names = ", ".join(repr(name) for name, _ in parts)
        raise JobError(f"data: holds the Datasets {names}; give one as train and one as test")
    return map_leaves(lambda name, part: _array(part, name), data)


def _tree(x: Any, y: Array | None) -> ArrayTree:
    tree = ArrayTree(x, y)
    if not list(named_parts(x)):
        raise JobError("data: holds no arrays")
    (first, array), *others = tree.arrays
    for name, other in others:
        if len(other) != len(array):
            raise JobError(f"data: {first} has {len(array)} samples and {name} {len(other)}; there should be as many")
    if not len(array):
        raise JobError("data: holds no samples")
    return tree


# --- DataLoaders ------------------------------------------------------------------------------------------------------


def _of_loader(loader: DataLoader[Any], collate_fn: Any) -> Samples:
    """Return the samples of a DataLoader's Dataset, to be read as it would."""
    collate = collate_fn or (None if loader.collate_fn is default_collate else loader.collate_fn)
    if _is_stream(loader.dataset) and loader.batch_size is not None:
        return StreamSource(loader.dataset, collate, Loading(loader.batch_size, num_workers=loader.num_workers))
    if loader.batch_size is None and loader.batch_sampler is None:
        raise JobError("data: the DataLoader has batch_size=None; give it one, with a Dataset of single samples")
    sampler, notes = _sampler(loader)
    loading = Loading(loader.batch_size, sampler, loader.num_workers, notes)
    return _dataset(loader.dataset, collate, loading)


def _sampler(loader: DataLoader[Any]) -> tuple[Any, tuple[str, ...]]:
    """Return what yields the order of an epoch, None for a plain shuffle; and a note if that replaces another order."""
    if type(loader.batch_sampler) is not BatchSampler:
        sampler: Any = loader.batch_sampler
    else:
        sampler = loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return None, ()
    name = type(sampler).__name__
    if getattr(sampler, "num_replicas", 1) > 1:
        return None, (f"data: {name} is left out: every subnet gets its part of the samples anyway",)
    return sampler, ()
