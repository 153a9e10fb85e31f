"""Samples of whatever a call or a factory gives."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from scipy.sparse import csr_matrix, dok_array
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from idletrain.errors import JobError
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.datasets import Loading, MapStyleSource
from idletrain.nn.data.given import FactorySource, as_samples
from idletrain.nn.data.run_files import RunData

SPARSE = csr_matrix(np.eye(2))
MASKED = np.ma.array(np.eye(2), mask=[[0, 0], [0, 1]])


def make(train: int) -> Any:
    return (np.zeros((train, 2)), np.zeros(train)), (np.ones((3, 2)), np.ones(3))


def test_made_data_come_from_the_factory_s_train_or_test_part() -> None:
    assert len(FactorySource(make, 0, {"train": 5}).open()) == 5
    assert len(FactorySource(make, 1, {"train": 5}).open()) == 3


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(JobError, match=r"data.factory: .* should return \(train, test\)"):
        FactorySource(lambda: 7, 0).open()


def test_a_factory_that_does_not_take_its_arguments_is_refused() -> None:
    with pytest.raises(JobError, match=r"data\.args: "):
        FactorySource(make, 0, {"trian": 5}).open()


def test_a_map_style_dataset_gives_batches_like_arrays() -> None:
    x, y = torch.randn(6, 3), torch.arange(6)
    ours, theirs = as_samples(TensorDataset(x, y)), as_samples((x, y))
    assert isinstance(ours, MapStyleSource)
    assert isinstance(theirs, ArraySource)
    assert len(ours) == 6
    for a, b in zip(ours.batch(np.array([5, 1])), theirs.batch(np.array([5, 1])), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize(
    ("given_", "fault"),
    [
        ((np.zeros((3, 2)), np.zeros(2)), "3 inputs and 2 labels"),
        ((np.zeros((0, 2)), np.zeros(0)), "0 inputs and 0 labels"),
        (7, "a int is neither arrays, such as .inputs, labels., nor a Dataset or DataLoader"),
        (csr_matrix(np.eye(2)), "a csr_matrix is neither arrays, such as .inputs, labels., nor a Dataset"),
        (TensorDataset(torch.zeros(0, 3), torch.zeros(0)), "holds no samples"),
        (LightningDataModule(), 'a LightningDataModule holds several; call setup."fit". and give its train_dataloader'),
    ],
)
def test_other_data_are_refused(given_: Any, fault: str) -> None:
    with pytest.raises(JobError, match=f"data: .*{fault}"):
        as_samples(given_)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ((np.float32(1.0), np.arange(1)), "the array of inputs is a single value"),
        ((np.array([None, 1], dtype=object), np.arange(2)), "the array of inputs holds object"),
        ((np.zeros((2, 2)), np.array(["a", "b"])), "the array of labels holds str32"),
        (([[1, 2], [3]], [0, 1]), "the inputs are no array"),
        ((MASKED, np.arange(2)), "the array of inputs holds masked values, which are no numbers; fill them, such as"),
        ((np.eye(2), MASKED), "the array of labels holds masked values"),
        ({"x": MASKED, "labels": np.arange(2)}, "the array of x holds masked values"),
    ],
)
def test_arrays_at_hand_that_hold_no_samples_are_refused(data: Any, fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        as_samples(data)


# --- several arrays, tables, DataLoaders ------------------------------------------------------------------------------


def test_arrays_by_name_give_batches_by_name() -> None:
    ids, mask = np.arange(12).reshape(4, 3), np.ones((4, 3), bool)
    samples = as_samples({"input_ids": ids, "attention_mask": mask, "labels": np.arange(4, dtype=np.uint8)})
    inputs, target = samples.batch(np.array([3, 1]))
    assert target is inputs
    assert inputs["input_ids"].tolist() == ids[[3, 1]].tolist()
    assert (inputs["attention_mask"].dtype, inputs["labels"].dtype) == (torch.bool, torch.int64)
    assert len(samples) == 4


@pytest.mark.parametrize(
    "data",
    [
        ((np.zeros((3, 2)), np.ones((3, 1))), np.arange(3)),
        (torch.zeros(3, 2), torch.ones(3, 1), torch.arange(3)),
    ],
)
def test_a_tuple_of_arrays_that_ends_in_labels_gives_several_inputs(data: Any) -> None:
    inputs, labels = as_samples(data).batch(np.array([2]))
    assert [part.tolist() for part in inputs] == [[[0, 0]], [[1]]]
    assert labels.tolist() == [2]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"a": np.zeros((3, 2)), "labels": np.zeros(2)}, "a has 3 samples and labels 2; there should be as many"),
        (((np.zeros((3, 2)), np.zeros((2, 2))), np.zeros(3)), r"\[0\] has 3 samples and \[1\] 2; there should be"),
        ({"a": np.array(["x"])}, "the array of a holds str32"),
        ({}, "holds no arrays"),
        ((SPARSE, np.zeros((2, 1)), np.zeros(2)), r"the inputs\[0\] are a sparse matrix, as only the inputs of"),
        ({"a": SPARSE, "labels": np.zeros(2)}, "the a are a sparse matrix, as only the inputs of"),
        ({"a": dok_array(SPARSE), "labels": np.zeros(2)}, "the a are a sparse matrix, as only the inputs of"),
        ((np.zeros((2, 1)), SPARSE), "the labels are a sparse matrix, as only the inputs of"),
        (
            {"train": TensorDataset(torch.zeros(2)), "test": TensorDataset(torch.zeros(2))},
            "give one as train and",
        ),
    ],
)
def test_several_arrays_that_do_not_fit_are_refused_by_name(data: Any, fault: str) -> None:
    with pytest.raises(JobError, match=f"data: .*{fault}"):
        as_samples(data)


def test_half_precision_tensors_become_floats() -> None:
    x, y = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor([3])
    for samples in (as_samples((x, y)), as_samples([(x[0], y[0])] * 3), as_samples((x.half(), y))):
        inputs, labels = samples.batch(np.array([0]))
        assert (inputs.dtype, inputs.tolist(), labels.tolist()) == (torch.float32, [[1.5, -2.0]], [3])


def test_a_dataloader_gives_its_dataset_its_batch_size_and_its_collate_fn() -> None:
    def double(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]) * 2, torch.stack([y for _, y in items])

    dataset = TensorDataset(torch.ones(6, 3), torch.arange(6))
    samples = as_samples(DataLoader(dataset, batch_size=4, collate_fn=double, shuffle=True, num_workers=2))
    assert isinstance(samples, MapStyleSource)
    assert samples.loading == Loading(batch_size=4, num_workers=2)
    inputs, labels = samples.batch(np.array([5, 0]))
    assert inputs.tolist() == [[2.0] * 3] * 2
    assert labels.tolist() == [5, 0]
    plain = as_samples(DataLoader(dataset, batch_size=4))
    assert isinstance(plain, MapStyleSource)
    assert plain.collate is None
    assert plain.loading.sampler is not None  # in order, as it would


def test_a_dataloader_s_distributed_sampler_is_left_out_and_told() -> None:
    dataset = TensorDataset(torch.ones(6, 3), torch.arange(6))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    samples = as_samples(DataLoader(dataset, sampler=sampler, batch_size=2))
    assert isinstance(samples, MapStyleSource)
    assert samples.loading.sampler is None
    assert samples.loading.notes == (
        "data: DistributedSampler is left out: every subnet gets its part of the samples anyway",
    )


def test_a_collate_fn_is_refused_for_arrays_and_a_dataloader_without_batch_size_too() -> None:
    with pytest.raises(JobError, match="collate_fn: is for the items of a Dataset, and the data are arrays; leave it"):
        as_samples((np.zeros((2, 2)), np.zeros(2)), lambda items: items)
    with pytest.raises(JobError, match="the DataLoader has batch_size=None; give it one"):
        as_samples(DataLoader(TensorDataset(torch.zeros(2)), batch_size=None))


@pytest.mark.parametrize("kind", [list, dict, DataLoader])
def test_a_factory_may_return_datasets_loaders_or_training_data_alone(kind: Any) -> None:
    dataset = TensorDataset(torch.ones(6, 3), torch.arange(6))

    def both() -> Any:
        return [dataset, dataset] if kind is list else {"train": dataset, "test": dataset}

    made = FactorySource(both if kind is not DataLoader else lambda: DataLoader(dataset, batch_size=3), 0)
    assert len(made.open()) == 6
    assert (made.parts()[1] is None) is (kind is DataLoader)


@dataclass
class Named:
    """Arrays in a dataclass."""

    x: Any
    label: Any


@pytest.mark.parametrize(
    "given_",
    [(torch.arange(6.0).view(3, 2),), (np.arange(6.0).reshape(3, 2),)],
    ids=["tensor", "array"],
)
def test_inputs_alone_are_their_own_target(given_: Any) -> None:
    samples = as_samples(given_)
    assert len(samples) == 3
    inputs, target = samples.batch(np.array([2, 0]))
    assert inputs.tolist() == [[4, 5], [0, 1]]
    assert target is inputs


@pytest.mark.parametrize(("alone", "kind"), [(torch.eye(3), "tensor"), (np.eye(3), "array")])
def test_an_array_that_does_not_say_that_it_is_its_own_target_is_refused(alone: Any, kind: str) -> None:
    with pytest.raises(JobError, match=rf"data: the {kind} has no labels; give \(x, y\), or \(x,\) if x is its own"):
        as_samples(alone)


@pytest.mark.parametrize("items", [TensorDataset(torch.eye(3)), [row.numpy() for row in torch.eye(3)]])
def test_items_without_a_label_are_their_own_target(items: Any) -> None:
    inputs, target = as_samples(items).batch(np.array([1]))
    assert inputs.tolist() == [[0, 1, 0]]
    assert target is inputs


def test_arrays_in_a_dataclass_and_in_containers_within_others_are_batches_of_the_same_form() -> None:
    x, label = torch.arange(8.0).view(4, 2), torch.arange(4)
    whole, target = as_samples(Named(x, label)).batch(np.array([3]))
    assert isinstance(whole, Named)
    assert (whole.x.tolist(), whole.label.tolist()) == ([[6, 7]], [3])
    assert target is whole
    whole, target = as_samples({"in": {"x": x, "parts": (x, x.int())}, "labels": label}).batch(np.array([1]))
    assert whole["in"]["x"].tolist() == [[2, 3]]
    assert whole["in"]["parts"][1].dtype == torch.int64
    assert target is whole
    with pytest.raises(JobError, match=r"in\.x has 4 samples and labels 3"):
        as_samples({"in": {"x": x}, "labels": label[:3]})


def test_arrays_in_containers_are_stored_in_files_and_read_back(tmp_path: Any) -> None:
    data = RunData(Named(torch.eye(3), torch.arange(3)), tmp_path / "run" / "data" / "train")
    data.write()
    elsewhere = pickle.loads(pickle.dumps(data)).open()
    whole, _ = elsewhere.batch(np.array([2]))
    assert (whole.x.tolist(), whole.label.tolist()) == ([[0, 0, 1]], [2])


def test_several_datasets_by_name_are_told_to_be_given_one_by_one() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0]], "label": [0]})
    for several in (datasets.DatasetDict(train=rows, test=rows), {"train": TensorDataset(torch.eye(3)), "test": rows}):
        with pytest.raises(JobError, match="holds the Datasets 'train', 'test'; give one as train and one as test"):
            as_samples(several)
