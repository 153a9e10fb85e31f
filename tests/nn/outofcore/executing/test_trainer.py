"""Test steps by a plan that is made in the first step, and again when its prediction was wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from idletrain.nn.ist.subnets import ScaledInputs
from idletrain.nn.outofcore.executing import trainer
from idletrain.nn.outofcore.executing.execute import CHECKPOINT_BYTES
from idletrain.nn.outofcore.executing.trainer import Known, MemoryRoom, PlannedSteps
from idletrain.nn.outofcore.planning.plan import InfeasibleError
from idletrain.nn.outofcore.planning.profile import SwapLink
from outofcore.executing.test_weights import filled_state_file
from outofcore.networks import Case

STEPS = 5


def move(_number: int, p: nn.Parameter, _state: list[torch.Tensor]) -> None:
    assert p.grad is not None
    p.sub_(p.grad, alpha=0.1)


def planned(
    case: Case,
    module: nn.Module,
    scratch: Path,
    budget: int,
    known: Known | None = None,
    resident: int = 0,
    *,
    compiler_room: Callable[[], int] | None = None,
) -> PlannedSteps:
    state_file, room = filled_state_file(scratch, module, 1), MemoryRoom(budget, resident, scratch)
    return PlannedSteps(
        module, functional.cross_entropy, state_file, move, room, known=known, compiler_room=compiler_room
    )


def least(case: Case, scratch: Path) -> int:
    steps = planned(case, copy.deepcopy(case.module), scratch, 1 << 20)
    with pytest.raises(InfeasibleError) as raised:
        steps.step(case.x, case.y)
    steps.close()
    assert f"is {-(-raised.value.least_bytes // 2**20)} MiB (" in str(raised.value)
    return int(1.03 * raised.value.least_bytes)  # the next look finds other pages touched


def test_steps_have_the_bits_of_plain_ones_and_are_learnt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("residual")
    case.x, case.y = case.x.repeat(8, 1, 1, 1), case.y.repeat(8)  # what is saved then outweighs what looks differ by
    ours, plain = copy.deepcopy(case.module), copy.deepcopy(case.module)
    budget = least(case, tmp_path)
    assert budget > CHECKPOINT_BYTES
    known: Known = {}
    steps = planned(case, ours, tmp_path, budget, known)
    for module in (ours, plain):
        torch.manual_seed(3)
        for _ in range(STEPS):
            module.zero_grad()
            if module is ours:
                steps.step(case.x, case.y)
                continue
            case.loss(module(case.x)).backward()
            with torch.no_grad():
                for i, p in enumerate(module.parameters()):
                    move(i, p, [])
    assert steps.plan
    assert set(steps.plan.unit_modes) != {"K"}
    assert steps.swapped_bytes > 0
    steps.store(steps._state_file)
    steps.close()
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not any("forward" in vars(module) for module in ours.modules())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(trainer, "learn_profile", None)
    again = planned(case, copy.deepcopy(case.module), tmp_path, budget, known)
    again.step(case.x, case.y)
    again.close()


def test_without_a_compiler_steps_that_may_be_compiled_follow_a_plan_and_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    case = Case("residual")
    case.x, case.y = case.x.repeat(8, 1, 1, 1), case.y.repeat(8)
    budget = least(case, tmp_path)
    plain = copy.deepcopy(case.module)
    steps = planned(case, case.module, tmp_path, budget, compiler_room=lambda: 1 << 40)
    torch.manual_seed(3)
    for _ in range(STEPS):
        steps.step(case.x, case.y)
    steps.store(steps._state_file)
    steps.close()
    torch.manual_seed(3)
    for _ in range(STEPS):
        plain.zero_grad()
        case.loss(plain(case.x)).backward()
        with torch.no_grad():
            for i, p in enumerate(plain.parameters()):
                move(i, p, [])
    for (name, a), b in zip(case.module.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert steps.plan
    assert set(steps.plan.unit_modes) != {"K"}
    assert not steps.compiling
    assert len([message for message in caplog.messages if message.startswith("memory.compile: ")]) == 1


def test_units_may_be_named(tmp_path: Path) -> None:
    case = Case("mlp")
    known: Known = {}
    for _ in range(2):  # the second takes what the first learnt
        module = copy.deepcopy(case.module)
        state_file = filled_state_file(tmp_path, module, 1)
        room = MemoryRoom(1 << 30, 0, tmp_path)
        steps = PlannedSteps(module, functional.cross_entropy, state_file, move, room, known=known, units=("0", "2"))
        steps.step(case.x, case.y)
        assert steps.plan
        assert len(steps.plan.unit_modes) == 3  # and the loss
        steps.close()
    assert [prepared.names for prepared in known.values()] == [("0", "2")]


def test_a_profile_that_is_no_longer_true_is_taken_again(tmp_path: Path) -> None:
    case = Case("mlp")
    known: Known = {}
    module = copy.deepcopy(case.module)
    first = planned(case, module, tmp_path, 1 << 30, known)
    first.step(case.x, case.y)
    first.close()
    (shapes,) = known
    true = known[shapes].profile
    slow = tuple(
        replace(u, forward_seconds=9 * u.forward_seconds, backward_seconds=9 * u.backward_seconds) for u in true.units
    )
    known[shapes] = replace(known[shapes], profile=replace(true, units=slow))
    second = planned(case, module, tmp_path, 1 << 30, known)
    second.step(case.x, case.y)
    second.close()
    assert second.plans == 2  # the one it was given, and one by what it saw
    assert known[shapes].profile.compute_seconds < 0.7 * sum(u.forward_seconds + u.backward_seconds for u in slow)


def test_a_plan_that_a_corrected_profile_shows_to_be_slow_is_replaced(tmp_path: Path) -> None:
    case = Case("residual")
    case.x, case.y = case.x.repeat(8, 1, 1, 1), case.y.repeat(8)
    budget, known = least(case, tmp_path), dict[Any, Any]()
    first = planned(case, copy.deepcopy(case.module), tmp_path, budget, known)
    first.step(case.x, case.y)
    assert first.plan
    modes = (*"R" * (len(first.plan.unit_modes) - 1), "K")  # predictions alone count here, not whether it fits
    first.close()
    (shapes,) = known
    true = known[shapes].profile
    times = ("forward_seconds", "backward_seconds", "recompute_seconds")
    free = tuple(replace(u, **{name: getattr(u, name) / 1e6 for name in times}) for u in true.units)
    no_time = replace(true, units=free, link=SwapLink(1e11, 1e11))  # by which to recompute is quickest
    known[shapes] = replace(known[shapes], profile=no_time, plan=replace(first.plan, unit_modes=modes, streamed=False))
    module = copy.deepcopy(case.module)
    second = planned(case, module, tmp_path, budget, known)
    second.step(case.x, case.y)
    assert second.plan
    assert second.plan.unit_modes != modes
    second.step(case.x, case.y)  # which builds it
    second.close()


def test_a_budget_that_nothing_fits_is_reported_with_the_smallest_that_does(tmp_path: Path) -> None:
    case: Any = Case("mlp")
    steps = planned(case, case.module, tmp_path, 1 << 20)
    with pytest.raises(InfeasibleError, match=r"no plan fits 1.0 MiB: the smallest budget that one fits is"):
        steps.step(case.x, case.y)
    steps.close()


def assert_as_plain(steps: PlannedSteps, ours: nn.Module, plain: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Do STEPS steps by the plan and STEPS plain ones; the parameters then have the same bits."""
    for _ in range(STEPS):
        steps.step(x, y)
        functional.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for i, p in enumerate(plain.parameters()):
                move(i, p, [])
        plain.zero_grad()
    steps.store(steps._state_file)
    steps.close()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_that_is_used_outside_its_unit_stays_in_memory_and_right(tmp_path: Path) -> None:
    """A functional tie: nothing but the tensor itself tells that the first layer's weight is used again at the end."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.ReLU())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x) @ self.layers[0].weight.T

    torch.manual_seed(0)
    plain, x, y = Tied(), torch.randn(64, 48), torch.randint(48, (64,))
    ours = copy.deepcopy(plain)
    state_file = filled_state_file(tmp_path, ours, 1)
    steps = PlannedSteps(ours, functional.cross_entropy, state_file, move, MemoryRoom(1 << 30, 0, tmp_path))
    steps._choose_plan(x, y)
    assert steps._learnt
    assert steps._learnt.owners[0] is None
    assert steps._learnt.owners[2] is not None
    assert steps.plan
    steps.plan = replace(steps.plan, streamed=True)
    assert_as_plain(steps, ours, plain, x, y)


def test_a_layer_whose_inputs_are_scaled_computes_the_same_streamed_and_recomputed(tmp_path: Path) -> None:
    """As of tied embeddings, whose table is not scaled but what their other use adds up is."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.ReLU())]
    plain, x, y = nn.Sequential(*layers, nn.Linear(48, 10)), torch.randn(64, 48), torch.randint(10, (64,))
    plain[4].register_forward_pre_hook(ScaledInputs(torch.linspace(1, 4, 48), plain[4]))
    ours, unscaled = copy.deepcopy(plain), copy.deepcopy(plain)
    unscaled[4]._forward_pre_hooks.clear()
    assert not torch.equal(unscaled(x), plain(x))
    state_file = filled_state_file(tmp_path, ours, 1)
    steps = PlannedSteps(ours, functional.cross_entropy, state_file, move, MemoryRoom(1 << 30, 0, tmp_path))
    steps._choose_plan(x, y)
    assert steps.plan
    units = len(steps.plan.unit_modes) - 1
    steps.plan = replace(
        steps.plan, unit_modes=("K", *"R" * (units - 2), "K", steps.plan.unit_modes[-1]), streamed=True
    )
    assert_as_plain(steps, ours, plain, x, y)
