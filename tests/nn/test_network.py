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
from idletrain.nn.ist.subnets import cut
from idletrain.nn.network import Network


def network_of(module: nn.Module, slots: int) -> Network:
    layout = find_groups(to_meta(module), torch.zeros(2, 6, device="meta"))
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
    return find_groups(to_meta(models.mlp([6, 8, 12, 3])), torch.zeros(2, 6, device="meta"))


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
