"""Training without a cluster: the rounds of one, and no trace in the random generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.export import finished_module
from idletrain.job import Split, TrainingSettings
from idletrain.nn import models
from idletrain.nn.alone import train_alone
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.given import as_samples
from idletrain.nn.evaluate import score
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, named_loss, prepare
from idletrain.optimizer_settings import OptimizerSettings
from tests.conftest import Given
from tests.nn.test_local_steps import train


def test_it_trains_the_rounds_of_the_program(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(norm="batch", subnets=2, local_steps=3, rounds=2, optimizer={"name": "adam", "lr": 0.01})
    state, others = torch.random.get_rng_state(), (random.getstate(), str(np.random.get_state()))
    network = train_alone(prepared)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert others == (random.getstate(), str(np.random.get_state()))
    assert network.sha256() == train(prepared, 2, [0.5, 0.5]).sha256()
    assert not torch.equal(network.values[0], prepared.network[0])


def phased(prepared: Prepared, *phases: dict[str, int]) -> Prepared:
    """The same network, trained in phases."""
    training = TrainingSettings.model_validate(
        {**prepared.program.training.model_dump(exclude={"rounds"}), "phases": phases}
    )
    return replace(prepared, program=replace(prepared.program, training=training))


@pytest.mark.parametrize("copies", [1, 2])
def test_phases_that_divide_alike_are_the_bits_of_a_run_without_any(
    small_program: Callable[..., Prepared], copies: int
) -> None:
    prepared = small_program(
        subnets=4, copies=copies, rounds=5, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine"}
    )
    divided = phased(prepared, {"rounds": 2}, {"rounds": 3, "subnets": 4, "local_steps": 3})
    assert train_alone(divided).sha256() == train_alone(prepared).sha256()


def test_a_last_phase_on_the_whole_network_goes_on_as_torch_would(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=2, rounds=2, optimizer={"name": "sgd", "lr": 0.1})
    begun = train_alone(prepared)
    network = train_alone(phased(prepared, {"rounds": 2}, {"rounds": 2, "subnets": 1, "local_steps": 5}))
    module = prepared.module
    for parameter, value in zip(module.parameters(), begun.values, strict=True):
        parameter.data.copy_(value)
    plain, samples = torch.optim.SGD(module.parameters(), lr=0.1), prepared.program.source.open()
    order = BatchOrder(0, len(samples), 4, 1)
    for number in range(
        2 * 2 * 3, 2 * 2 * 3 + 10
    ):  # behind the batches that two subnets took in three steps of two rounds
        inputs, labels = samples.batch(order.batch(0, number))
        plain.zero_grad()
        prepared.program.loss(module(inputs), labels).backward()
        plain.step()
    for value, parameter in zip(network.values, module.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.detach())


def test_phases_change_the_number_of_subnets_copies_and_steps(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=4, rounds=1)
    phases = [{"rounds": 1, "subnets": 4}, {"rounds": 1, "subnets": 4, "copies": 4}, {"rounds": 1, "subnets": 2}]
    ends = [train_alone(phased(prepared, *phases[: n + 1])).sha256() for n in range(3)]
    assert len({Network.of(prepared.program, prepared.network).sha256(), *ends}) == 4
    assert ends[0] == train_alone(prepared).sha256()


def test_a_share_of_whole_networks_at_the_end_is_two_phases_bit_for_bit(small_program: Callable[..., Prepared]) -> None:
    plain = small_program(subnets=4, rounds=4)
    training = plain.program.training.model_copy(update={"finish_whole": 0.25})
    wanted = replace(plain, program=replace(plain.program, training=training))
    listed = phased(plain, {"rounds": 3}, {"rounds": 1, "copies": 4})
    assert train_alone(wanted).sha256() == train_alone(listed).sha256() != train_alone(plain).sha256()


class Table:
    """Inputs and labels at hand, as a source."""

    def __init__(self, *data: NDArray[np.float32]) -> None:
        self.data = data

    def open(self) -> Samples:
        return as_samples(self.data)


def test_four_subnets_without_norm_learn_binary_labels_as_well_as_the_whole_network() -> None:
    """The labels are noisy, and the best probabilities are known: neither sure of itself nor shy is good."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 16)).astype(np.float32)
    y = (rng.random(4000) < 1 / (1 + np.exp(-3 * (x[:, 0] * x[:, 1] + x[:, 2])))).astype(np.float32)[:, None]
    train_data, test_data = Table(x[:3000], y[:3000]), Table(x[3000:], y[3000:])
    scores = {}
    for subnets in (1, 4):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
        training = TrainingSettings(
            subnets=subnets, rounds=40, local_steps=20, optimizer=OptimizerSettings(name="adamw", lr=1e-3)
        )
        prepared = prepare(module, train_data, test_data, "bce_with_logits", training)
        trained = finished_module(prepared, train_alone(prepared))
        scores[subnets] = score(trained, test_data.open(), prepared.program.loss)
    assert scores[4].loss <= 1.05 * scores[1].loss
    assert scores[4].temperature is not None
    assert 0.8 <= scores[4].temperature <= 1.3


TOKENS = torch.randint(0, 20, (32, 9), generator=torch.Generator().manual_seed(0))


