"""Modules, data and losses that would fail on workers are refused where the job is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.checks import SCAN_ITEMS, TRIAL_SAMPLES
from idletrain.nn.data.arrays import MapStyleSource
from idletrain.nn.memory import subnet_need
from idletrain.nn.prepare import Prepared, prepare

X, Y = np.random.default_rng(0).normal(size=(600, 6)).astype(np.float32), np.arange(600) % 3


class Items:
    """A map-style Dataset of what a function makes of a number."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def prepared(
    module: nn.Module,
    train: Any = None,
    test: Any = None,
    table: Mapping[str, Sequence[str | None]] | None = None,
    loss: Any = "cross_entropy",
    **asked: Any,
) -> Prepared:
    training = TrainingSettings.model_validate({"subnets": 2, "batch_size": 4, **asked})
    return prepare(module, train or Given(X, Y), test, loss, training, table=table)


def fault(module: nn.Module | None = None, *data: Any, **asked: Any) -> str:
    with pytest.raises(JobError) as caught:
        prepared(module or mlp(), *data, **asked)
    (only,) = caught.value.faults
    return only


class Around(nn.Module):
    """A network of two layers with a forward of the test's own."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("shift", torch.ones(6))
        self.scale = torch.ones(6)
        self.use = forward

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def through(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.last(torch.relu(self.first(x)))
    return y


# --- a forward that is more than layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ist", "local-sgd"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: through(self, x + self.shift),
        lambda self, x: through(self, x * self.scale),
        lambda self, x: through(self, x + torch.arange(6)),
    ],
    ids=["a buffer", "a plain tensor", "a tensor made in forward"],
)
def test_a_forward_that_uses_tensors_of_its_own_is_cut_and_measured(forward: Any, method: str) -> None:
    """As positional encodings and causal masks are."""
    got = prepared(Around(forward), method=method)
    assert got.program.layout.sizes == ((8,) if method == "ist" else ())
    assert subnet_need(got.program)(0.5) > 0
    assert [b.device.type for b in got.program.module.buffers()] == ["cpu"]


@pytest.mark.parametrize("method", ["ist", "local-sgd"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: through(self, x) * x.sum().item(),
        lambda self, x: through(self, x if x.sum() > 0 else -x),
    ],
    ids=["item", "if"],
)
def test_a_forward_that_looks_at_values_is_refused(forward: Any, method: str) -> None:
    told = fault(Around(forward), method=method)
    assert told.startswith("model: cannot be traced (")
    assert told.endswith("its forward should not look at values, as .item() and if do")


def broken_assertion(self: Any, x: Tensor) -> Tensor:
    assert x.shape[1] == 7
    return x


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (broken_assertion, "AssertionError"),
        (lambda self, x: self.middle(x), "AttributeError: 'Around' object has no attribute 'middle'"),
        (lambda self, _x: vars(self)["middle"], "KeyError: 'middle'"),
    ],
)
def test_whatever_forward_raises_is_a_fault_of_the_job(forward: Any, reason: str) -> None:
    assert fault(Around(forward)).startswith(f"model: does not take inputs of shape [6]: {reason}")


@pytest.mark.parametrize(("outputs", "kind"), [(lambda y: (y, y), "tuple"), (lambda y: {"logits": y}, "dict")])
def test_outputs_that_are_not_one_tensor(outputs: Any, kind: str) -> None:
    told = fault(Around(lambda self, x: outputs(through(self, x))))
    assert told == f"model: its forward returns a {kind}; it should return one tensor"


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", [lambda i: X[i], lambda i: (X[i], Y[i], i), lambda i: X[i][0], lambda i: {}[i]])
def test_items_of_a_dataset_that_are_no_pairs(item: Any) -> None:
    assert fault(None, MapStyleSource(Items(item))).startswith("data.train: its samples cannot be read (")


def test_test_data_of_another_shape_than_the_training_data() -> None:
    assert fault(None, None, Given(X[:, :5], Y)).startswith("data.test: the model does not take [5]: mat1 and mat2")


def test_test_labels_of_another_shape_than_the_training_labels() -> None:
    told = fault(None, None, Given(X, Y[:, None]))
    assert told == (
        "training.loss: cross_entropy does not fit outputs [2, 3] and labels [2, 1] of torch.int64: "
        "labels should be [2], the number of a class each"
    )


def test_nan_and_labels_beyond_the_outputs_of_a_dataset() -> None:
    last = len(X) - 1
    nan = MapStyleSource(Items(lambda i: (X[i] * np.float32(np.nan if i == last else 1), Y[i])))
    assert fault(None, nan) == f"data.train: its inputs hold NaN or infinity after row {last}; clean the data"
    beyond = MapStyleSource(Items(lambda i: (X[i], 9 if i == last else Y[i])))
    assert fault(None, None, beyond) == "data.test: label 9 is beyond the model's 3 outputs, 0 to 2"


def test_a_large_dataset_is_read_in_part() -> None:
    read: set[int] = set()

    def item(i: int) -> Any:
        read.add(i)
        return X[i], Y[i]

    prepared(mlp(), MapStyleSource(Items(item)))
    assert SCAN_ITEMS <= len(read) <= SCAN_ITEMS + TRIAL_SAMPLES


def test_faults_that_have_nothing_to_do_with_each_other_are_told_at_once() -> None:
    x = X.copy()
    x[7, 0] = np.nan
    with pytest.raises(JobError) as caught:
        prepared(nn.Linear(5, 3), Given(x, Y), Given(X, np.full(600, np.inf)), loss="nil")
    assert [f.split(":")[0] for f in caught.value.faults] == ["training.loss", "data.train", "model", "data.test"]


# --- losses and tables ------------------------------------------------------------------------------------------------


def test_a_loss_that_is_neither_name_nor_function() -> None:
    assert fault(loss=3) == "training.loss: 3 should be a name or a function (outputs, labels) -> scalar"


def test_a_loss_of_one_s_own_is_named_where_it_does_not_fit() -> None:
    def own(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyError("weight")

    assert fault(loss=own).startswith("training.loss: own does not fit outputs [2, 3] and labels [2] of torch.int64: K")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"0.weight": ("g", None), "2.weight": (None, "g")}, "model.groups: a subnet does not run ("),
        ({"0.weight": ("g", None), "0.bias": ("g",)}, "model.groups: a subnet does not run ("),
        (
            {"2.weight": ("o", None), "2.bias": ("o",)},
            "model.groups: a subnet's outputs for two samples are [2, 2], the network's [2, 3]; ",
        ),
    ],
    ids=["a bias is forgotten", "the next layer is forgotten", "outputs are cut"],
)
def test_a_table_of_groups_whose_subnets_do_not_run(table: Any, told: str) -> None:
    assert fault(table=table).startswith(told)


def test_a_table_of_groups_whose_subnets_run() -> None:
    table = {"0.weight": ("g", None), "0.bias": ("g",), "2.weight": (None, "g")}
    assert prepared(mlp(), table=table).program.layout.sizes == (8,)
