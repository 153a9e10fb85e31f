"""Neuron groups of modules that nobody prepared for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.nn import models
from idletrain.nn.ist.any_width import take_widths
from idletrain.nn.ist.discovery import find_groups
from idletrain.nn.ist.groups import Layout, UnsplitError, to_meta, without_statistics
from idletrain.nn.ist.partition import draw
from idletrain.nn.ist.shape_runs import for_trials
from idletrain.nn.ist.subnets import cut, gather
from idletrain.nn.local_steps import assemble


def layout_of(module: nn.Module, sample: Tensor, exclude: Sequence[str] = ()) -> Layout:
    return find_groups(*for_trials(module, sample), exclude)


def check_subnets_run(module: nn.Module, sample: Tensor, layout: Layout) -> None:
    """Every subnet of an uneven split computes and differentiates outputs of the network's shape."""
    expected = module(sample).shape
    meta = take_widths(without_statistics(to_meta(module)))
    count = min(3, *layout.sizes)
    shares = [0.5 / (count - 1)] * (count - 1) + [0.5] if count > 1 else [1.0]
    for mask in draw(0, 0, layout.sizes, shares):
        subnet = cut(layout, mask)
        flat = torch.zeros(subnet.parameters)
        gather([p.detach() for p in module.parameters()], subnet, flat)
        small = assemble(meta, subnet, flat)
        outputs = small(sample)
        assert outputs.shape == expected
        outputs.square().sum().backward()
        assert all(p.grad is not None for p in small.parameters())


def sizes(layout: Layout) -> dict[str, int]:
    return {group.name: group.size for group in layout.groups}


def split(layout: Layout) -> dict[str, tuple[bool, ...]]:
    return {t.name: tuple(n is not None for n in t.neurons) for t in layout.tensors}


def test_an_mlp_is_cut_at_its_hidden_layers_and_never_at_inputs_or_outputs() -> None:
    module, sample = models.mlp([6, 16, 12, 3]), torch.randn(2, 6)
    layout = layout_of(module, sample)
    assert list(sizes(layout).values()) == [16, 12]
    tensors = list(split(layout).values())
    assert tensors == [(True, False), (True,), (True,), (True, True), (True,), (True,), (False, True), (False,)]
    check_subnets_run(module, sample, layout)


def test_a_residual_cnn_is_cut_inside_blocks_and_along_its_stream() -> None:
    module, sample = models.residual_cnn(1, channels=6, hidden=8, blocks=2, classes=4), torch.randn(2, 1, 8, 8)
    layout = layout_of(module, sample)
    assert sorted(sizes(layout).values()) == [6, 8, 8]
    discovered = split(layout)
    assert discovered["stem.0.weight"] == (True, False, False, False)
    assert discovered["head.weight"] == (False, True)
    assert discovered["blocks.1.body.3.weight"] == (True, True, False, False)
    stream = next(t for t in layout.tensors if t.name == "head.weight").neurons[1]
    written = next(t for t in layout.tensors if t.name == "blocks.1.body.3.weight").neurons[0]
    assert stream is not None
    assert written is not None
    assert stream.tolist() == written.tolist()
    check_subnets_run(module, sample, layout)


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 4, 10),
        nn.ReLU(),
        nn.Linear(10, 5),
    )


def test_channels_own_their_pixels_behind_a_flatten() -> None:
    module, sample = vgg(), torch.randn(2, 3, 8, 8)
    layout = layout_of(module, sample)
    assert sizes(layout) == {"0": 8, "4": 6, "8": 10}
    pixels = next(t for t in layout.tensors if t.name == "8.weight").neurons[1]
    assert pixels is not None
    assert (pixels - pixels[0]).tolist() == [channel for channel in range(6) for _ in range(4)]
    check_subnets_run(module, sample, layout)


def test_a_subnet_of_all_neurons_computes_what_the_network_does() -> None:
    module, sample = vgg(), torch.randn(4, 3, 8, 8)
    layout = layout_of(module, sample)
    subnet = cut(layout, draw(0, 0, layout.sizes, [1.0])[0])
    flat = torch.empty(subnet.parameters)
    gather([p.detach() for p in module.parameters()], subnet, flat)
    small = assemble(without_statistics(to_meta(module)), subnet, flat)
    assert torch.equal(small(sample), module.train()(sample))


