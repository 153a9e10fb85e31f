"""Batches of every form are joined, measured, moved and given to modules by what their forward takes."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from idletrain.nn.data import batches
from idletrain.nn.data.csr import Rows
from idletrain.nn.data.datasets import MapStyleSource

ROWS = Rows(torch.tensor([0, 1, 2]), torch.tensor([4, 5]))


@dataclass(frozen=True)
class Sample:
    x: Any
    y: Any


class Pair(NamedTuple):
    x: Any
    y: Any


def module(forward: Any) -> nn.Module:
    made = nn.Module()
    made.forward = forward
    return made


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [torch.ones(2), ROWS], ids=["tensor", "rows"])
def test_one_part_is_the_only_argument(inputs: Any) -> None:
    assert batches.call(module(lambda x, scale=1: (x, scale)), inputs) == (inputs, 1)


def test_a_tuple_is_one_argument_each() -> None:
    assert batches.call(module(lambda x, y: (x, y)), (1, 2)) == (1, 2)
    assert batches.call(module(lambda x, y: (x, y)), Pair(1, 2)) == (1, 2)


@pytest.mark.parametrize(
    "inputs", [{"x": 1, "y": 2}, UserDict(x=1, y=2), Sample(1, 2)], ids=["dict", "mapping", "dataclass"]
)
@pytest.mark.parametrize(
    ("forward", "got"),
    [
        (lambda y, x: (x, y), (1, 2)),
        (lambda *, x, y=0, z=0: (x, y, z), (1, 2, 0)),
        (lambda x: x, 1),
        (lambda **parts: sorted(parts.items()), [("x", 1), ("y", 2)]),
        (lambda x, **rest: (x, rest), (1, {"y": 2})),
        (lambda x=0, z=0: (x, z), (1, 0)),
    ],
    ids=["all", "by name only", "some", "any", "one and any", "defaults"],
)
def test_parts_go_by_name(forward: Any, got: Any, inputs: Any) -> None:
    assert batches.call(module(forward), inputs) == got


@pytest.mark.parametrize("inputs", [{"x": 1}, Sample(1, 2)])
def test_the_whole_goes_to_the_one_argument_of_another_name(inputs: Any) -> None:
    assert batches.call(module(lambda batch, scale=1: batch), inputs) is inputs  # noqa: ARG005


def test_a_label_goes_as_labels_only_where_forward_takes_that() -> None:
    given = {"x": 1, "label": 2}
    assert batches.call(module(lambda x, labels=None: (x, labels)), given) == (1, 2)
    assert batches.call(module(lambda labels: labels), given) == 2
    assert batches.call(module(lambda x, label: (x, label)), given) == (1, 2)
    assert batches.call(module(lambda x: x), given) == 1
    assert given == {"x": 1, "label": 2}


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3), [torch.zeros(2)]),
        {"x": torch.ones(2, 3), "n": 3},
        OrderedDict(x=torch.ones(2, 3)),
        Sample(torch.ones(2, 3), None),
        Pair({"x": torch.ones(2, 3)}, Sample(1, torch.zeros(2))),
    ],
)
def test_tensors_are_found_and_replaced_in_containers_that_stay_what_they_are(tree: Any) -> None:
    changed = batches.map_parts(lambda part: part + 1, tree)
    assert type(changed) is type(tree)
    assert all(
        torch.equal(a, b + 1) for a, b in zip(batches.tensors_of(changed), batches.tensors_of(tree), strict=True)
    )
    assert batches.length(tree) == 2


def test_what_other_objects_hold_is_no_part() -> None:
    class Cache:
        keys = torch.ones(3)

    assert batches.tensors_of({"x": torch.ones(2), "cache": Cache(), "caches": (Cache(),)})[0].shape == (2,)
    assert len(batches.tensors_of((Cache(), {"x": Cache()}))) == 0


def test_inputs_and_target_that_are_one_object_stay_one() -> None:
    whole = {"x": torch.ones(2)}
    inputs, target = batches.moved((whole, whole), "meta")
    assert inputs is target
    assert batches.device_of(inputs).type == "meta"
    inputs, target = batches.moved((ROWS, torch.ones(2)), "meta")
    assert batches.device_of(inputs).type == target.device.type == "meta"


def test_items_are_joined_part_by_part() -> None:
    def join(name: str, parts: Any) -> Any:
        return name, list(parts)

    assert batches.stacked([1, 2], join) == ("", [1, 2])
    assert batches.stacked([{"a": 1, "b": (2, 3)}, {"a": 4, "b": (5, 6)}], join) == {
        "a": ("a", [1, 4]),
        "b": (("b[0]", [2, 5]), ("b[1]", [3, 6])),
    }
    assert batches.stacked([Sample(1, 2), Sample(3, 4)], join) == Sample(("x", [1, 3]), ("y", [2, 4]))
    assert batches.stacked([[1, 2], [3, 4]], join) == ("", [[1, 2], [3, 4]])


def test_arrays_in_a_list_are_parts_of_their_own_as_for_a_dataloader() -> None:
    items = [([torch.ones(2), torch.ones(3)], k) for k in range(4)]
    views, _ = MapStyleSource(items).batch(np.arange(4))
    assert [view.shape for view in views] == [part.shape for part in default_collate(items)[0]]


def test_lengths_that_differ_are_named() -> None:
    assert batches.uneven({"x": torch.ones(2), "y": (torch.ones(3),)}) == "x has 2 samples and y[0] 3"
    assert batches.uneven({"x": torch.ones(2), "y": torch.ones(()), "z": ROWS}) == ""


def test_shapes_are_told_by_name() -> None:
    assert batches.described(torch.ones(2, 3)) == "[2, 3]"
    assert batches.described({"x": torch.ones(2, 3), "y": (torch.ones(2),)}, first=1) == "{x: [3], y[0]: []}"


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outputs",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3), torch.zeros(2, 4)),
        {"loss": torch.ones(()), "state": torch.zeros(4), "logits": torch.ones(2, 3)},
        {"loss": torch.ones(()), "y": torch.ones(2, 3)},
    ],
)
def test_the_prediction_is_the_logits_or_the_first_tensor_that_is_no_loss(outputs: Any) -> None:
    found: Tensor = batches.prediction(outputs)
    assert torch.equal(found, torch.ones(2, 3))


def test_labels_are_the_target_or_stand_in_it_by_name() -> None:
    labels = np.arange(3)
    assert batches.labels_of(labels) is labels
    assert batches.labels_of({"x": 1, "label": labels}) is labels
    assert batches.labels_of({"x": 1, "labels": labels, "label": None}) is labels
    assert batches.labels_of({"x": 1}) is None


def test_some_samples_of_a_batch_are_cut_out_of_all_its_parts() -> None:
    named = {"x": torch.arange(6).view(3, 2), "size": torch.tensor(3), "labels": torch.arange(3)}
    inputs, target = batches.rows_of((named, named), 1, 3)
    assert target is inputs
    assert (inputs["x"].tolist(), int(inputs["size"]), inputs["labels"].tolist()) == ([[2, 3], [4, 5]], 3, [1, 2])
    (first, second), labels = batches.rows_of(((torch.zeros(3, 1), torch.ones(3)), torch.arange(3)), 2, 9)
    assert (first.tolist(), second.tolist(), labels.tolist()) == ([[0]], [1], [2])


@pytest.mark.parametrize(
    ("inputs", "target", "samples", "joined"),
    [
        (torch.zeros(3, 2), torch.zeros(3), 3, False),
        (torch.zeros(7, 3, 2), torch.zeros(3), 3, True),  # by time
        ((torch.zeros(9, 2), torch.zeros(2, 12)), torch.zeros(4), 4, True),
        ({"x": torch.zeros(9, 2), "num_graphs": torch.tensor(4)}, torch.zeros(9), 4, True),  # a label for each node
        ((torch.zeros(3, 2), torch.tensor(1.0)), torch.zeros(3), 3, False),
        (torch.zeros(3, 2), torch.tensor(1.0), 3, False),
        (Rows(torch.tensor([0, 1, 1]), torch.tensor([4])), torch.zeros(2), 2, False),
    ],
)
def test_samples_are_counted_by_graphs_labels_or_rows(inputs: Any, target: Any, samples: int, joined: bool) -> None:
    assert batches.sample_count(inputs, target) == samples
    assert batches.is_joined(inputs, target) is joined


def test_a_batch_by_name_is_counted_by_its_labels_and_without_any_by_its_first_part() -> None:
    whole = {"x": torch.zeros(9, 2), "labels": torch.zeros(4)}
    assert batches.sample_count(whole, whole) == 4
    del whole["labels"]
    assert batches.sample_count(whole, whole) == 9
