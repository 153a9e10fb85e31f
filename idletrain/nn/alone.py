"""Train a program in this process: the rounds, subnets and bits of a run, without a cluster."""

from __future__ import annotations

from collections.abc import Callable

import torch

from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.seeding import seeded
from idletrain.nn.local_steps import LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import Prepared
from idletrain.nn.program import Program


def train_alone(prepared: Prepared) -> Network:
    """Return the network after all rounds, of subnets of equal shares."""
    program = prepared.program
    network = Network.of(program, prepared.network)
    train_rounds(program, network, program.source.open(), program.training.rounds)
    return network


def train_rounds(
    program: Program,
    network: Network,
    samples: Samples,
    rounds: int,
    go_on: Callable[[], bool] = lambda: True,
    device: torch.device | str = "cpu",
) -> bool:
    """Train a network in place, one subnet after another; all random generators stay as they were.

    Args:
        program: The run's program.
        network: The network.
        samples: The samples to train on.
        rounds: How many rounds to train.
        go_on: Called before each step; training ends in the middle of a round when it returns False.
        device: The device to train on.

    Returns:
        Whether all rounds were trained.
    """
    order = batch_order(samples, program.training)
    with seeded(program.training.seed):
        for round_ in range(rounds):
            updates, phase = [], program.training.phase(round_)
            specs = program.specs(phase.equal_shares, phase.copies)
            for k, subnet in enumerate(program.subnets(round_, specs)):
                flat = torch.zeros(program.buffer_size(subnet, persistent=False), device=device)
                pulled = network.pull(subnet)
                flat[: len(pulled)] = pulled
                work = LocalSteps(program, subnet, flat, k, round_)
                for step in range(phase.local_steps):
                    if not go_on():
                        return False
                    work.step(samples, order, step)
                work.check_buffers()
                updates.append((subnet, flat[: len(pulled)].cpu(), phase.local_steps))
            network.commit(updates)
    return True
