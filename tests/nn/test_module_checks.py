"""Layers of every kind are trained, or refused by name."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import nn
from torch.nn.utils import parametrizations

from idletrain.errors import JobError
from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import assemble
from idletrain.nn.module_checks import COMPILED_NOTE, IN_CORE_NOTE, check_steps, uncompiled, unwrapped
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.program import cross_entropy, mse, sampled_softmax
from idletrain.nn.wide import SparseLinear

DATA = Given(np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32), np.arange(64) % 3)


def prepared(module: nn.Module, data: Any = DATA, **settings: Any) -> Prepared:
    training = TrainingSettings.model_validate({"subnets": 2, "batch_size": 4, **settings})
    return prepare(module, data, None, "cross_entropy", training)


def fault(module: nn.Module, data: Any = DATA, **settings: Any) -> str:
    with pytest.raises(JobError) as caught:
        prepared(module, data, **settings)
    (only,) = caught.value.faults
    return only


def test_lazy_layers_get_their_sizes_in_a_copy_with_the_same_values_every_time() -> None:
    module = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    first, second = prepared(module), prepared(module)
    assert [group.name for group in first.program.layout.groups] == ["0"]
    assert all(torch.equal(a, b) for a, b in zip(first.network, second.network, strict=True))
    assert isinstance(module[0].weight, nn.UninitializedParameter)


def test_a_lazy_layer_that_the_data_does_not_fit_is_refused() -> None:
    assert fault(nn.Sequential(nn.LazyConv2d(3, 3))).startswith("model: its lazy layers cannot take their sizes")


@pytest.mark.parametrize(
    "kind", [parametrizations.spectral_norm, parametrizations.orthogonal], ids=lambda k: k.__name__
)
def test_a_weight_that_needs_all_of_itself_keeps_its_inputs_and_outputs_whole_and_says_so(kind: Any) -> None:
    layers = [nn.Linear(6, 8), kind(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 3)]
    layout = prepared(nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))).program.layout
    assert [group.name for group in layout.groups] == ["4"]
    whole = dict(layout.kept_whole)
    assert all("2.weight is computed by" in whole[name] for name in ("0", "2"))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_cut_by_their_hidden_units(kind: Any) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.read, self.out = nn.Embedding(9, 4, padding_idx=0), kind(4, 64, 1), nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.out(self.read(self.tokens(x))[0].mean(1))
            return logits

    data = Given(np.random.default_rng(0).integers(0, 9, (64, 5)), np.arange(64) % 3)
    found = prepared(Reader(), data)
    assert {group.name: group.size for group in found.program.layout.groups} == {"tokens": 4, "read": 64}
    subnet = found.program.subnets(0, by_neurons([0.5, 0.5]))[0]
    narrow = assemble(found.program.module, subnet, torch.zeros(subnet.parameters))
    assert narrow.read.hidden_size == 32
    assert tuple(narrow(torch.zeros(3, 5, dtype=torch.long)).shape) == (3, 3)
    asked = prepared(Reader(), data, method="local-sgd")
    assert (asked.program.layout.groups, asked.fallback) == ((), "")


def test_outputs_without_a_gradient_are_refused() -> None:
    class Detached(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x).detach()

    assert "its outputs have no gradient" in fault(Detached(nn.Linear(6, 8), nn.Linear(8, 3)))


class Bag(nn.Module):
    """An embedding whose gradients are row-sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.words(x))
        return found


@pytest.mark.parametrize(
    ("module", "loss", "fields", "told"),
    [
        (
            nn.Linear(2, 2),
            mse,
            {"label_smoothing": 0.1},
            ["training.label_smoothing: is for loss: cross_entropy alone"],
        ),
        (nn.BatchNorm1d(2), cross_entropy, {"micro_batch": 2}, ["training.micro_batch: it is a BatchNorm, whose stat"]),
        (nn.BatchNorm1d(2), cross_entropy, {"micro_batch": 2, "ghost_batches": True}, []),
        (
            nn.BatchNorm1d(2).eval(),
            cross_entropy,
            {"micro_batch": 2},
            ["training.micro_batch: it is a BatchNorm, whos"],
        ),
        (nn.Sequential(nn.BatchNorm1d(2).eval()), cross_entropy, {"micro_batch": 2}, []),
        (nn.LayerNorm(2), cross_entropy, {"micro_batch": 2, "label_smoothing": 0.1}, []),
        (nn.LayerNorm(2), cross_entropy, {"micro_batch": 20, "batch_size": 20}, []),
        (
            nn.LayerNorm(2),
            cross_entropy,
            {"micro_batch": 60, "batch_size": 20},
            ["training.micro_batch: 60 is more than batch_size: 20"],
        ),
        (
            Bag(),
            cross_entropy,
            {"optimizer": {"name": "sgd", "lr": 1, "clip_norm": 1}},
            ["training.optimizer.clip_norm: the gradients of words are row-sparse and are not clipped; leave it out"],
        ),
        (
            nn.Sequential(SparseLinear(4, 8)),
            sampled_softmax,
            {"micro_batch": 2, "optimizer": {"name": "sgd", "lr": 1, "clip_norm": 1}},
            ["training.optimizer.clip_norm: the gradients of 0 are row-sp", "training.micro_batch: a very wide output"],
        ),
    ],
)
def test_settings_of_a_step_that_do_not_suit_the_module_are_told(
    module: nn.Module, loss: Any, fields: dict[str, Any], told: list[str]
) -> None:
    training = TrainingSettings.model_validate(fields)
    if not told:
        check_steps(module, loss, training)
        return
    with pytest.raises(JobError) as error:
        check_steps(module, loss, training)
    assert len(error.value.faults) == len(told)
    assert all(fault.startswith(start) for fault, start in zip(error.value.faults, told, strict=True))


