"""Train a program in this process: the rounds, subnets and bits of a run, without a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.seeding import seeded
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import Prepared
from idletrain.nn.program import Program
from idletrain.nn.rolling import RollingSubnets, equal_specs


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
                steps = Steps(k, round_, phase.local_steps)
                update = take_steps(program, subnet, network.pull(subnet), steps, samples, order, go_on, device)
                if update is None:
                    return False
                updates.append((subnet, update, phase.local_steps))
            network.commit(updates)
    return True


def train_rolling(program: Program, network: Network, samples: Samples, device: torch.device | str = "cpu") -> None:
    """Train a network in place as `preemption.policy: rolling` does, with workers that are all equally fast.

    Args:
        program: The run's program.
        network: The network.
        samples: The samples to train on.
        device: The device to train on.
    """
    training, rolling = program.training, RollingSubnets(program, network, equal_specs(program))
    lanes = itertools.cycle(range(training.subnets))
    while rolling.rounds < training.rounds:
        lane = next(lanes)
        update = train_open(program, rolling, lane, training.local_steps, samples, device)
        rolling.commit(lane, update, training.local_steps)


def train_open(
    program: Program,
    rolling: RollingSubnets,
    lane: int,
    steps: int,
    samples: Samples,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the update of the open subnet of a lane, after so many steps; it is not committed."""
    opened, order = rolling.opened[lane], batch_order(samples, program.training)
    of_lane = Steps(lane, opened.number, steps, opened.first_step)
    with seeded(program.training.seed):
        update = take_steps(program, opened.subnet, opened.began, of_lane, samples, order, device=device)
    assert update is not None
    return update


@dataclass(frozen=True)
class Steps:
    """The local steps of one subnet.

    Attributes:
        number: Its number in its round, or its lane.
        round: Its round, or how many subnets its lane had before.
        count: How many steps it takes.
        first: Where schedules begin, see `LocalSteps`.
    """

    number: int
    round: int
    count: int
    first: int | None = None


def take_steps(
    program: Program,
    subnet: Subnet,
    pulled: Tensor,
    steps: Steps,
    samples: Samples,
    order: BatchOrder,
    go_on: Callable[[], bool] = lambda: True,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Return a subnet's update, a flat buffer on the CPU; None if `go_on` returned False before one of its steps."""
    flat = torch.zeros(program.buffer_size(subnet, persistent=False), device=device)
    flat[: len(pulled)] = pulled
    work = LocalSteps(program, subnet, flat, steps.number, steps.round, first_step=steps.first)
    for step in range(steps.count):
        if not go_on():
            return None
        work.step(samples, order, step)
    work.check_buffers()
    return flat[: len(pulled)].cpu()
