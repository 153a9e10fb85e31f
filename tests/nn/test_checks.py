"""Modules, data and losses that would fail on workers are refused where the job is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.checks import FEW_SAMPLES, SCAN_ITEMS, TRIAL_SAMPLES, check_finite, check_loss, trial_size
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.memory import subnet_need
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.program import cross_entropy, model_loss

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
def test_a_forward_that_looks_at_values_is_cut_and_measured_with_values(forward: Any, method: str) -> None:
    got = prepared(Around(forward), method=method)
    assert got.program.layout.sizes == ((8,) if method == "ist" else ())
    plain = prepared(Around(through), method=method)
    assert subnet_need(got.program)(0.5) == subnet_need(plain.program)(0.5)


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
    line = forward.__code__.co_firstlineno + (forward is broken_assertion)
    place = f"{forward.__name__} at {__file__}:{line} raised "
    assert fault(Around(forward)).startswith(f"model: does not take inputs of shape [6]: {place}{reason}")


@dataclass
class Output:
    state: Tensor
    logits: Tensor
    cache: object


@pytest.mark.parametrize(
    "outputs",
    [
        lambda y: (y, y.mean()),
        lambda y: [y],
        lambda y: {"loss": y.mean(), "logits": y},
        lambda y: Output(y.flatten(), y, object()),
    ],
    ids=["tuple", "list", "dict", "dataclass"],
)
def test_outputs_may_be_more_than_one_tensor(outputs: Any) -> None:
    plain, got = (
        prepared(Around(forward), batch_size=32) for forward in (through, lambda self, x: outputs(through(self, x)))
    )
    assert got.program.layout.sizes == plain.program.layout.sizes == (8,)
    assert [c.scaling for c in got.program.layout.contractions] == ["weights"]
    assert got.program.loss is plain.program.loss is cross_entropy


@pytest.mark.parametrize(("outputs", "kind"), [(lambda _: object(), "object"), (lambda _: {"n": 3}, "dict")])
def test_outputs_without_a_tensor(outputs: Any, kind: str) -> None:
    told = fault(Around(lambda self, x: outputs(through(self, x))))
    assert told.startswith(f"model: its forward returns a {kind}; it should return a tensor, or a tuple, dict or ")


def test_a_group_that_is_seen_in_a_second_output_stays_whole() -> None:
    got = prepared(Around(lambda self, x: (through(self, x), self.first(x))))
    assert got.program.layout.groups == ()
    assert "(first, last: its neurons are the network's outputs)" in got.fallback


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (lambda _: "a", "an item is a str"),
        (lambda i: X[i][0], "an item is a float32"),
        (lambda i: (X[i][0],), "an item is a float32"),
        (lambda _: (), "an item is a tuple"),
        (lambda i: {}[i], f"<lambda> at {__file__}:186 raised KeyError"),
        (lambda i: (X[i], Y[i], Y[i])[: 2 + (i == 0)], "items are tuples of several lengths"),
        (lambda i: {"x": X[i], "text": "a"}, "text holds str"),
        (lambda i: {"x": X[i], **({"more": 1} if i else {})}, "an item has other keys than the first, x"),
    ],
)
def test_items_of_a_dataset_that_are_no_samples(item: Any, reason: str) -> None:
    told = fault(None, MapStyleSource(Items(item)))
    assert told.startswith(f"data.train: its samples cannot be read ({reason}")


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        y: Tensor = self.last(torch.relu(self.first(x) + self.second(more)))
        return y


class TwoWithLoss(Two):
    """The same, with labels among its inputs, as Hugging Face's models take them."""

    def forward(self, x: Tensor, more: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(x, more)
        return {"loss": None if labels is None else functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Sample:
    x: Any
    more: Any
    labels: Any


@pytest.mark.parametrize(
    ("module", "item", "loss"),
    [
        (Two, lambda i: (X[i], X[i, :2], Y[i]), cross_entropy),
        (Two, lambda i: ({"more": X[i, :2], "x": X[i]}, Y[i]), cross_entropy),
        (Two, lambda i: {"x": X[i], "more": X[i, :2], "label": Y[i]}, cross_entropy),
        (TwoWithLoss, lambda i: {"x": X[i], "more": X[i, :2], "label": Y[i], "unused": i}, model_loss),
        (TwoWithLoss, lambda i: Sample(X[i], X[i, :2], Y[i]), model_loss),
    ],
    ids=["tuple", "dict and label", "dict with label", "dict with labels for the model", "dataclass"],
)
def test_a_module_of_several_inputs_is_cut_measured_and_trained(module: Any, item: Any, loss: Any) -> None:
    got = prepared(module(), MapStyleSource(Items(item)), loss=None)
    assert got.program.layout.sizes == (8,)
    assert got.program.loss is loss
    assert subnet_need(got.program)(0.5) > 0


def test_labels_beyond_the_outputs_of_a_model_with_a_loss_of_its_own_are_found() -> None:
    last = len(X) - 1
    beyond = MapStyleSource(Items(lambda i: {"x": X[i], "more": X[i, :2], "label": 9 if i == last else Y[i]}))
    assert fault(TwoWithLoss(), beyond, loss=None) == "data.train: label 9 is beyond the model's 3 outputs, 0 to 2"


def test_parts_of_several_lengths_are_named() -> None:
    class Uneven(MapStyleSource):
        def batch(self, index: Any) -> Any:
            return (torch.zeros(len(index), 6), torch.zeros(len(index) + 1, 2)), torch.zeros(len(index))

    told = fault(Two(), Uneven(Items(None)))
    assert told == "data.train: of its inputs, [0] has 2 samples and [1] 3; there should be as many of each"


def test_a_model_without_the_loss_that_the_job_asks_of_it() -> None:
    told = fault(loss="model")
    assert told.startswith(
        "training.loss: model does not fit outputs [2, 3] and labels [2] of torch.int64: its outputs"
    )


def test_what_float32_cannot_hold_is_told_as_that_without_a_warning() -> None:
    large = X.astype(np.float64)
    large[3, 0] = -1e300
    assert fault(None, Given(large, Y)) == (
        "data.train: its inputs hold NaN or infinity, as float32, in row 3; clean the data"
    )


def test_a_test_set_that_does_not_fit_the_default_loss_is_told_by_the_loss_s_name() -> None:
    assert fault(None, None, Given(X, Y.astype(np.float32)), loss=None).startswith(
        "training.loss: cross_entropy does not fit outputs [2, 3] and labels [2] of torch.float32: "
    )


def test_a_nan_in_a_part_is_told_by_its_name() -> None:
    nan = MapStyleSource(Items(lambda i: {"x": X[i] * np.nan, "more": X[i, :2], "label": Y[i]}))
    assert fault(Two(), nan, loss=None) == "data.train: its inputs x hold NaN or infinity in row 0; clean the data"


def test_test_data_of_another_shape_than_the_training_data() -> None:
    assert fault(None, None, Given(X[:, :5], Y)).startswith("data.test: the model does not take [5]: mat1 and mat2")


def test_test_labels_of_another_shape_than_the_training_labels() -> None:
    told = fault(None, None, Given(X, Y[:, None]))
    assert told == (
        "training.loss: cross_entropy does not fit outputs [2, 3] and labels [2, 1] of torch.int64: "
        "labels should be [2], the number of a class each; give labels[..., 0]"
    )


def test_classes_that_are_no_whole_numbers_are_refused_with_what_to_do() -> None:
    told = fault(None, Given(X, Y.astype(np.float32)))
    assert told.endswith("of torch.float32: the number of a class is a whole number: give labels.long()")


@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits", "mse"])
def test_a_batch_by_name_without_labels_is_told_what_to_call_them(loss: str) -> None:
    told = fault(Two(), MapStyleSource(Items(lambda i: {"x": X[i], "more": X[i, :2], "target": Y[i]})), loss=loss)
    assert told.endswith(": call its labels `labels`, or use a function (outputs, batch) -> scalar")


def test_whole_numbers_for_a_layer_of_floats_are_told_as_such() -> None:
    told = fault(None, Given(X.astype(np.int64), Y))
    assert told.endswith("; they are whole numbers: give floats, such as x.float(), to layers that take those")


def test_a_loss_without_a_gradient_and_a_class_of_losses_are_refused() -> None:
    def cut_off(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels).detach()

    assert fault(None, Given(X, Y), loss=cut_off) == (
        "training.loss: cut_off returns a number without a gradient; leave out detach() and torch.no_grad() in it"
    )
    told = fault(None, Given(X, Y), loss=nn.CrossEntropyLoss)
    assert told == "training.loss: CrossEntropyLoss is a class; give an instance, CrossEntropyLoss()"


def test_a_loss_for_each_sample_is_refused_of_batches_of_one_sample_too() -> None:
    each = nn.CrossEntropyLoss(reduction="none")
    for size in (1, 2):
        assert fault(None, Given(X, Y), loss=each, batch_size=size).endswith("; return one number, such as its mean()")


def test_classes_in_the_second_dimension_are_refused_with_a_loss_that_takes_them() -> None:
    outputs, labels = torch.zeros(2, 3, 5, 5, requires_grad=True), torch.zeros(2, 5, 5, dtype=torch.int64)
    with pytest.raises(JobError, match=r"classes last; for classes second, use torch\.nn\.functional\.cross_entropy$"):
        check_loss(cross_entropy, "cross_entropy", outputs, (None, labels))
    check_loss(nn.functional.cross_entropy, "cross_entropy", outputs, (torch.zeros(2, 3), labels))


def test_a_collate_fn_that_fails_is_told_once_with_its_place() -> None:
    def collate(_items: Any) -> Any:
        raise KeyError("tokens")

    line = collate.__code__.co_firstlineno + 1
    told = fault(None, MapStyleSource(Items(lambda i: (X[i], Y[i])), collate))
    assert told.startswith(
        f"data.train: its samples cannot be read (collate at {__file__}:{line} raised KeyError: 'tokens'); collate_fn"
    )


def test_labels_that_begin_at_1_are_refused_with_the_shift() -> None:
    assert fault(None, Given(X, Y + 1)) == (
        "data.train: label 3 is beyond the model's 3 outputs, 0 to 2; they begin at 1: subtract 1 from each"
    )
    assert fault(None, Given(X, Y * 2)) == "data.train: label 4 is beyond the model's 3 outputs, 0 to 2"


def test_labels_that_begin_at_1_are_refused_with_the_shift_wherever_the_last_class_is() -> None:
    labels = Y.copy()
    labels[:2] = 2  # the samples that the loss is tried on
    told = "data.train: label 3 is beyond the model's 3 outputs, 0 to 2; they begin at 1: subtract 1 from each"
    assert fault(None, Given(X, labels + 1)) == told


def test_a_collate_fn_s_inputs_and_labels_of_several_lengths_are_both_named() -> None:
    def longer(items: list[Any]) -> Any:
        return torch.tensor(np.stack([x for x, _ in items] * 2)), torch.tensor([int(y) for _, y in items])

    told = fault(None, MapStyleSource(Items(lambda i: (X[i], Y[i])), longer))
    assert told == (
        "training.loss: cross_entropy does not fit outputs [4, 3] and labels [2] of torch.int64 (of the batch, "
        "inputs has 4 samples and labels 2): labels should be [4], the number of a class each"
    )


def test_several_labels_a_sample_without_a_loss_that_takes_them_are_refused_with_one_that_does() -> None:
    told = fault(None, Given(X, np.eye(3, dtype=np.int64)[Y]))
    assert told.endswith(
        "; or name mse, if they are numbers, or bce_with_logits, if a sample may have several of these labels"
    )
    prepared(mlp(), Given(X, np.eye(3, dtype=np.int64)[Y]), loss="bce_with_logits")


def test_nan_and_labels_beyond_the_outputs_of_a_dataset() -> None:
    last = len(X) - 1
    nan = MapStyleSource(Items(lambda i: (X[i] * np.float32(np.nan if i == last else 1), Y[i])))
    assert fault(None, nan) == f"data.train: its inputs hold NaN or infinity in row {last}; clean the data"
    beyond = MapStyleSource(Items(lambda i: (X[i], 9 if i == last else Y[i])))
    assert fault(None, None, beyond) == "data.test: label 9 is beyond the model's 3 outputs, 0 to 2"


def test_a_large_dataset_is_read_in_part() -> None:
    read: set[int] = set()

    def item(i: int) -> Any:
        read.add(i)
        return X[i], Y[i]

    prepared(mlp(), MapStyleSource(Items(item)))
    assert SCAN_ITEMS <= len(read) <= SCAN_ITEMS + TRIAL_SAMPLES


def test_a_large_network_is_tried_on_few_samples_unless_it_takes_their_statistics() -> None:
    large = nn.Linear(4000, 4000, device="meta")
    assert trial_size(nn.Linear(6, 3)) == TRIAL_SAMPLES
    assert trial_size(large) == FEW_SAMPLES < TRIAL_SAMPLES
    assert trial_size(nn.Sequential(large, nn.BatchNorm1d(4000, device="meta"))) == TRIAL_SAMPLES


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

    told, place = fault(loss=own), f"own at {__file__}:{own.__code__.co_firstlineno + 1}"
    given = "outputs [2, 3] and labels [2] of torch.int64"
    assert told.startswith(f"training.loss: own does not fit {given}: {place} raised KeyError: 'weight'")


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


def test_a_nan_in_an_item_of_several_rows_is_named_by_the_item() -> None:
    def by_time(items: list[Any]) -> Any:
        return torch.stack([torch.tensor(x) for x, _ in items], 1), torch.tensor([int(y) for _, y in items])

    sequences = np.zeros((5, 7, 4), np.float32)
    sequences[3, 6, 2] = np.nan
    samples = MapStyleSource([(x, i % 3) for i, x in enumerate(sequences)], by_time)
    with pytest.raises(JobError, match="its inputs hold NaN or infinity in row 3; clean the data"):
        check_finite(samples, "data.train")


@pytest.mark.parametrize("first", [0, 2])
def test_labels_from_1_of_a_model_with_a_loss_of_its_own_are_refused_with_the_shift_alone(first: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Any, labels: Any = None) -> Any:
            logits = self.last(self.norm(x))
            return {"logits": logits} | ({} if labels is None else {"loss": functional.cross_entropy(logits, labels)})

    labels = np.array([first, first, 0, 1, 2, 2, 1, 0])  # at first, too, where the module is tried
    items = [{"x": np.ones(4, np.float32), "labels": int(label) + 1} for label in labels]
    with pytest.raises(JobError) as refused:
        prepare(Own(), MapStyleSource(items), None, None, TrainingSettings(subnets=1))
    told = "data.train: label 3 is beyond the model's 3 outputs, 0 to 2; they begin at 1: subtract 1 from each"
    assert refused.value.faults == (told,)


LABELS_OF_ONE_COLUMN = "; give labels[:, None] as labels, or return outputs.squeeze(-1)"


@pytest.mark.parametrize(
    ("outputs", "labels", "loss", "told"),
    [
        (1, (24,), "mse", f"they should have one shape{LABELS_OF_ONE_COLUMN}"),
        (1, (24, 1), "cross_entropy", "it is for classes; for regression name mse"),
        (1, (24,), "cross_entropy", "it is for classes; for regression name mse"),
        (2, (24, 3), "mse", "they should have one shape"),
        (1, (24,), "bce_with_logits", f"they should have one shape{LABELS_OF_ONE_COLUMN}"),
    ],
)
def test_regression_with_odd_shapes_or_the_default_loss_is_told_what_to_do(
    outputs: int, labels: tuple[int, ...], loss: str, told: str
) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))
    y = np.zeros(labels, np.float32)
    assert fault(module, Given(X[:24], y), loss=loss).endswith(f": {told}")


def test_a_caller_s_no_grad_is_no_fault_of_the_module_or_the_loss() -> None:
    with torch.no_grad():
        assert prepared(mlp()).program.loss is cross_entropy
