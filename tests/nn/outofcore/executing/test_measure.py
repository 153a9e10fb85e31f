"""Test a profile: bytes that units save and need, with the module left unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.nn.outofcore.executing.measure import across_batch, measure_units
from idletrain.nn.units import Piece, pieces_of
from outofcore.networks import Case

F = 4  # bytes of a float


def test_a_linear_layer_saves_its_input_and_a_relu_its_output() -> None:
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    pieces = [Piece(str(i), module, (layer,), follows=i > 0) for i, layer in enumerate(module)]
    _, (first, relu, second, loss) = measure_units(module, pieces, torch.randn(16, 64), lambda out: out.square().mean())
    assert (first.input_bytes, first.inner_bytes, first.output_bytes) == (F * 16 * 64, 0, F * 16 * 128)
    assert (first.saves_input, first.saves_output) == (True, False)
    assert (relu.saves_input, relu.saves_output, relu.inner_bytes) == (False, True, 0)
    assert (second.saves_input, second.saves_output) == (True, False)
    assert first.parameter_bytes == F * (64 * 128 + 128)
    assert first.saving_bytes == F * 16 * 128
    assert loss.modes == "K"
    assert [u.follows for u in (first, relu, second, loss)] == [False, True, True, False]
    assert all(u.forward_seconds > 0 and u.backward_seconds > 0 for u in (first, relu, second, loss))
    assert all(u.recompute_seconds <= u.forward_seconds for u in (first, relu, second))


def test_measuring_leaves_module_and_random_state_alone() -> None:
    case = Case("vgg")
    module, _ = case.fresh()
    before = [b.clone() for b in module.buffers()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measure_units(module, pieces_of(module), case.x, case.loss)
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))
    assert all(p.grad is None for p in module.parameters())
    assert all("forward" not in m.__dict__ for m in module.modules())


def test_a_unit_that_runs_twice_or_never_stays_outside_the_plan() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.never, self.once = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.once(self.twice(self.twice(x)))

    module = Twice()
    pieces, units = measure_units(module, pieces_of(module), torch.randn(2, 4), lambda out: out.sum())
    assert [piece.name for piece in pieces] == ["once"]
    assert [unit.name for unit in units] == ["once", "loss"]


def test_optimizer_state_is_counted_for_what_is_trained() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[0].bias.requires_grad_(False)
    _, units = measure_units(module, pieces_of(module), torch.randn(2, 8), lambda out: out.sum(), state_slots=2)
    assert [unit.state_bytes for unit in units] == [2 * F * 64, 2 * F * 72, 0]


@pytest.mark.parametrize(
    ("module", "loss", "why"),
    [
        (nn.Linear(4, 3), functional.cross_entropy, ""),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), functional.cross_entropy, "1 (BatchNorm) uses"),
        (nn.Linear(4, 3), lambda out, _y: torch.logsumexp(out.flatten(), 0), "not a mean over the batch's samples"),
    ],
)
def test_what_sees_the_whole_batch_is_reported(module: nn.Module, loss: object, why: str) -> None:
    outputs, labels = torch.randn(8, 3), torch.randint(3, (8,))
    result = across_batch(module.train(), loss, outputs, labels)  # type: ignore[arg-type]
    assert (why in result) if why else result == ""
    assert across_batch(module.eval(), functional.cross_entropy, outputs, labels) == ""


def test_a_module_of_parts_by_name_with_a_loss_of_its_own_is_measured_as_the_plain_one_is() -> None:
    @dataclass
    class Outputs:
        loss: Tensor
        logits: Tensor

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, x: Tensor, labels: Tensor) -> Outputs:
            logits = self.inner(x)
            return Outputs(functional.cross_entropy(logits, labels), logits)

    module, x, labels = Named(), torch.randn(16, 64), torch.arange(16) % 8
    _, plain = measure_units(
        module.inner, pieces_of(module.inner), x, lambda out: functional.cross_entropy(out, labels)
    )
    batch = {"x": x, "labels": labels}
    _, units = measure_units(module, pieces_of(module), batch, lambda outputs: outputs.loss)
    assert [unit.name for unit in units] == [f"inner.{unit.name}" for unit in plain[:-1]] + ["loss"]
    assert [unit.output_bytes for unit in units[:-1]] == [unit.output_bytes for unit in plain[:-1]]
    assert across_batch(module, lambda out, _: out.loss, module(**batch), batch).startswith(
        "outputs or labels are more"
    )


class Cache:
    """What layers add to, as to the keys and values of a language model."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        assert not cache.seen or len(cache.seen[-1]) == len(x)
        cache.seen.append(self.inner(x))
        return sum(cache.seen, x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(2))
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        self.kept.append(len(cache.seen))
        return x


def test_a_unit_that_writes_to_an_argument_is_measured_on_copies_and_never_recomputed() -> None:
    chain = Chain()
    _, units = measure_units(
        chain, pieces_of(chain, ["layers.0", "layers.1"]), torch.randn(3, 4), lambda out: out.sum()
    )
    assert chain.kept == [2]  # each layer wrote once, though it ran several times
    assert [unit.modes for unit in units] == ["KS", "KS", "K"]