def test_a_transformer_is_cut_at_whole_heads_and_feed_forward_neurons() -> None:
    module = models.transformer(20, context=8, width=12, heads=3, hidden=10, blocks=2)
    sample = torch.randint(0, 20, (2, 8))
    layout = layout_of(module, sample)
    assert sorted(sizes(layout).values()) == [3, 3, 10, 10]
    rows = next(t for t in layout.tensors if t.name == "blocks.0.q.weight").neurons[0]
    assert rows is not None
    assert (rows - rows[0]).tolist() == [head for head in range(3) for _ in range(4)]
    assert split(layout)["tokens.weight"] == (False, False)
    check_subnets_run(module, sample, layout)


def test_an_excluded_group_stays_whole() -> None:
    module, sample = vgg(), torch.randn(2, 3, 8, 8)
    layout = layout_of(module, sample, exclude=["4"])
    assert sizes(layout) == {"0": 8, "8": 10}
    assert split(layout)["4.weight"] == (False, True, False, False)
    check_subnets_run(module, sample, layout)


def test_a_group_that_is_not_there_cannot_be_excluded() -> None:
    with pytest.raises(JobError, match=r"model.exclude: 9, x is not a group; the groups are 0, 4, 8"):
        layout_of(vgg(), torch.randn(2, 3, 8, 8), exclude=["x", "9", "0"])


@pytest.mark.parametrize("module", [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1))])
def test_a_module_of_one_layer_has_nothing_to_split(module: nn.Module) -> None:
    with pytest.raises(UnsplitError, match=r"nothing to split \(.*its neurons are the network's outputs.*local-sgd"):
        layout_of(module, torch.randn(2, 6))


def test_a_module_without_layers_has_nothing_to_split() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(UnsplitError, match="nothing to split"):
        layout_of(Scale(), torch.randn(2, 6))


def test_a_width_that_the_code_fixes_is_not_cut() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(torch.relu(self.second(self.first(x).view(-1, 8).relu())))
            return y

    module, sample = Fixed(), torch.randn(2, 6)
    layout = layout_of(module, sample)
    assert sizes(layout) == {"second": 10}
    check_subnets_run(module, sample, layout)


class Attention(nn.Module):
    """torch's own attention, which holds its width in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 3)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.inner(x_BTD)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.down(torch.relu(self.up(y)))
        return out


class Depthwise(nn.Module):
    """Separable convolutions: the middle one has a group a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 6, 1)
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 7, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


class Concatenated(nn.Module):
    """Two hidden layers beside each other, and beside the raw inputs `inputs` times."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 5)
        self.last = nn.Linear(4 * inputs + 8 + 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [x] * self.inputs + [torch.relu(self.first(x)), torch.relu(self.second(x))]
        y: Tensor = self.last(torch.cat(features, 1))
        return y


class Tied(nn.Module):
    """A language model whose outputs are its embedding, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        logits: Tensor = self.head(y + self.down(torch.relu(self.up(y))))
        return logits


@pytest.mark.parametrize(
    ("module", "sample"),
    [
        (Attention(), torch.randn(2, 5, 6)),
        (Depthwise(), torch.randn(2, 2, 6, 6)),
        (Concatenated(0), torch.randn(2, 4)),
        (Tied(), torch.randint(0, 11, (2, 5))),
        (
            nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
            torch.randn(2, 2, 6),
        ),
        (nn.Sequential(nn.ConvTranspose2d(2, 6, 2), nn.ReLU(), nn.Conv2d(6, 3, 1)), torch.randn(2, 2, 4, 4)),
    ],
    ids=["multihead-attention", "depthwise", "concatenated", "tied", "group-norm", "transposed"],
)
def test_unusual_modules_are_cut_only_where_their_subnets_run(module: nn.Module, sample: Tensor) -> None:
    check_subnets_run(module, sample, layout_of(module, sample))


def test_concatenated_layers_are_cut_each_at_its_own_columns() -> None:
    """The network is then the sum of its subnets, but for the last bias."""
    module, x = Concatenated(0), torch.randn(7, 4)
    layout = layout_of(module, x)
    assert sizes(layout) == {"first": 8, "second": 5}
    parts = []
    for mask in draw(0, 0, layout.sizes, [0.3, 0.7]):
        subnet = cut(layout, mask)
        flat = torch.empty(subnet.parameters)
        gather([p.detach() for p in module.parameters()], subnet, flat)
        parts.append(assemble(to_meta(module), subnet, flat)(x) - module.last.bias)
    torch.testing.assert_close(sum(parts) + module.last.bias, module(x))


