"""The assembled network computes the mean of what its subnets compute, whatever module it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.cuts import CutSettings, cuts_of
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.evaluate import score
from idletrain.nn.ist import scaling
from idletrain.nn.ist.groups import Contraction, Layout
from idletrain.nn.ist.partition import draw
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.ist.subnets import by_row, cut, scaled, unscaled, views
from idletrain.nn.local_steps import BatchOrder, LocalSteps, assemble
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, named_loss, prepare
from idletrain.nn.program import cross_entropy
from idletrain.nn.wide.layers import SparseLinear

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def cut_up(module: nn.Module, inputs: Tensor = X, **options: Any) -> Layout:
    torch.manual_seed(0)
    return cuts_of(module, inputs, TrainingSettings(rounds=1, subnets=2), CutSettings(**options))[1]


def scalings(layout: Layout) -> dict[str, str]:
    return {f"{c.tensor}.{c.dimension}": c.scaling for c in layout.contractions}


def mean_of_subnets(module: nn.Module, layout: Layout, meta: nn.Module, inputs: Tensor, shares: list[float]) -> Tensor:
    """The mean of the subnets' outputs, each to the share of the neurons that it holds."""
    network = Network(layout, 1, [p.detach() for p in module.parameters()])
    total = torch.zeros(())
    for mask, share in zip(draw(3, 0, layout.sizes, shares), shares, strict=True):
        subnet = cut(layout, mask)
        total = total + assemble(meta, subnet, network.pull(subnet))(inputs) * share
    return total


@pytest.mark.parametrize("shares", [[0.25] * 4, [0.5, 0.25, 0.125, 0.125], [5 / 16, 11 / 16]], ids=str)
def test_a_network_without_norm_computes_the_mean_of_its_subnets(shares: list[float]) -> None:
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))
    meta, layout = cuts_of(module, X, TrainingSettings(rounds=1, subnets=2), CutSettings())
    torch.testing.assert_close(mean_of_subnets(module, layout, meta, X, shares), module(X), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
def test_inputs_of_a_layer_with_weight_norm_are_scaled_by_the_root(kind: Any) -> None:
    module = nn.Sequential(kind(nn.Linear(16, 64)), nn.ReLU(), kind(nn.Linear(64, 32)), nn.ReLU(), nn.Linear(32, 3))
    layout = cut_up(module)
    assert sorted(scalings(layout).values()) == ["input_roots", "weights"]
    assert [group.name for group in layout.groups] == ["0", "2"]


def test_subnets_that_do_not_cover_the_network_make_their_sums_as_large_as_the_whole_one_s() -> None:
    module = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 3, bias=False))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    meta, layout = cuts_of(module, X, TrainingSettings(rounds=1, subnets=2), CutSettings())
    network = Network(layout, 1, [p.detach() for p in module.parameters()])
    for mask, share in zip(draw(0, 0, layout.sizes, [1 / 4, 1 / 8]), (4, 8), strict=True):
        subnet = cut(layout, mask)
        narrow = assemble(meta, subnet, network.pull(subnet))
        assert narrow[1].weight.unique().item() == 0.5 * share
        torch.testing.assert_close(narrow(X), module(X))


class Tied(nn.Module):
    """Embeddings that are the output's weights, too, with a feed-forward block around which they are added back."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 50)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        logits: Tensor = self.head(hidden + self.down(functional.gelu(self.up(hidden))))
        return logits


class Gated(nn.Module):
    """An inner product of two cut vectors, beside layers that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.relu(self.a(x)) * functional.relu(self.b(x))
        logits: Tensor = self.out(functional.relu(self.c(x))) * gate.sum(1, keepdim=True)
        return logits


class Noisy(nn.Module):
    """Dropout and noise in training, whose shapes follow the width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(functional.relu(self.a(x)), 0.5, self.training)
        logits: Tensor = self.out(hidden + torch.randn_like(hidden) if self.training else hidden)
        return logits


class Beside(nn.Module):
    """A layer that adds up cut and uncut features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(16, 32), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.cat([functional.relu(self.a(x)), x], 1))
        return logits


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1),
    )  # fmt: skip


def grouped_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, groups=8), nn.ReLU(), nn.Conv2d(64, 3, 1),
    )  # fmt: skip


