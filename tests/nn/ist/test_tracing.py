"""Neurons are followed through every operator that moves, joins, splits or sums them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.nn.ist.shape_runs import for_trials, run_for_shapes
from idletrain.nn.ist.tracing import trace_neurons


class Net(nn.Module):
    """Linear layers `a` and `b` of 12, and `out`, around a function."""

    def __init__(self, function: Callable[..., Tensor], width: int = 12, outputs: int = 12, **layers: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, outputs, bias=False), nn.Linear(6, outputs, bias=False)
        self.out = nn.Linear(width, 3, bias=False)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.function(self, x))
        return y


def neurons(module: nn.Module, *inputs: Tensor) -> Counter[tuple[tuple[str, int], ...]]:
    """How many neurons there are of each kind: pairs of `parameter.dimension` and how many of its positions one has."""
    traced = trace_neurons(*for_trials(module, inputs if len(inputs) > 1 else inputs[0]), run_for_shapes)
    whole = traced.couplings.reasons()
    counts: dict[int, Counter[str]] = {}
    for (name, d), ids in traced.places.items():
        for neuron in traced.couplings.find(ids.numpy()).tolist():
            counts.setdefault(neuron, Counter())[f"{name}.{d}"] += 1
    return Counter(tuple(sorted(count.items())) for neuron, count in counts.items() if neuron not in whole)


FLAT = torch.randn(2, 6)
SEQUENCE = torch.randn(2, 5, 6)


def heads(x: Tensor, count: int = 3) -> Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def attention(net: Any, x: Tensor) -> Tensor:
    q, k, v = heads(net.a(x)), heads(net.b(x)), heads(net.c(x))
    return (functional.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)


def grouped_query(net: Any, x: Tensor) -> Tensor:
    q, k = heads(net.a(x), 6), heads(net.c(x), 3).repeat_interleave(2, 1)
    return (functional.scaled_dot_product_attention(q, k, k)).transpose(1, 2).flatten(2)


def rotary(net: Any, x: Tensor) -> Tensor:
    angles = torch.arange(5.0, device=x.device)[:, None] * torch.arange(4.0, device=x.device)
    q, k = (
        y * angles.cos() + torch.cat([-y[..., 2:], y[..., :2]], -1) * angles.sin()
        for y in (heads(net.a(x)), heads(net.b(x)))
    )
    return (functional.scaled_dot_product_attention(q, k, k)).transpose(1, 2).flatten(2)


def normed_heads(net: Any, x: Tensor) -> Tensor:
    q, k = net.norm(heads(net.a(x))), heads(net.b(x))
    return (functional.scaled_dot_product_attention(q, k, k)).transpose(1, 2).flatten(2)


def fused(net: Any, x: Tensor) -> Tensor:
    q, k, v = net.c(x).reshape(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return (functional.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)


def written(net: Any, x: Tensor) -> Tensor:
    y = torch.zeros(len(x), 24, device=x.device)
    y[:, :12] = net.a(x)
    y[:, 12:] = net.b(x)
    return y


def shuffled(net: Any, x: Tensor) -> Tensor:
    return net.a(x).view(len(x), 2, 6).transpose(1, 2).flatten(1)


ONE = {"a.weight.0": 1, "out.weight.1": 1}
HEAD = {"a.weight.0": 4, "b.weight.0": 4, "out.weight.1": 4}
CASES: dict[str, tuple[nn.Module, Tensor, dict[int, dict[str, int]]]] = {
    "chain": (Net(lambda net, x: net.a(x).relu()), FLAT, {12: ONE}),
    "sum": (Net(lambda net, x: net.a(x) + net.b(x)), FLAT, {12: {**ONE, "b.weight.0": 1}}),
    "gate": (Net(lambda net, x: functional.silu(net.a(x)) * net.b(x)), FLAT, {12: {**ONE, "b.weight.0": 1}}),
    "GLU by chunk": (Net(lambda net, x: functional.glu(net.a(x)), 6), FLAT, {6: {"a.weight.0": 2, "out.weight.1": 1}}),
    "a gate by chunk": (
        Net(lambda net, x: net.a(x).chunk(2, 1)[0] * net.a(x).chunk(2, 1)[1], 6), FLAT,
        {6: {"a.weight.0": 2, "out.weight.1": 1}},
    ),
    "concatenated": (Net(lambda net, x: torch.cat([net.a(x), net.b(x)], 1), 24), FLAT, {12: ONE}),
    "written in place": (Net(written, 24), FLAT, {12: ONE}),
    "flattened": (
        Net(lambda net, x: (net.a(x)[:, :, None] * net.d(x)[:, None]).flatten(1), 36, d=nn.Linear(6, 3)), FLAT,
        {1: {"a.weight.0": 12, "d.bias.0": 3, "d.weight.0": 3, "out.weight.1": 36}},
    ),
    "heads": (
        Net(attention, c=nn.Linear(6, 12)), SEQUENCE, {3: {**HEAD, "c.weight.0": 4, "c.bias.0": 4}},
    ),
    "grouped queries": (
        Net(grouped_query, c=nn.Linear(6, 6, bias=False)), SEQUENCE,
        {3: {"a.weight.0": 4, "c.weight.0": 2, "out.weight.1": 4}},
    ),
    "rotary": (Net(rotary), SEQUENCE, {3: HEAD}),
    "norm within heads": (Net(normed_heads, norm=nn.RMSNorm(4)), SEQUENCE, {3: HEAD}),
    "fused heads": (
        Net(fused, c=nn.Linear(6, 36, bias=False)), SEQUENCE, {3: {"c.weight.0": 12, "out.weight.1": 4}},
    ),
    "shuffled": (Net(shuffled), FLAT, {12: ONE}),
    "mean over time": (Net(lambda net, x: net.a(x).mean(1)), SEQUENCE, {12: ONE}),
    "largest neuron": (
        Net(lambda net, x: net.a(x).view(2, 3, 4).amax(2), 3), FLAT, {3: {"a.weight.0": 4, "out.weight.1": 1}},
    ),
    "Conv1D": (
        Net(lambda net, x: torch.addmm(net.bias, net.a(x), net.table), 4, table=nn.Parameter(torch.randn(12, 4)),
            bias=nn.Parameter(torch.randn(4))), FLAT,
        {12: {"a.weight.0": 1, "table.0": 1}, 4: {"table.1": 1, "bias.0": 1, "out.weight.1": 1}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_neurons_are_the_positions_that_meet(case: str) -> None:
    module, sample, expected = CASES[case]
    found = neurons(module, sample)
    for count, places in expected.items():
        assert found[tuple(sorted(places.items()))] == count, found


def test_convolutions_are_followed_by_channels_and_whole_groups() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1),
        nn.Conv2d(12, 24, 1, groups=3), nn.PixelShuffle(2), nn.ConvTranspose2d(6, 5, 2), nn.Flatten(),
        nn.Linear(605, 2),
    )  # fmt: skip
    kinds = [dict(kind) | {"": n} for kind, n in neurons(module, torch.randn(2, 3, 9, 9)).items()]
    assert [kind[""] for kind in kinds if kind.get("0.weight.0") == 2 and kind["2.weight.0"] == 2] == [4]
    assert {"3.bias.0": 4, "3.weight.0": 4, "4.bias.0": 8, "4.weight.0": 8, "6.weight.0": 2, "": 3} in kinds
    assert {"6.bias.0": 1, "6.weight.1": 1, "8.weight.1": 121, "": 5} in kinds


def test_hidden_units_of_recurrent_layers_are_followed_through_their_gates() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.rnn(x)[0][:, -1])
            return y

    found = neurons(Last(), SEQUENCE)
    gates = {f"rnn.{kind}_{where}_l{{}}.0": 4 for kind in ("weight", "bias") for where in ("ih", "hh")}
    first = {**{name.format(0): n for name, n in gates.items()}, "rnn.weight_hh_l0.1": 1, "rnn.weight_ih_l1.1": 1}
    second = {**{name.format(1): n for name, n in gates.items()}, "rnn.weight_hh_l1.1": 1, "out.weight.1": 1}
    assert found[tuple(sorted(first.items()))] == 8
    assert found[tuple(sorted(second.items()))] == 8


def test_inputs_outputs_and_looked_up_rows_stay_whole() -> None:
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    traced = trace_neurons(*for_trials(module, torch.zeros(2, 5, dtype=torch.long)), run_for_shapes)
    whole = traced.couplings.reasons()
    reasons = {at: whole.get(int(traced.couplings.find(ids.numpy())[0])) for at, ids in traced.places.items()}
    assert reasons["1.weight", 0] == "its neurons are the network's outputs"
    assert reasons["0.weight", 0] == ""
    assert reasons["0.weight", 1] is None


def skipped(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return y + y * net.b(x)


def two_layers(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.a(x) + net.b(x)
    return y


def read_by_none(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.a(x) + net.c(net.b(x).relu())
    return y


def read_and_written(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z: Tensor = y + net.c(y)
    return z


def read_and_written_by_a_block(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z: Tensor = y + net.d(net.c(y).relu().view(2, 5, 3, 4).transpose(1, 2).transpose(1, 2).flatten(2))
    return z


def written_before(net: Any, x: Tensor) -> Tensor:
    y = net.b(x)
    for _ in range(2):
        y = net.a(x) + net.c(y.tanh())
    return y


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (rotary, False),
        (skipped, False),
        (two_layers, False),
        (read_by_none, False),
        (read_and_written, True),
        (read_and_written_by_a_block, True),
        (written_before, True),
    ],
)
def test_a_residual_stream_is_what_is_read_to_make_what_is_added_to_it(
    function: Callable[..., Tensor], expected: bool
) -> None:
    module = Net(function, c=nn.Linear(12, 12), d=nn.Linear(12, 12))
    traced = trace_neurons(*for_trials(module, SEQUENCE), run_for_shapes)
    ids = set(traced.couplings.find(traced.places["a.weight", 0].numpy()).tolist())
    assert bool(ids & traced.couplings.streams()) is expected
