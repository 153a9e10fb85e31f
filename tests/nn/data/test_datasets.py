"""Map-style Datasets: items of any form, collate_fn, rows of Hugging Face."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from idletrain.errors import JobError
from idletrain.nn.data.datasets import MapStyleSource, check_classes, kept_names

RAGGED = [([1, 2], 0), ([3], 1), ([4, 5, 6], 1)]
FIRST = np.array([0, 1])


def padded(items: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x, _ in items], batch_first=True)
    return ids, torch.tensor([len(x) for x, _ in items]), torch.tensor([y for _, y in items])


def test_a_collate_fn_joins_samples_of_several_lengths() -> None:
    (ids, lengths), labels = MapStyleSource(RAGGED, padded).batch(np.array([2, 1]))
    assert ids.tolist() == [[4, 5, 6], [3, 0, 0]]
    assert (lengths.tolist(), labels.tolist()) == ([3, 1], [1, 1])


def test_without_a_collate_fn_several_lengths_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"has the shapes \[2\] and \[1\]: pad it in a collate_fn"):
        MapStyleSource(RAGGED).batch(FIRST)


class Made(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "made",
    [
        lambda _: {"x": torch.ones(2, dtype=torch.float64), "labels": np.array([1, 0], np.int32), "id": ["a", "b"]},
        lambda _: {"x": [1.0, 1.0], "labels": [1, 0]},
        lambda _: [torch.ones(2, dtype=torch.bfloat16), [1, 0]],
        lambda _: Made(np.ones(2), np.array([1, 0], np.uint8)),
    ],
)
def test_what_a_collate_fn_returns_becomes_tensors_that_layers_and_losses_take(made: Any) -> None:
    inputs, target = MapStyleSource(RAGGED, made).batch(FIRST)
    x, labels = (inputs["x"], target["labels"]) if isinstance(inputs, dict) else (inputs, target)
    assert (x.dtype, labels.dtype, labels.tolist()) == (torch.float32, torch.int64, [1, 0])


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (lambda items: padded(items[:1]), "collate_fn returned 1 samples for 2 items; it should return one for each"),
        (lambda _: {"x": torch.ones(1, 2)}, "collate_fn returned 1 samples for 2 items"),
        (lambda _: None, "collate_fn returned a NoneType; it should return inputs and labels, or a dict"),
        (lambda _: torch.ones(2), "collate_fn returned a Tensor"),
    ],
)
def test_a_collate_fn_that_drops_rows_or_returns_something_else_is_refused(made: Any, fault: str) -> None:
    with pytest.raises((ValueError, TypeError), match=fault):
        MapStyleSource(RAGGED, made).batch(FIRST)


class Rows:
    """The part of `datasets.Dataset` that is used."""

    column_names = ("text", "input_ids", "label")

    def __init__(self) -> None:
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return 3

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        self.reads.append(numbers)
        return [{"text": "a" * n, "input_ids": [n, n], "label": n} for n in numbers]


def test_rows_are_read_at_once_where_a_dataset_can_and_columns_left_out() -> None:
    rows = Rows()
    with pytest.raises(TypeError, match=r"text holds str.*, and not numbers"):
        MapStyleSource(rows).batch(FIRST)
    inputs, target = MapStyleSource(rows, names=frozenset({"input_ids", "label"})).batch(np.array([2, 0]))
    assert rows.reads[-1] == [2, 0]
    assert target is inputs
    assert {name: part.tolist() for name, part in inputs.items()} == {"input_ids": [[2, 2], [0, 0]], "label": [2, 0]}


def test_only_rows_of_hugging_face_lose_the_columns_that_a_model_does_not_take() -> None:
    assert kept_names(RAGGED, ["x"]) is None
    assert kept_names(Rows(), ["input_ids"]) is None


@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")  # dill's, of pyarrow
def test_a_real_hugging_face_dataset_and_collator(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"])
    )
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    texts = ["good film", "bad", "good"]
    rows = datasets.Dataset.from_dict({"text": texts, "label": [1, 0, 1], **tokenizer(texts)})
    names = kept_names(rows, ("input_ids", "attention_mask", "labels"))
    assert names == {"input_ids", "attention_mask", "label"}
    collate = transformers.DataCollatorWithPadding(tokenizer)
    inputs, _ = MapStyleSource(rows, collate, names=names).batch(FIRST)
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert inputs["labels"].tolist() == [1, 0]


def test_an_item_with_masked_values_is_refused() -> None:
    items = [(np.ma.array([1.0, 2.0], mask=[False, masked]), 0) for masked in (False, True)]
    with pytest.raises(
        TypeError, match=r"an item is no array of numbers: it holds masked values.*; fill them, such as"
    ):
        MapStyleSource(items).batch(FIRST)
    assert MapStyleSource(items[:1]).batch(FIRST[:1])[0].tolist() == [[1, 2]]


class Photos:
    """What Datasets of images say of their classes."""

    def __init__(self, *classes: Any, **more: Any) -> None:
        self.classes = list(classes)
        vars(self).update(more)

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("test", "number", "there"),
    [
        (Photos("dog"), 0, 1),
        (Photos("cat", "wolf"), 1, "none"),
        (Photos("dog", class_to_idx={"dog": 0}), 0, 1),
        (DataLoader(Subset(Photos("dog"), [0]), batch_size=1), 0, 1),
    ],
)
def test_test_data_whose_classes_have_other_numbers_are_refused(test: Any, number: int, there: Any) -> None:
    name = "wolf" if there == "none" else "dog"
    with pytest.raises(JobError, match=f"test: its class '{name}' has the number {number}, and in train {there}; give"):
        check_classes(Photos("cat", "dog"), test)


@pytest.mark.parametrize(
    "test",
    [
        Photos("cat", "dog"),
        Photos("cat"),
        Photos("dog", class_to_idx={"dog": 1}),
        Photos("dog", target_transform=len),
        Photos(1, 0, 0),  # labels by another name
        Photos("dog", "dog"),
        (np.zeros((2, 2)), np.zeros(2)),
        None,
    ],
)
def test_other_test_data_pass(test: Any) -> None:
    check_classes(Photos("cat", "dog"), test)
    check_classes([(0, 1)], test)