class Bag(nn.Module):
    """Embeddings of a sample's tokens, added up, below a layer that adds up their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(50, 32, mode="sum"), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.relu(self.table(x)))
        return logits


def layer_normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 40, bias=False), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 3)
    )


def transformer() -> nn.Module:
    return models.transformer(40, context=16, width=32, heads=4, hidden=64, blocks=1)


GATED = {
    **{f"{layer}.weight": ["a", None] for layer in "ab"},
    **{f"{layer}.bias": ["a"] for layer in "ab"},
    "c.weight": ["c", None],
    "c.bias": ["c"],
    "out.weight": [None, "c"],
}
BY_HAND = {"0.weight": ["h", None], "0.bias": ["h"], "2.weight": [None, "h"]}
ATTENTION = {"blocks.0.q.weight": ["w", None], "blocks.0.k.weight": ["w", None]}
EXPECTED: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], dict[str, str]]] = {
    "mlp": (lambda: models.mlp([16, 32, 24, 3], None), X, {}, {"3.weight.1": "weights", "5.weight.1": "weights"}),
    "batch norm": (lambda: models.mlp([16, 32, 24, 3]), X, {}, {"4.weight.1": "normalized", "7.weight.1": "weights"}),
    "layer norm": (layer_normed, X, {}, {"2.weight.1": "normalized"}),
    "tied embeddings": (
        Tied, torch.arange(40).view(8, 5), {},
        {"table.weight.1": "inputs", "up.weight.1": "weights", "down.weight.1": "weights"},
    ),
    "noise": (Noisy, X, {}, {"out.weight.1": "weights"}),
    "autoencoder": (
        autoencoder, torch.randn(8, 1, 16, 16), {},
        {"2.weight.1": "weights", "4.weight.0": "weights", "6.weight.0": "weights"},
    ),
    "grouped convolutions": (
        grouped_convolutions, torch.randn(8, 1, 8, 8), {}, {"4.weight.1": "weights", "8.weight.1": "weights"},
    ),
    "bag of embeddings": (Bag, torch.arange(40).view(8, 5), {}, {"out.weight.1": "weights"}),
    "pre-LN transformer": (
        transformer, torch.arange(8 * 16).view(8, 16) % 40, {},
        {"blocks.0.out.weight.1": "weights", "blocks.0.down.weight.1": "weights"},
    ),
    "by hand": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3)), X, {"table": BY_HAND},
        {"2.weight.1": "weights"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPECTED)
def test_every_sum_over_cut_neurons_is_scaled_unless_it_is_normalized(case: str) -> None:
    make, inputs, options, expected = EXPECTED[case]
    layout = cut_up(make(), inputs, **options)
    assert scalings(layout) == expected
    marked = {f"{t.name}.{d}" for t in layout.tensors for d, _ in t.scaled}
    assert marked == {place for place, scaling in expected.items() if scaling == "weights"}


class ByLargest(nn.Module):
    """A normalization that no operator shows: over the batch, by each neuron's largest value."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(0, keepdim=True)


@pytest.mark.parametrize(
    ("normed", "count"), [((1,) * 6, 3), ((0,) * 6, 3), ((1, 0, 1, 1, 0, 1), 9), ((0, 1, 1, 1, 1, 1), 9)], ids=str
)
def test_of_repeated_blocks_two_tell_unless_they_differ_or_others_do(
    normed: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer for one in normed for layer in (nn.Linear(32, 32, bias=False), ByLargest() if one else nn.Tanh())]
    tried: list[Any] = []
    each = scaling._tried
    monkeypatch.setattr(scaling, "_tried", lambda *args: (tried.append(args[-1]), each(*args))[1])
    found = scalings(cut_up(nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 3))))
    assert [found[f"{1 + 2 * i}.weight.1"] for i in range(6)] == ["normalized" if one else "weights" for one in normed]
    assert len(tried) == count  # of six sums and the last layer's


