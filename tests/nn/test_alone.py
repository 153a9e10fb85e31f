"""Training without a cluster: the rounds of one, and no trace in torch's generator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from idletrain.nn.alone import train_alone
from idletrain.nn.prepare import Prepared
from tests.nn.test_local_steps import train


def test_it_trains_the_rounds_of_the_program(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(norm="batch", subnets=2, local_steps=3, rounds=2, optimizer={"name": "adam", "lr": 0.01})
    state = torch.random.get_rng_state()
    network = train_alone(prepared)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert network.sha256() == train(prepared, 2, [0.5, 0.5]).sha256()
    assert not torch.equal(network.values[0], prepared.network[0])
