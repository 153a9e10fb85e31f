"""Residual blocks are found in networks of all kinds; what is none is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.ist.blocks import block_layout, by_depth, find_blocks
from idletrain.nn.ist.skipping import Part

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """Adds what two layers make of its input to it."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class InTuple(Residual):
    """Returns the hidden state beside something that nothing uses, as Hugging Face's blocks may."""

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x), x.mean()


class InPlace(Residual):
    """Changes its input."""

    def forward(self, x: Tensor) -> Any:
        return x.add_(self.inner(x))


class Gated(Residual):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return x + self.gate * self.inner(x)


class Stack(nn.Module):
    """Blocks in a ModuleList between two layers; a block's outputs may be a tuple."""

    def __init__(self, *blocks: nn.Module, uses_more: bool = False) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 3)
        self.uses_more = uses_more

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        more: Any = 0
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
            more = out[1] if self.uses_more and out[1] is not None else more
        y: Tensor = self.last(x) + more
        return y


def names(module: nn.Module, inputs: Any = X, **more: Any) -> list[str]:
    return [block.name for block in find_blocks(module, inputs, **more)[0]]


def test_the_blocks_of_a_transformer_and_of_a_residual_cnn_are_found() -> None:
    blocks, refused = find_blocks(models.transformer(50, 16, 32, 4, 64, 3), TOKENS)
    assert [(block.name, block.additive) for block in blocks] == [(f"blocks.{i}", True) for i in range(3)]
    assert not refused
    blocks, refused = find_blocks(models.residual_cnn(channels=8, hidden=8), torch.rand(3, 12, 12))
    assert [(block.name, block.additive) for block in blocks] == [(f"blocks.{i}", True) for i in range(3)]
    assert refused.keys() == {"stem.0", "stem.1", "stem.2"}


def test_a_block_that_normalizes_its_sum_is_found_as_one_whose_change_cannot_be_scaled() -> None:
    for first, additive in ((True, True), (False, False)):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=first)
        blocks, _ = find_blocks(nn.Sequential(layer, nn.Linear(8, 3)), X.view(3, 1, 8).expand(3, 4, 8))
        assert [(block.name, block.additive) for block in blocks] == [("0", additive)]


def test_plain_layers_of_one_width_are_no_blocks_though_the_network_runs_without_one() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    blocks, refused = find_blocks(layers, X)
    assert not blocks
    assert refused["2"] == "it is not residual: without its weights it does not return its input"
    assert refused["1"] == refused["3"] == "it has no weights that train"
    assert refused["4"] == "it returns no hidden state of the shape and number format of its input"


def test_a_block_that_returns_a_tuple_is_found_if_nothing_uses_the_rest() -> None:
    blocks, _ = find_blocks(Stack(InTuple(), InTuple()), X)
    assert [block.result for block in blocks] == [(Part.HIDDEN, None)] * 2
    blocks, refused = find_blocks(Stack(InTuple(), InTuple(), uses_more=True), X)
    assert [block.name for block in blocks] == ["blocks.0"]  # the last one's is used
    assert refused["blocks.1"] == "it returns more than a hidden state, and what follows uses it"


def test_what_cannot_be_left_out_is_told() -> None:
    _, refused = find_blocks(Stack(InPlace(), Gated(), Residual()), X)
    assert refused == {
        "blocks.0": "it changes its input in place",
        "blocks.1": "its gate is a single number, which cannot be left out of a subnet",
    }
    unused = Stack(Residual())
    unused.spare = nn.ModuleList([Residual()])
    assert find_blocks(unused, X)[1] == {"spare.0": "it does not run, or returns nothing"}


def test_of_nested_blocks_the_inner_ones_are_taken() -> None:
    assert names(nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Linear(8, 3))) == ["0.0", "0.1"]


def test_an_excluded_block_stays_in_all_subnets() -> None:
    blocks, refused = find_blocks(Stack(Residual(), Residual()), X, exclude=["blocks.0"])
    assert [block.name for block in blocks] == ["blocks.1"]
    assert refused == {"blocks.0": "model.exclude names it"}


def test_finding_blocks_changes_neither_weights_nor_statistics_nor_torch_s_random_state() -> None:
    module = Stack(Residual(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())), Residual())
    before, state = {n: t.clone() for n, t in module.state_dict().items()}, torch.random.get_rng_state()
    assert names(module) == ["blocks.0", "blocks.1"]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert module.training


def test_a_block_s_tensors_are_in_its_subnets_alone_but_for_those_that_others_have_too() -> None:
    module = Stack(Residual(), Residual())
    module.blocks[1].inner[0].weight = module.blocks[0].inner[0].weight  # type: ignore[index, union-attr]
    layout = block_layout(module, find_blocks(module, X)[0])
    owners = {t.name: None if t.shared else set(t.neurons[0].tolist()) for t in layout.tensors}  # type: ignore[union-attr]
    assert owners.pop("blocks.0.inner.0.weight") is None
    assert {name: owner for name, owner in owners.items() if owner} == {
        f"blocks.{i}.inner.{part}": {i}
        for i, part in [(i, p) for i in range(2) for p in ("0.bias", "2.weight", "2.bias")]
    }
    assert layout.sizes == (2,)


def settings(**training: Any) -> TrainingSettings:
    return TrainingSettings.model_validate({"rounds": 1, **training})


def test_a_network_without_blocks_or_with_too_few_is_refused_with_the_candidates() -> None:
    with pytest.raises(
        JobError,
        match=r"no residual blocks .*\(0, 2, .*: it has no .*; 1, 4, 7, 10: it is not .*; 13: it .*\); use neurons",
    ):
        by_depth(models.mlp([8, 8, 8, 8, 8, 3]), X, settings(), (), ())
    with pytest.raises(JobError, match="it has no ModuleList and no Sequential"):
        by_depth(nn.Linear(8, 3), X, settings(), (), ())
    with pytest.raises(JobError, match=r"training.subnets: 5 is more than the 2 blocks .*copies: 2; use at most 4"):
        by_depth(Stack(Residual(), Residual()), X, settings(subnets=5, copies=2), (), ())
    with pytest.raises(JobError, match=r"model.exclude: first is not a block; the blocks are blocks.0, blocks.1"):
        by_depth(Stack(Residual(), Residual()), X, settings(), ("first",), ())


def test_transformers_blocks_are_found() -> None:
    hf = pytest.importorskip("transformers")
    size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    size |= {"num_attention_heads": 4}
    ids = {"input_ids": TOKENS, "labels": TOKENS}
    for model, path, additive in (
        (hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4)), "transformer.h", True),
        (hf.LlamaForCausalLM(hf.LlamaConfig(**size)), "model.layers", True),
        (hf.BertForMaskedLM(hf.BertConfig(**size)), "bert.encoder.layer", False),
    ):
        blocks, refused = find_blocks(model, ids)
        assert [(block.name, block.additive) for block in blocks] == [(f"{path}.{i}", additive) for i in range(3)]
        assert not refused