def test_tied_embeddings_are_scaled_where_they_are_added_up_and_not_as_a_table() -> None:
    module, tokens = Tied(), torch.arange(40).view(8, 5)
    with torch.no_grad():
        module.down.weight.zero_()
        module.down.bias.zero_()
    meta, layout = cuts_of(module, tokens, TrainingSettings(rounds=1, subnets=2), CutSettings())
    (contraction,) = [c for c in layout.contractions if c.tensor == "table.weight"]
    assert contraction == Contraction("table.weight", 1, "inputs", ("head",))
    mean = mean_of_subnets(module, layout, meta, tokens, [0.25, 0.75])
    torch.testing.assert_close(mean, module(tokens), rtol=1e-5, atol=1e-5)
    subnet = cut(layout, draw(0, 0, layout.sizes, [0.5, 0.5])[0])
    pulled = next(views(Network(layout, 1, [p.detach() for p in module.parameters()]).pull(subnet), subnet.shapes))
    assert torch.equal(pulled, module.table.weight.detach()[:, subnet.positions[0][1]])


def test_a_group_that_is_added_up_without_weights_stays_whole_by_name_and_reason() -> None:
    layout = cut_up(Gated(), table=GATED)
    assert [group.name for group in layout.groups] == ["c"]
    assert "without a layer's weights" in dict(layout.kept_whole)["a"]


def test_heads_cut_by_hand_along_their_width_stay_whole() -> None:
    """Queries and keys are compared by an inner product over a head's width, which a subnet would make smaller."""
    module = nn.Sequential(nn.Embedding(40, 16), SelfCompared(), nn.Linear(16, 3))
    table = {
        "1.q.weight": ["w", None],
        "1.k.weight": ["w", None],
        "1.v.weight": ["h", None],
        "1.out.weight": [None, "h"],
    }
    layout = cut_up(module, torch.arange(40).view(8, 5), table=table)
    assert [group.name for group in layout.groups] == ["h"]
    assert dict(layout.kept_whole).keys() == {"w"}


class SelfCompared(nn.Module):
    """One attention head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
        mixed: Tensor = self.out(weights @ self.v(x))
        return x + mixed


def test_columns_of_cut_neurons_are_scaled_beside_columns_that_every_subnet_has() -> None:
    module = Beside()
    labels = {("a.weight", 0): np.arange(32), ("a.bias", 0): np.arange(32)}
    columns = np.append(np.arange(32), np.full(16, -1))
    from idletrain.nn.ist.groups import Group, layout_of, to_meta
    from idletrain.nn.ist.scaling import with_scaling
    from idletrain.nn.ist.scaling_trial import Subject

    cut_layout = layout_of(module, [(Group("h", 32), {**labels, ("out.weight", 1): columns})])
    meta = to_meta(module)
    layout = with_scaling(Subject(meta, {name: p.detach() for name, p in module.named_parameters()}, X), cut_layout)
    subnet = cut(layout, draw(0, 0, layout.sizes, [0.25, 0.75])[0])
    assert subnet.factors[2] is not None
    assert subnet.factors[2].flatten().tolist() == [4.0] * 8 + [1.0] * 16
    mean = mean_of_subnets(module, layout, meta, X, [0.25, 0.75])
    torch.testing.assert_close(mean, module(X), rtol=1e-5, atol=1e-5)


def test_hidden_units_below_a_very_wide_output_are_scaled_in_its_rows() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), SparseLinear(32, 60, sampler="all"))
    table = {"0.weight": ["h", None], "0.bias": ["h"], "2.weight": ["labels", "h"], "2.bias": ["labels"]}
    layout = cut_up(module, X, table=table)
    assert scalings(layout) == {"2.weight.1": "weights"}
    assert {group.name for group in layout.groups} == {"h", "labels"}
    subnet = cut(layout, draw(0, 0, layout.sizes, [0.5, 0.5])[0])
    assert [f if f is None else f.item() for f in subnet.factors] == [None, None, 2.0, None]


class Sides(nn.Module):
    """Two cut layers of different widths side by side, added up by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 10), nn.Linear(16, 32), nn.Linear(42, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.cat([functional.relu(self.a(x)), functional.relu(self.b(x))], 1))
        return logits


def test_several_groups_in_one_dimension_have_each_their_own_factor() -> None:
    module = Sides()
    meta, layout = cuts_of(module, X, TrainingSettings(rounds=1, subnets=2), CutSettings())
    assert [group.size for group in layout.groups] == [10, 32]
    assert scalings(layout) == {"out.weight.1": "weights"}
    subnet = cut(layout, draw(0, 0, layout.sizes, [0.25] * 4)[0])
    factor = next(f for f, t in zip(subnet.factors, layout.tensors, strict=True) if t.name == "out.weight")
    assert factor is not None
    assert factor.flatten().tolist() == pytest.approx([10 / 3] * 3 + [4.0] * 8)
    mean = mean_of_subnets(module, layout, meta, X, [0.5, 0.5])
    torch.testing.assert_close(mean, module(X), rtol=1e-5, atol=1e-5)


