"""The whole network as one flat array."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from idletrain.nn import models
from idletrain.nn.ist.discovery import find_groups
from idletrain.nn.ist.groups import to_meta, whole
from idletrain.nn.ist.partition import draw
from idletrain.nn.ist.shape_runs import for_trials
from idletrain.nn.ist.subnets import cut
from idletrain.nn.network import Network


def network_of(module: nn.Module, slots: int) -> Network:
    layout = find_groups(*for_trials(module, torch.zeros(2, 6)))
    network = Network(layout, slots, [p.detach() for p in module.parameters()])
    network.flat[network.flat.numel() // slots :].normal_()
    return network


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_pulling_and_committing_all_subnets_is_the_identity_for_values_and_optimizer_state(slots: int) -> None:
    network = network_of(models.mlp([6, 8, 12, 3]), slots)
    before = network.flat.clone()
    layout = network_layout()
    subnets = [cut(layout, mask) for mask in draw(0, 0, layout.sizes, [0.25] * 4)]
    network.commit([(s, network.pull(s), 7) for s in subnets])
    assert torch.equal(network.flat, before)


def network_layout() -> object:
    return find_groups(*for_trials(models.mlp([6, 8, 12, 3]), torch.zeros(2, 6)))


def test_with_as_many_copies_as_subnets_a_commit_is_that_of_local_sgd_to_the_bit() -> None:
    layout, subnets = network_layout(), 3
    (mask,) = {mask.tobytes(): mask for mask in draw(0, 0, layout.sizes, [1.0] * subnets, copies=subnets)}.values()
    assert mask.all()
    module = models.mlp([6, 8, 12, 3])
    ends = []
    for kind in (layout, whole(to_meta(module))):
        network = Network(kind, 2, [p.detach() for p in module.parameters()])
        full = cut(kind, mask if kind is layout else np.zeros(0, dtype=np.bool_), sharing=subnets)
        random = torch.Generator().manual_seed(0)
        network.commit([(full, torch.randn(2 * full.parameters, generator=random), n) for n in (50, 50, 21)])
        ends.append(network.flat)
    assert torch.equal(*ends)


def test_a_commit_takes_values_and_state_of_every_slot() -> None:
    network = network_of(models.mlp([6, 8, 12, 3]), 2)
    layout = network_layout()
    subnets = [cut(layout, mask) for mask in draw(0, 0, layout.sizes, [0.5, 0.5])]
    updates = []
    for subnet in subnets:
        flat = torch.ones(2 * subnet.parameters)
        flat[subnet.parameters :] = 2
        updates.append((subnet, flat, 3))
    before = network.flat.clone()
    network.commit(updates)
    values, state = network.flat.chunk(2)
    assert set(values.unique().tolist()) - set(before.tolist()) <= {1.0}
    assert (state == 2).sum() == (values == 1).sum()
    assert all((v == 1).all() for name, v in zip(names(), network.values, strict=True) if "bias" in name)


def names() -> list[str]:
    return [name for name, _ in models.mlp([6, 8, 12, 3]).named_parameters()]


@settings(deadline=None)
@given(st.integers(0, 6 * 4 + 4 - 1), st.integers(0, 31))
def test_the_digest_changes_with_any_one_bit_of_the_values(at: int, bit: int) -> None:
    network = Network(whole(nn.Linear(6, 4)), 2)
    network.flat.normal_()
    before = network.sha256()
    raw = network.flat.numpy().view(np.uint32)
    raw[at] ^= np.uint32(1 << bit)
    assert network.sha256() != before
    raw[at] ^= np.uint32(1 << bit)
    assert network.sha256() == before


def test_the_digest_is_of_the_values_alone_in_the_module_s_order() -> None:
    import hashlib

    network = Network(whole(nn.Linear(2, 1)), 2, [torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])])
    network.flat[3:] = 9
    assert network.sha256() == hashlib.sha256(struct.pack("<3f", 1, 2, 3)).hexdigest()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_an_average_of_the_commits_is_its_definition_and_a_snapshot_of_it_goes_on_alike(decay: float) -> None:
    module = models.mlp([6, 8, 12, 3])
    layout = network_layout()

    def fresh() -> Network:
        return Network(layout, 2, [p.detach() for p in module.parameters()], ema=decay)

    network, seen = fresh(), []
    (subnet,) = (cut(layout, mask) for mask in draw(0, 0, layout.sizes, [1.0]))
    assert all(torch.equal(a, b) for a, b in zip(network.averaged, network.values, strict=True))
    for number in range(1, 5):
        network.commit([(subnet, torch.full((2 * subnet.parameters,), float(number)), 3)])
        seen.append(float(number))
        weights = [decay ** (number - 1 - k) for k in range(number)]
        expected = sum(w * value for w, value in zip(weights, seen, strict=True)) / sum(weights)
        for values, mean in zip(network.values, network.averaged, strict=True):
            assert torch.all(values == number)
            torch.testing.assert_close(mean, torch.full_like(mean, expected))
        other = fresh()
        other.flat.copy_(network.flat)  # as a snapshot does
        network = other


def test_without_an_average_the_values_are_what_is_evaluated_and_the_array_is_no_longer() -> None:
    network = network_of(models.mlp([6, 8, 12, 3]), 2)
    assert network.averaged is network.values
    assert network.flat.numel() == 2 * sum(value.numel() for value in network.values)
