"""Parameters and optimizer state out of core: the same bits as in core, three segments at most in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.nn.outofcore.disk import DiskSwap
from idletrain.nn.outofcore.execute import Executor
from idletrain.nn.outofcore.simulate import Footprint
from idletrain.nn.outofcore.units import Piece
from idletrain.nn.outofcore.weights import Weights
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
    made = DiskSwap(tmp_path, 256 << 20)
    yield made
    made.close()


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


def streamed(case: Case, letters: str, optimizer: str, swap: DiskSwap) -> tuple[nn.Module, Weights, Executor]:
    module, pieces = case.fresh()
    slots = OPTIMIZERS[optimizer][0]
    numbers = {p: i for i, p in enumerate(module.parameters())}
    footprint = Footprint(case.units, letters, ROOMY, 0, streamed=True)
    groups = [
        [(numbers[p], p) for piece in pieces[s.first : s.last + 1] for p in piece.parameters()]
        for s in footprint.segments
        if s.last < len(pieces)
    ]
    within = {number for group in groups for number, _ in group}
    resident = [(i, p) for p, i in numbers.items() if i not in within]
    state = [[torch.zeros_like(p) for _ in range(slots)] for p in numbers]
    weights = Weights(groups, resident, state, swap, updater(optimizer, len(numbers)))
    return module, weights, Executor(module, pieces, footprint, swap, weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "vgg", "transformer"])
def test_steps_have_the_bits_of_steps_in_core(name: str, optimizer: str, swap: DiskSwap) -> None:
    case = Case(name)
    n = len(case.units)
    reference = copy.deepcopy(case.module)
    plain = OPTIMIZERS[optimizer][1](reference.parameters())
    torch.manual_seed(5)
    for _ in range(STEPS):
        plain.zero_grad()
        case.loss(reference(case.x)).backward()
        plain.step()
    for letters in ("K" * n, "S" * n, "R" * (n - 1) + "K", "Qm" + "S" * (n - 2)):
        from idletrain.nn.outofcore.plan import legal

        module, weights, executor = streamed(case, legal(case.units, letters), optimizer, swap)
        torch.manual_seed(5)
        for _ in range(STEPS):
            with executor.step():
                case.loss(module(case.x)).backward()
            weights.finish()
        values = {number: (value.clone(), [s.clone() for s in state]) for number, value, state in weights.values()}
        executor.close()
        weights.close()
        for i, (p, its) in enumerate(zip(module.parameters(), reference.parameters(), strict=True)):
            assert torch.equal(p, its), (letters, i)
            assert i not in values or torch.equal(values[i][0], its)
            for ours, theirs in zip(values[i][1] if i in values else [], _state(plain, its), strict=False):
                assert torch.equal(ours, theirs), (letters, i)
        assert len(values) >= len(list(module.parameters())) - 1
        for (k, a), b in zip(module.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(a, b), k


def _state(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[Tensor]:
    held = optimizer.state[p]
    return [held[k] for k in ("momentum_buffer", "exp_avg", "exp_avg_sq") if held.get(k) is not None]


def test_no_more_than_three_segments_are_in_memory(swap: DiskSwap) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    pieces = [Piece(f"{i}", module, (layer,), follows=i > 0) for i, layer in enumerate(module)]
    from idletrain.nn.outofcore.measure import measure

    _, units = measure(module, pieces, torch.randn(4, 256), lambda out: out.square().mean())
    footprint = Footprint(units, "K" * 9, ROOMY, 0, streamed=True)
    numbers = {p: i for i, p in enumerate(module.parameters())}
    groups = [[(numbers[p], p) for p in piece.parameters()] for piece in pieces]
    state = [[torch.zeros_like(p)] for p in numbers]
    most = 0

    def update(number: int, p: nn.Parameter, _state: list[Tensor]) -> None:
        nonlocal most
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        here = sum(part is not None or a for g in weights._groups for part, a in zip(g.parts, g.arriving, strict=True))
        most = max(most, here)

    weights = Weights(groups, [], state, swap, update)
    assert all(p.untyped_storage().nbytes() == 4 for p in module.parameters())  # a placeholder each
    executor = Executor(module, pieces, footprint, swap, weights)
    for _ in range(2):
        with executor.step():
            module(torch.randn(4, 256)).square().mean().backward()
        weights.finish()
    assert 2 < most <= 2 * 3
    bound = [p for p in module.parameters() if p.untyped_storage().nbytes() > 4]
    assert len(bound) <= 3 * 2
    assert all(p.grad is None for p in module.parameters())
    assert math.isfinite(sum(float(v.sum()) for _, v, _ in weights.values()))
    executor.close()
    weights.close()


def test_what_two_segments_share_stays_in_memory(swap: DiskSwap) -> None:
    tied = nn.Linear(8, 8, bias=False)
    tied.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    expected = tied.weight.detach() - 0.5 * torch.ones(8, 8)
    weights = Weights([[]], [(0, tied.weight)], [[]], swap, lambda _n, p, _s: p.sub_(p.grad, alpha=0.5))
    assert weights.stand_in(tied.weight.t()).data_ptr() == tied.weight.data_ptr()
    tied(torch.eye(8)).sum().backward()
    assert torch.equal(tied.weight, expected)
    assert tied.weight.grad is None
    weights.close()
