"""Test parameters and optimizer state out of core: the bits of in core, at most three segments in memory."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.nn.outofcore.executing.backing_file import StateFile
from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import Executor
from idletrain.nn.outofcore.executing.weights import Weights
from idletrain.nn.outofcore.planning.simulate import Footprint
from idletrain.nn.units import Piece
from outofcore.networks import ROOMY, Case

STEPS = 3
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[int, Make]] = {
    "sgd": (0, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "momentum": (1, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "adamw": (2, lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)),
}


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[DiskSwap]:
    disk_swap = DiskSwap(tmp_path, 256 << 20)
    yield disk_swap
    disk_swap.close()


def updater(name: str, count: int) -> Callable[[int, nn.Parameter, list[Tensor]], None]:
    """Torch's own optimizer functions, one parameter at a time."""
    from torch.optim.adamw import adamw
    from torch.optim.sgd import sgd

    steps = [torch.zeros(()) for _ in range(count)]

    def update(number: int, p: nn.Parameter, state: list[Tensor]) -> None:
        assert p.grad is not None
        common: Any = {"lr": 0.01 if name == "adamw" else 0.1, "maximize": False}
        if name == "adamw":
            common |= {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
            adamw([p], [p.grad], [state[0]], [state[1]], [], [steps[number]], **common)
        else:
            decay = 0.01 if name == "momentum" else 0.0
            common |= {"weight_decay": decay, "momentum": 0.9 if state else 0.0, "dampening": 0.0, "nesterov": False}
            sgd([p], [p.grad], state or [None], **common)  # type: ignore[list-item]

    return update


def filled_state_file(folder: Path, module: nn.Module, slots: int) -> StateFile:
    """A state file with a module's values, all there."""
    parameters = list(module.parameters())
    state_file = StateFile(folder, [tuple(p.shape) for p in parameters], slots)
    for i, p in enumerate(parameters):
        state_file.slot(i).copy_(p.detach())
    state_file.mark_arrived(range(len(parameters)))
    return state_file


def prepared(
    case: Case, modes: str, optimizer: str, swap: DiskSwap, folder: Path, *, streamed: bool
) -> tuple[nn.Module, StateFile, Weights, Executor]:
    module, pieces = case.fresh()
    numbers = {p: i for i, p in enumerate(module.parameters())}
    footprint = Footprint(case.units, modes, ROOMY, 0, streamed=streamed)
    groups = [
        [(numbers[p], p) for piece in pieces[s.first : s.last + 1] for p in piece.parameters()]
        for s in footprint.segments
        if s.last < len(pieces)
    ]
    within = {number for group in groups for number, _ in group}
    others = [(i, p) for p, i in numbers.items() if i not in within]
    state_file = filled_state_file(folder, module, 1 + OPTIMIZERS[optimizer][0])
    weights = Weights(state_file, groups, others, swap, updater(optimizer, len(numbers)), streamed=streamed)
    return module, state_file, weights, Executor(module, pieces, footprint, swap, weights)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "kept"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "vgg", "transformer"])