class Cosine(nn.Module):
    """Hidden vectors that are brought to one length before they are compared with the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(16, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.normalize(self.a(x), dim=1))
        return logits


def test_vectors_of_a_fixed_length_are_scaled_by_the_root() -> None:
    layout = cut_up(Cosine())
    assert scalings(layout) == {"out.weight.1": "roots"}
    subnet = cut(layout, draw(0, 0, layout.sizes, [0.25, 0.75])[0])
    assert [f.item() for f in subnet.factors if f is not None] == [2.0]


class NotFinite(nn.Module):
    """Outputs that random weights make infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        out: Tensor = self.out(hidden) / (hidden.sum() * 0)
        return out


def test_what_cannot_be_tried_is_scaled_and_said_to_be_untried() -> None:
    layout = cut_up(NotFinite(), table={"a.weight": ["a", None], "a.bias": ["a"], "out.weight": [None, "a"]})
    assert scalings(layout) == {"out.weight.1": "unknown"}
    assert [t.scaled for t in layout.tensors if t.name == "out.weight"] == [((1, 1.0),)]


# --- values and optimizer state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "row-adagrad", "adagrad"])
@pytest.mark.parametrize(("shares", "ulps"), [([0.5, 0.25, 0.25], 0), ([0.3, 0.45, 0.25], 1)], ids=["powers", "others"])
def test_what_is_pulled_and_pushed_back_is_what_it_was(
    small_program: Callable[..., Prepared], optimizer: str, shares: list[float], ulps: int
) -> None:
    settings = {"momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "adamw": {"name": "adamw", "lr": 0.01}}
    prepared = small_program(norm=None, subnets=3, optimizer=settings.get(optimizer, {"name": optimizer, "lr": 0.1}))
    program = prepared.program
    network = Network.of(program, prepared.network)
    network.flat.uniform_(0.5, 2)
    before = network.flat.clone()
    updates = [(subnet, network.pull(subnet), 1) for subnet in program.subnets(0, by_neurons(shares))]
    assert any(factor is not None for subnet, _, _ in updates for factor in subnet.factors)
    network.commit(updates)
    apart = (network.flat.view(torch.int32) - before.view(torch.int32)).abs()
    assert int(apart.max()) <= max(ulps, 2)  # a mean of what every subnet has is rounded on its own
    slots, row_slots = program.persistent_slots
    layouts = [program.layout] * slots + [by_row(program.layout)] * row_slots
    shapes = [tensor.shape for layout in layouts for tensor in layout.tensors]
    own = [not tensor.shared for layout in layouts for tensor in layout.tensors]
    distances = [int(tensor.max()) for tensor, mine in zip(views(apart, shapes), own, strict=True) if mine]
    assert len(distances) > slots + row_slots  # values and optimizer state
    assert max(distances) <= ulps


def test_a_gradient_s_moments_are_as_much_smaller_as_weights_are_larger() -> None:
    values, factor = torch.tensor([8.0]), torch.tensor(4.0)
    assert [scaled(values, factor, power).item() for power in (1, -1, -2)] == [32.0, 2.0, 0.5]
    assert all(torch.equal(unscaled(scaled(values, factor, p), factor, p), values) for p in (1, -1, -2))


# What half of an MLP's hidden neurons train with: weights and biases of its three layers.
RATES = {"sgd": (0.5, 0.5, 1.0, 0.5, 2.0, 1.0), "adamw": (1.0, 1.0, 2.0, 1.0, 2.0, 1.0)}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"name": "adamw", "lr": 0.01, "weight_decay": 0.05},
    ],
    ids=["momentum", "adamw"],
)
def test_a_scaled_subnet_is_the_narrow_network_trained_by_hand(
    small_program: Callable[..., Prepared], optimizer: dict[str, Any]
) -> None:
    steps, rounds = 4, 3
    prepared = small_program(norm=None, subnets=2, local_steps=steps, rounds=rounds, batch_size=8, optimizer=optimizer)
    program, samples = prepared.program, prepared.program.source.open()
    network = Network.of(program, prepared.network)
    adam = optimizer["name"] == "adamw"
    kwargs = {name: value for name, value in optimizer.items() if name != "name"}
    lr, decay = kwargs["lr"], kwargs["weight_decay"]
    for round_ in range(rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, by_neurons([0.5, 0.5]))):
            flat = network.pull(subnet)
            hand = flat.clone()
            module = assemble(program.module, subnet, hand[: subnet.parameters])
            groups = [
                {"params": [parameter], "lr": lr * factor, "weight_decay": decay / factor}
                for parameter, factor in zip(module.parameters(), RATES[optimizer["name"]], strict=True)
            ]
            plain = (torch.optim.AdamW if adam else torch.optim.SGD)(groups, **kwargs)
            parts = [list(views(slot, subnet.shapes)) for slot in hand.split(subnet.parameters)[1:]]
            for i, parameter in enumerate(module.parameters()):
                names = program.slots[1:]
                plain.state[parameter] = {name: slot[i] for name, slot in zip(names, parts, strict=True)}
                if adam:
                    plain.state[parameter]["step"] = torch.tensor(float(round_ * steps))
            order = BatchOrder(0, len(samples), 8, 2)
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(steps):
                work.step(samples, order, step)
                inputs, labels = samples.batch(order.batch(k, round_ * steps + step))
                plain.zero_grad()
                functional.cross_entropy(module(inputs), labels).backward()
                plain.step()
            assert torch.equal(flat, hand)
            updates.append((subnet, flat, steps))
        network.commit(updates)
        subnet, flat, _ = updates[0]
        for name, of, at, factor, mine in zip(
            [t.name for t in program.layout.tensors], network.values, subnet.positions, subnet.factors,
            views(flat[: subnet.parameters], subnet.shapes), strict=True,
        ):  # fmt: skip
            if all(p is None for p in at):
                continue
            own = of
            for d, places in enumerate(at):
                own = own if places is None else own.index_select(d, places)
            assert torch.equal(own, mine / (1.0 if factor is None else factor)), name