def language_model(split: Split = "blocks", **training: Any) -> Prepared:
    """A transformer of four blocks that are split by depth, or by depth and width."""
    torch.manual_seed(0)
    options = {"local_steps": 3, "rounds": 1, "batch_size": 4, "optimizer": {"name": "adamw", "lr": 0.01}} | training
    module = models.transformer(20, 8, width=8, heads=2, hidden=16, blocks=4)
    data, settings = Given(TOKENS[:, :-1].numpy(), TOKENS[:, 1:].numpy()), TrainingSettings.model_validate(options)
    return prepare(module, data, None, named_loss("cross_entropy"), settings, split=split)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_subnet_neither_pulls_nor_changes_the_parameters_of_the_blocks_that_it_lacks(copies: int) -> None:
    prepared = language_model(subnets=4, copies=copies)
    program, training = prepared.program, prepared.program.training
    specs = program.specs(training.phase(0).equal_shares, copies)
    names = [tensor.name for tensor in program.layout.tensors]
    for subnet in program.subnets(0, specs):
        lacking = {block.name for block, factor in subnet.branches if not factor}
        factors = {factor for _, factor in subnet.branches if factor}
        assert 0 < len(lacking) < 4
        assert factors == {training.subnets / copies}
        sizes = dict(zip(names, subnet.shapes, strict=True))
        assert {name for name, shape in sizes.items() if 0 in shape} == {
            name for name in names if name.rpartition(".")[0].startswith(tuple(lacking))
        }
        network = Network.of(program, prepared.network)
        before = [value.clone() for value in network.values]
        network.commit([(subnet, network.pull(subnet) + 1, 3)])
        for name, old, new in zip(names, before, network.values, strict=True):
            held = not name.startswith(tuple(f"{block}." for block in lacking))
            assert torch.equal(new, old + 1 if held else old), name


def test_subnets_that_have_a_block_divide_its_neurons() -> None:
    prepared = language_model("both", subnets=4)
    program, network = prepared.program, Network.of(prepared.program, prepared.network)
    subnets = program.subnets(0, program.specs(program.training.phase(0).equal_shares, 1))
    names, began = [tensor.name for tensor in program.layout.tensors], [value.clone() for value in network.values]
    network.commit([(subnet, network.pull(subnet) + 1, 3) for subnet in subnets])
    for subnet in subnets:
        held = {f"{block.name}.": factor for block, factor in subnet.branches if factor}
        assert set(held.values()) == {2}  # each block is in two of the four
        for name, shape, factor in zip(names, subnet.shapes, subnet.factors, strict=True):
            if name.startswith("blocks."):
                assert (0 in shape) is not name.startswith(tuple(held)), name
            if name.endswith("down.weight") and name.startswith(tuple(held)):
                assert shape == (8, 8)  # half of 16 hidden neurons
                assert factor is not None
                assert set(factor.flatten().tolist()) == {2}
    for name, old, new in zip(names, began, network.values, strict=True):
        scaled = 0.5 if name.endswith(("down.weight", "out.weight")) else 1.0
        assert torch.allclose(new, old + scaled, atol=1e-6), name  # all of it is somewhere, and once


@pytest.mark.parametrize("hugging_face", [False, True])
def test_blocks_that_return_tuples_or_come_from_transformers_train_by_depth(hugging_face: bool) -> None:
    torch.manual_seed(0)
    module, inputs = Tagger(), TOKENS.numpy()
    if hugging_face:
        hf = pytest.importorskip("transformers")
        size = {"vocab_size": 20, "n_positions": 9, "n_embd": 8, "n_layer": 4, "n_head": 2, "n_inner": 16}
        module = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    options = {"subnets": 4, "copies": 2, "local_steps": 2, "rounds": 2, "optimizer": {"name": "adamw", "lr": 0.01}}
    settings = TrainingSettings.model_validate({**options, "batch_size": 4})
    prepared = prepare(module, Given(inputs, inputs), None, named_loss("cross_entropy"), settings, split="blocks")
    assert len(prepared.program.layout.skippable) == 4
    network = train_alone(prepared)
    assert not any(torch.equal(old, new) for old, new in zip(prepared.network, network.values, strict=True))
    assert all(value.isfinite().all() for value in network.values)


class Tagger(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, 20]`, by blocks that return `(hidden state, None, weights)`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList([TupleBlock() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden_states=hidden, scale=1.0)[0]
        logits: Tensor = self.head(hidden)
        return logits


class TupleBlock(nn.Module):
    """Adds a layer's outputs to the hidden state, which it takes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, scale: float, hidden_states: Tensor) -> tuple[Tensor, None, Tensor]:
        change = scale * torch.tanh(self.inner(hidden_states))
        return hidden_states + change, None, change.mean()


@pytest.mark.parametrize("split", ["blocks", "both"])
def test_every_block_trains_in_every_round(split: Split) -> None:
    prepared = language_model(split, subnets=3, copies=2)
    network = train_alone(prepared)
    assert not any(torch.equal(old, new) for old, new in zip(prepared.network, network.values, strict=True))


def test_one_subnet_of_all_blocks_is_plain_training() -> None:
    by_depth = train_alone(language_model(subnets=1, rounds=2))
    whole = train_alone(language_model(subnets=1, rounds=2, method="local-sgd"))
    assert by_depth.sha256() == whole.sha256()


def test_phases_by_depth_train_more_blocks_in_each_subnet_up_to_all() -> None:
    phases = [{"rounds": 1, "subnets": 4}, {"rounds": 1, "subnets": 4, "copies": 2}, {"rounds": 1, "subnets": 1}]
    prepared = language_model(phases=phases, rounds=3)
    program, held = prepared.program, []
    for phase in program.training.every_phase:
        subnets = program.subnets(phase.first_round, program.specs(phase.equal_shares, phase.copies))
        held.append([[factor for _, factor in subnet.branches if factor] for subnet in subnets])
    assert held == [[[4.0]] * 4, [[2.0, 2.0]] * 4, [[1.0] * 4]]
    assert all(value.isfinite().all() for value in train_alone(prepared).values)