def test_steps_have_the_bits_of_steps_in_core(
    name: str, optimizer: str, streamed: bool, swap: DiskSwap, tmp_path: Path
) -> None:
    case = Case(name)
    n = len(case.units)
    reference = copy.deepcopy(case.module)
    plain = OPTIMIZERS[optimizer][1](reference.parameters())
    torch.manual_seed(5)
    for _ in range(STEPS):
        before = [p.detach().clone() for p in reference.parameters()]
        plain.zero_grad()
        case.loss(reference(case.x)).backward()
        plain.step()
    for modes in ("K" * n, "S" * n, "R" * (n - 1) + "K", "Qm" + "S" * (n - 2)):
        from idletrain.nn.outofcore.planning.plan import legal

        module, state_file, weights, executor = prepared(
            case, legal(case.units, modes), optimizer, swap, tmp_path, streamed=streamed
        )
        left: list[int] = []
        midway = StateFile(tmp_path, [tuple(p.shape) for p in module.parameters()], state_file.slots)
        torch.manual_seed(5)
        for step in range(STEPS):
            if step == STEPS - 1:
                weights.store(midway, state_file.slots)
                weights.last(state_file.slots, left.extend)
            with executor.step():
                case.loss(module(case.x)).backward()
            weights.finish()
        executor.close()
        weights.close()
        assert sorted(left) == list(range(len(list(module.parameters()))))
        for i, (p, its) in enumerate(zip(module.parameters(), reference.parameters(), strict=True)):
            assert p.data_ptr() == state_file.slot(i).data_ptr()
            assert torch.equal(p, its), (modes, i)
            assert torch.equal(midway.slot(i), before[i]), (modes, i)
            for slot, theirs in enumerate(_state(plain, its), start=1):
                assert torch.equal(state_file.slot(i, slot), theirs), (modes, i)
        for (k, a), b in zip(module.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(a, b), k
    assert swap.used_bytes == 0


def _state(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[Tensor]:
    held = optimizer.state[p]
    return [held[k] for k in ("momentum_buffer", "exp_avg", "exp_avg_sq") if held.get(k) is not None]


def test_no_more_than_three_segments_are_in_memory(swap: DiskSwap, tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    pieces = [Piece(f"{i}", module, (layer,), follows=i > 0) for i, layer in enumerate(module)]
    from idletrain.nn.outofcore.executing.measure import measure_units

    _, units = measure_units(module, pieces, torch.randn(4, 256), lambda out: out.square().mean())
    footprint = Footprint(units, "K" * 9, ROOMY, 0, streamed=True)
    numbers = {p: i for i, p in enumerate(module.parameters())}
    groups = [[(numbers[p], p) for p in piece.parameters()] for piece in pieces]
    most = 0

    def update(number: int, p: nn.Parameter, _state: list[Tensor]) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        look()

    def look() -> None:
        nonlocal most
        here = sum(part is not None or a for g in weights._groups for part, a in zip(g.parts, g.arriving, strict=True))
        most = max(most, here)

    state_file = filled_state_file(tmp_path, module, 2)
    weights = Weights(state_file, groups, [], swap, update, streamed=True)
    executor = Executor(module, pieces, footprint, swap, weights)
    for layer in module:
        layer.register_forward_hook(lambda *_: look())
    for _ in range(2):
        with executor.step():
            module(torch.randn(4, 256)).square().mean().backward()
        weights.finish()
    assert 2 < most <= 2 * 3
    away = [p for p in module.parameters() if p.untyped_storage().nbytes() == 4]  # a placeholder each
    assert len(away) >= 2 * 8 - 3 * 2
    assert all(p.grad is None for p in module.parameters())
    weights.store(state_file, 2)
    assert math.isfinite(float(state_file.flat.sum()))
    executor.close()
    weights.close()
    assert swap.used_bytes == 0


def test_what_two_segments_share_stays_in_memory(swap: DiskSwap, tmp_path: Path) -> None:
    tied = nn.Linear(8, 8, bias=False)
    tied.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    expected = tied.weight.detach() - 0.5 * torch.ones(8, 8)
    state_file = filled_state_file(tmp_path, tied, 1)
    others = [(0, tied.weight)]
    weights = Weights(state_file, [[]], others, swap, lambda _n, p, _s: p.sub_(p.grad, alpha=0.5), streamed=True)
    assert weights.stand_in(tied.weight.t()).data_ptr() == tied.weight.data_ptr()
    tied(torch.eye(8)).sum().backward()
    assert torch.equal(tied.weight, expected)
    assert tied.weight.grad is None
    weights.close()


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "kept"])
def test_a_step_begins_before_all_parameters_are_there(streamed: bool, swap: DiskSwap, tmp_path: Path) -> None:
    """The first unit runs while the last is still on its way, and the last is waited for."""
    case = Case("mlp")
    module, pieces = case.fresh()
    numbers = {p: i for i, p in enumerate(module.parameters())}
    state_file = StateFile(tmp_path, [tuple(p.shape) for p in numbers], 1)
    footprint = Footprint(case.units, "K" * len(case.units), ROOMY, 0, streamed=streamed)
    groups = [[(numbers[p], p) for p in piece.parameters()] for piece in pieces]
    values = [p.detach().clone() for p in numbers]
    weights = Weights(state_file, groups, [], swap, lambda _n, _p, _s: None, streamed=streamed)
    executor = Executor(module, pieces, footprint, swap, weights)
    ran: list[str] = []
    for piece in pieces:
        for part in piece.modules:
            part.register_forward_hook(lambda _m, _i, _o, name=piece.name: ran.append(name))

    def arrive() -> None:
        for group in groups:
            if group is groups[-1]:
                deadline = time.monotonic() + 30
                while len(set(ran)) < len(pieces) - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
                before.extend(ran)
            for number, _ in group:
                state_file.slot(number).copy_(values[number])
            state_file.mark_arrived([number for number, _ in group])

    before: list[str] = []
    thread = threading.Thread(target=arrive)
    thread.start()
    torch.manual_seed(7)
    with executor.step():
        loss = case.loss(module(case.x))
        loss.backward()
    thread.join()
    assert set(before) == {piece.name for piece in pieces[:-1]}
    assert torch.equal(loss, case.value)
    executor.close()
    weights.close()