@pytest.mark.parametrize("subnets", [4, 8])
def test_a_pre_ln_transformer_cut_into_subnets_gets_better_with_every_few_rounds(subnets: int) -> None:
    """Text in which each character decides the next but one in five; half of it is held out."""
    rng = np.random.default_rng(0)
    follows = rng.permutation(16)
    text = [0]
    for _ in range(12_000):
        text.append(int(rng.integers(16)) if rng.random() < 0.2 else int(follows[text[-1]]))
    windows = np.lib.stride_tricks.sliding_window_view(np.array(text), 17)[::8].copy()
    half = len(windows) // 2
    train, held_out = (ArraySource(part[:, :-1], part[:, 1:]) for part in (windows[:half], windows[half:]))
    training = TrainingSettings.model_validate(
        {
            "subnets": subnets,
            "local_steps": 10,
            "rounds": 20,
            "batch_size": 32,
            "optimizer": {"name": "adamw", "lr": 3e-3},
        }
    )
    torch.manual_seed(0)
    module = models.transformer(16, context=16, width=32, heads=8, hidden=64, blocks=2)
    prepared = prepare(module, Given(train), None, named_loss("cross_entropy"), training)
    program = prepared.program
    assert "blocks.1.down.weight.1" in scalings(program.layout)
    network, order = Network.of(program, prepared.network), BatchOrder(0, len(train), 32, subnets)
    losses = []
    for round_ in range(20):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, by_neurons([1 / subnets] * subnets))):
            flat = network.pull(subnet)
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(10):
                work.step(train, order, step)
            updates.append((subnet, flat, 10))
        network.commit(updates)
        if round_ in (4, 9, 19):
            with torch.no_grad():
                for parameter, value in zip(module.parameters(), network.values, strict=True):
                    parameter.copy_(value)
            losses.append(score(module, held_out, cross_entropy).loss)
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 1.5  # of 2.77 for a guess and 1.11 for the text's own entropy


class Given:
    """A source that has its samples at hand."""

    def __init__(self, samples: ArraySource) -> None:
        self._samples = samples

    def open(self) -> ArraySource:
        return self._samples
