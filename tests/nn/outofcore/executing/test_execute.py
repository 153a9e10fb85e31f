"""Test that a step by any plan has the same bits as one in core, or else raises an error."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import RunError
from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import Executor
from idletrain.nn.outofcore.planning.plan import make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink
from idletrain.nn.outofcore.planning.simulate import Footprint, simulate
from idletrain.nn.units import Piece
from outofcore.networks import Case, plans

NETWORKS = ("mlp", "vgg", "unet", "residual", "transformer")


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[DiskSwap]:
    disk_swap = DiskSwap(tmp_path, 256 << 20)
    yield disk_swap
    disk_swap.close()


@functools.cache
def case(name: str) -> Case:
    return Case(name)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_plan_has_the_bits_of_a_step_in_core(name: str, swap: DiskSwap) -> None:
    swapped = recomputed = 0
    for modes in plans(case(name), 6):
        module, executor, value = case(name).run(modes, swap)
        assert case(name).differences(module, value) == [], modes
        assert swap.used_bytes == 0
        swapped += executor.swapped_bytes > 0
        recomputed += "R" in modes
    assert swapped >= 2
    assert recomputed >= 1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_plan_for_a_tight_budget_has_the_same_bits_and_keeps_to_it(name: str, swap: DiskSwap) -> None:
    units = case(name).units
    profile = Profile(units, SwapLink(2e7, 2e7), across_batch="not tried")
    whole = simulate(Footprint(units, "K" * len(units), 1 << 40, 0, streamed=False), profile.link).peak_bytes
    from idletrain.nn.outofcore.planning.plan import least_bytes

    budget = max(int(0.6 * whole), least_bytes(profile))
    plan = make_memory_plan(profile, budget)
    assert set(plan.unit_modes) != {"K"}
    module, executor, value = case(name).run(plan.unit_modes, swap, int(0.9 * budget))
    assert case(name).differences(module, value) == []
    kept_in_core = case(name).run("K" * len(units), swap)[1].peak_bytes
    assert 0 < executor.peak_bytes <= 0.9 * budget
    assert executor.peak_bytes < kept_in_core


def test_live_bytes_are_those_that_were_predicted(swap: DiskSwap) -> None:
    """What the executor counts is what the simulator does: to keep all, the sum of all that is stored."""
    for name in ("mlp", "vgg", "residual"):
        units = case(name).units
        for modes in ("K" * len(units), "R" * (len(units) - 1) + "K"):
            executor = case(name).run(modes, swap)[1]
            predicted = sum(s.stored_bytes for s in case(name).footprint(modes).segments)
            assert executor.peak_bytes == pytest.approx(predicted, rel=0.03), (name, modes)


def run(module: nn.Module, modes: str, swap: DiskSwap, pieces: list[Piece]) -> None:
    from idletrain.nn.outofcore.executing.measure import measure_units

    x = torch.randn(64, 512)
    _, units = measure_units(module, pieces, x, lambda out: out.square().mean())
    executor = Executor(module, pieces, Footprint(units, modes, 1 << 40, 0, streamed=False), swap)
    try:
        with executor.step():
            module(x).square().mean().backward()
    finally:
        executor.close()


class Changes(nn.Module):
    """Changes a tensor that its neighbour saved."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("modes", ["KKKK", "KSKK", "SSSK"])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_not_a_wrong_gradient(modes: str, swap: DiskSwap) -> None:
    module = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid(), Changes())  # a sigmoid saves its output
    pieces = [Piece(f"{i}", module, (inner,), follows=i > 0) for i, inner in enumerate(module)]
    with pytest.raises(RunError, match="changed in place"):
        run(module, modes, swap, pieces)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as torch itself says
        module(torch.randn(64, 512)).sum().backward()


class Drifts(nn.Module):
    """Changes its own weight after using it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(512))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        with torch.no_grad():
            self.weight.add_(1)
        return y


@pytest.mark.parametrize(("modes", "message"), [("KKK", "changed in place"), ("KRK", "changes its own parameters")])
def test_a_parameter_that_a_unit_changes_is_an_error_not_a_wrong_gradient(
    modes: str, message: str, swap: DiskSwap
) -> None:
    module = nn.Sequential(nn.Linear(512, 512), Drifts())
    pieces = [Piece(f"{i}", module, (inner,), follows=i > 0) for i, inner in enumerate(module)]
    with pytest.raises(RunError, match=message):
        run(module, modes, swap, pieces)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.randn(64, 512)).sum().backward()


class Moody(nn.Module):
    """Computes another shape every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(512, 512), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x.repeat(self.calls, 1)).sigmoid()


def test_a_unit_that_recomputes_to_something_else_is_reported(swap: DiskSwap) -> None:
    module = nn.Sequential(nn.Linear(512, 512), Moody())
    pieces = [Piece(f"{i}", module, (inner,), follows=i > 0) for i, inner in enumerate(module)]
    with pytest.raises(RunError, match="something else when it runs again, so it cannot be recomputed"):
        run(module, "KRK", swap, pieces)


def test_the_module_is_its_own_again_once_the_executor_is_closed(swap: DiskSwap) -> None:
    module, executor, _ = case("vgg").run("S" * len(case("vgg").units), swap)
    assert "forward" not in module.features.__dict__
    module.eval()
    assert torch.equal(module(case("vgg").x), module(case("vgg").x))
    assert executor.swapped_bytes > 0


def test_a_forward_of_an_instance_is_run_and_given_back(swap: DiskSwap) -> None:
    module = nn.Linear(512, 512)
    doubled = module.forward = lambda x: 2 * nn.Linear.forward(module, x)  # type: ignore[method-assign,assignment]
    torch.manual_seed(0)
    run(module, "RK", swap, [Piece("0", module, (module,), follows=False)])
    assert module.forward is doubled
    planned, module.weight.grad = module.weight.grad, None
    torch.manual_seed(0)
    module(torch.randn(64, 512)).square().mean().backward()
    assert planned is not None
    assert torch.equal(module.weight.grad, planned)


def test_a_failed_step_leaves_nothing_in_the_scratch(swap: DiskSwap) -> None:
    module, pieces = case("mlp").fresh()
    executor = Executor(module, pieces, case("mlp").footprint("S" * len(case("mlp").units)), swap)

    def step() -> None:
        with executor.step():
            value = case("mlp").loss(module(case("mlp").x))
            assert swap.used_bytes > 0
            raise KeyError(value.shape)

    with pytest.raises(KeyError):
        step()
    assert swap.used_bytes == 0
    executor.close()


def test_seconds_are_counted_for_every_segment(swap: DiskSwap) -> None:
    modes = "R" * (len(case("vgg").units) - 1) + "K"
    executor: Any = case("vgg").run(modes, swap)[1]
    assert all(seconds > 0 for seconds in executor.forward_seconds[:-1])
    assert all(seconds > 0 for seconds in executor.backward_seconds[:-1])