def test_a_module_that_cannot_be_copied_is_refused_by_what_in_it() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    module[1].lock = threading.Lock()  # type: ignore[assignment]
    assert fault(module) == (
        "model.1.lock: a lock cannot be copied (cannot pickle '_thread.lock' object); leave it out, or create it where "
        "it is used"
    )


class InPlace(nn.Module):
    """Changes its input, as `nn.ReLU(inplace=True)` in front does, or works on a copy of it."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.copies = copies
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone() if self.copies else x
        logits: torch.Tensor = self.last(torch.relu(self.first(x.mul_(0.1).relu_())))
        return logits


def test_a_module_that_changes_its_input_is_tried_with_the_same_input_every_time() -> None:
    changing, copying = (prepared(InPlace(copies=copies), DATA) for copies in (False, True))
    assert changing.program.layout.contractions == copying.program.layout.contractions
    assert [c.scaling for c in changing.program.layout.contractions] == ["weights"]
    seen: list[float] = []

    def note(_module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if not inputs[0].is_meta:
            seen.append(float(inputs[0].sum()))

    module = InPlace(copies=False)
    module.register_forward_pre_hook(note)
    prepared(module, Given(np.ones((64, 6), np.float32), DATA.y))
    assert len(seen) > 4
    assert set(seen) == {2 * 6.0, 8 * 6.0}


class Half(nn.Module):
    """A module of which torch compiles one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = torch.compile(nn.Linear(6, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.relu(self.first(x)))
        return outputs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.parametrize("part", [False, True])
def test_what_torch_has_compiled_is_trained_as_it_was_written_and_said(part: bool) -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    module: Any = Half() if part else torch.compile(plain)
    made = prepared(module, method="ist", subnets=2)
    assert not any("_orig_mod" in name for name, _ in made.module.named_parameters())
    assert made.program.training.method == "ist"
    assert made.notes == (COMPILED_NOTE,)
    assert made.program.compiled_on == ()
    assert type(module.first if part else module).__name__ == "OptimizedModule"  # the caller's stays


def test_that_compiled_steps_are_for_networks_that_train_out_of_core_is_said() -> None:
    settings, memory = TrainingSettings(subnets=2, batch_size=4), MemorySettings(compile="auto")
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    made = prepare(plain, DATA, None, "cross_entropy", settings, memory=memory)
    assert (made.program.compiled_on, made.notes) == (("cpu",), ())
    clipping = TrainingSettings(subnets=2, batch_size=4, optimizer={"name": "sgd", "lr": 0.1, "clip_norm": 1.0})
    made = prepare(plain, DATA, None, "cross_entropy", clipping, memory=memory)
    assert (made.program.compiled_on, made.notes) == ((), (IN_CORE_NOTE,))
    settings = TrainingSettings(subnets=2, batch_size=4, compile=True)
    assert prepare(plain, DATA, None, "cross_entropy", settings).program.compiled_on == ("cpu", "cuda")


def test_a_module_without_compiled_parts_stays_the_caller_s() -> None:
    module = nn.Linear(6, 3)
    assert uncompiled(module) is module


def test_a_data_parallel_is_trained_as_the_module_that_it_holds() -> None:
    module = nn.Linear(6, 3)
    assert unwrapped(nn.DataParallel(module)) is unwrapped(module) is module


class Relative(nn.Module):
    """A layer with a table that takes its size from the first inputs; `again` makes it anew every time."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(6, 32), nn.Linear(32, 3), again
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) == 1:
            self.table = torch.linspace(0, 1, 6)
        elif self.again:
            self.table = torch.cat([self.table, self.table[-1:]])
        outputs: torch.Tensor = self.last(torch.relu(self.first(x + self.table[:6])))
        return outputs


def test_a_buffer_that_takes_its_shape_from_the_first_inputs_keeps_it() -> None:
    module = Relative().train()
    made = prepared(module, method="ist", subnets=2)
    assert (made.program.training.method, made.program.buffers) == ("ist", {})
    assert made.module.get_buffer("table").tolist() == torch.linspace(0, 1, 6).tolist()
    assert made.module.training
    assert len(module.table) == 1  # the caller's stays


def test_a_buffer_that_goes_on_to_change_its_shape_is_refused() -> None:
    assert fault(Relative(again=True)).startswith("model: buffer table changes its shape from [6] to [9] in training")