@pytest.mark.parametrize("inputs", [1, 2])
def test_layers_beside_raw_inputs_are_cut_at_their_own_columns(inputs: int) -> None:
    module, x = Concatenated(inputs), torch.randn(2, 4)
    layout = layout_of(module, x)
    assert sizes(layout) == {"first": 8, "second": 5}
    columns = next(t for t in layout.tensors if t.name == "last.weight").neurons[1]
    assert columns is not None
    assert columns.tolist() == [-1] * 4 * inputs + list(range(13))
    check_subnets_run(module, x, layout)


def test_tied_parameters_are_cut_once_and_only_inside() -> None:
    module, sample = Tied(), torch.randint(0, 11, (2, 5))
    layout = layout_of(module, sample)
    assert "up" in sizes(layout)
    assert [t.name for t in layout.tensors].count("tokens.weight") == 1
    assert split(layout)["tokens.weight"][0] is False
    check_subnets_run(module, sample, layout)


class Twice(nn.Module):
    """A block that runs twice, and a layer with a second name."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6), nn.ReLU())
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([block, block])
        self.inner, self.outputs = nn.Linear(6, 10), nn.Linear(10, 3)
        self.by_name = nn.ModuleDict({"inner": self.inner})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.outputs(torch.relu(self.by_name["inner"](x)))
        return outputs


def test_a_layer_with_several_names_is_cut_once_and_stays_the_module_s() -> None:
    module, sample = Twice(), torch.randn(2, 4)
    expected = module(sample)
    layout = layout_of(module, sample)
    assert {"blocks.0.0", "inner"} <= sizes(layout).keys()
    assert [t.name for t in layout.tensors] == [name for name, _ in module.named_parameters()]
    check_subnets_run(module, sample, layout)
    assert torch.equal(module(sample), expected)


def test_torch_s_own_attention_is_cut_by_heads_and_at_its_stream() -> None:
    layout = layout_of(Attention(), torch.randn(2, 5, 6))
    assert sizes(layout) == {"inner": 8, "attention": 2, "up": 10}
    rows = next(t for t in layout.tensors if t.name == "attention.in_proj_weight").neurons[0]
    assert rows is not None
    assert (rows - rows[0]).tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_together_subnets_hold_every_value_of_an_mlp_s_outer_layers_once() -> None:
    module = models.mlp([6, 16, 3], norm=None)
    layout = layout_of(module, torch.randn(2, 6))
    subnets = [cut(layout, mask) for mask in draw(0, 0, layout.sizes, [0.25] * 4)]
    outer = sum(math.prod(shape) for s in subnets for shape in s.shapes[:3])
    assert outer == 6 * 16 + 16 + 16 * 3


def test_forward_is_traced_with_the_sample_and_nothing_else() -> None:
    """A batch of two samples is one argument, not two."""
    seen = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            seen.append((tuple(x.shape), mask))
            y: Tensor = self.last(torch.relu(self.first(x)))
            return y

    layout_of(Masked(), torch.randn(2, 6))
    assert set(seen) == {((2, 6), None)}


class Blocks(nn.Module):
    """Blocks of two hidden layers each, whose widths are the same in all of them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(6, 10), "out": nn.Linear(18, 6)}) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            layers: Any = block
            x = layers["out"](torch.cat([layers["a"](x).relu(), layers["b"](x).relu()], 1)).tanh()
        return x


def searched(blocks: int, refused: Callable[[str], bool]) -> tuple[Layout, int]:
    """The layout of blocks of which groups of some names fail by their values, and how often that was tried."""
    tries = 0

    def refuse(layout: Layout) -> str:
        nonlocal tries
        tries += 1
        return "differs" if any(refused(group.name) for group in layout.groups) else ""

    streams = [f"blocks.{i}.out" for i in range(blocks)]
    return find_groups(*for_trials(Blocks(blocks), torch.randn(2, 6)), streams[:-1], refuse), tries


def test_groups_of_repeated_blocks_that_fail_by_their_values_are_tried_together() -> None:
    layout, tries = searched(12, lambda name: name.endswith("a"))
    assert {name for name, reason in layout.kept_whole if reason == "differs"} == {f"blocks.{i}.a" for i in range(12)}
    assert list(sizes(layout).values()) == [10] * 12
    assert tries < 12


def test_one_of_repeated_blocks_that_differs_from_the_others_is_found() -> None:
    layout, _ = searched(5, lambda name: name == "blocks.2.a")
    assert [name for name, reason in layout.kept_whole if reason == "differs"] == ["blocks.2.a"]
    assert len(layout.groups) == 9
