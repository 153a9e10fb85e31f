"""Train subnets without rounds: each is committed by itself, and the next one drawn from what nobody holds.

A lane has one subnet after another. A subnet's neurons are drawn, and its values copied, when the one before it is
committed; so the order of the commits alone decides the bits, whoever trains, when and how often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.partition import Mask, widths
from idletrain.nn.ist.pool import NeuronPool
from idletrain.nn.ist.schemes import SubnetPlace, SubnetSpec, by_neurons, listed
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.network import Network
from idletrain.nn.program import Program


@dataclass(frozen=True)
class OpenSubnet:
    """A subnet between its draw and its commit.

    Attributes:
        members: Its neurons `[neurons]`.
        subnet: Their tensors' positions in the network.
        began: The values that it begins with, as `Network.pull` returned them at its draw.
        number: Subnets that its lane had before.
        first_step: Steps that a neuron had on average at its draw, by which schedules go.
    """

    members: Mask
    subnet: Subnet
    began: Tensor
    number: int
    first_step: int


class RollingSubnets:
    """The open subnets of a network, one in each lane, and the clock of its training.

    Args:
        program: The run's program.
        network: The network, which commits change.
        specs: Every lane's share of each group of neurons.

    Attributes:
        opened: The open subnet of each lane.
        commits: Subnets that were committed.
        neuron_steps: Local steps of all neurons together.
    """

    def __init__(self, program: Program, network: Network, specs: Sequence[SubnetSpec]) -> None:
        self._program, self._network = program, network
        sizes = program.layout.sizes
        by_group = [widths(size, [spec.share for spec in specs]) for size in sizes]
        self._counts = list(zip(*by_group, strict=True))
        self._pool = NeuronPool(program.training.seed, sizes)
        self.commits = self.neuron_steps = 0
        self.opened = [self._draw(lane, 0) for lane in range(len(specs))]

    @property
    def neurons(self) -> tuple[int, ...]:
        """Return the number of neurons of each lane's subnets."""
        return tuple(map(sum, self._counts))

    @property
    def rounds(self) -> int:
        """Return how many times a neuron had a round's local steps on average, at most the job's rounds."""
        return self._rounds_of(self.neuron_steps)

    def _rounds_of(self, neuron_steps: int) -> int:
        training = self._program.training
        return min(training.rounds, neuron_steps // len(self._pool.steps) // training.local_steps)

    @property
    def mean_steps(self) -> int:
        """Return the local steps that a neuron had on average, rounded down."""
        return self.neuron_steps // len(self._pool.steps)

    @property
    def pace(self) -> NDArray[np.float64]:
        """Return each neuron's steps over those of the mean `[neurons]`; ones before the first commit."""
        steps = self._pool.steps
        return steps / steps.mean() if self.commits else np.ones(len(steps))

    def rounds_after(self, lane: int, steps: int) -> int:
        """Return the `rounds` once a lane's open subnet is committed with so many steps."""
        done = self.neuron_steps + self.neurons[lane] * steps
        return self._rounds_of(done)

    def places(self) -> list[SubnetPlace]:
        """Return the place of every open subnet, which is sent with its lease."""
        return [listed(opened.members) for opened in self.opened]

    def commit(self, lane: int, update: Tensor, steps: int) -> None:
        """Write a subnet's update into the network and draw the next one in its lane.

        Args:
            lane: Its lane.
            update: Its flat buffer.
            steps: Local steps in it.
        """
        ended, rounds = self.opened[lane], self.rounds
        weight = int(ended.members.sum()) / len(ended.members)
        self._network.commit_one(ended.subnet, update, ended.began, weight)
        self._pool.give_back(ended.members, steps)
        self.neuron_steps += int(ended.members.sum()) * steps
        self.commits += 1
        if self.rounds > rounds:
            self._network.average()
        self.opened[lane] = self._draw(lane, ended.number + 1)

    def _draw(self, lane: int, number: int) -> OpenSubnet:
        members = self._pool.draw(self._counts[lane], lane, number)
        return self._open(members, number, min(self.mean_steps, self._last_first_step))

    def _open(self, members: Mask, number: int, first_step: int) -> OpenSubnet:
        subnet = cut(self._program.layout, members)
        return OpenSubnet(members, subnet, self._network.pull(subnet), number, first_step)

    @property
    def _last_first_step(self) -> int:
        """Return the last step from which a schedule has a subnet's local steps left."""
        training = self._program.training
        return (training.rounds - 1) * training.local_steps

    # --- in a snapshot ------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all that the network does not say, as arrays by name."""
        return {
            "counts": np.array([self.commits, self.neuron_steps]),
            "steps": self._pool.steps,
            "members": np.stack([np.packbits(opened.members) for opened in self.opened]),
            "opened": np.array([(opened.number, opened.first_step) for opened in self.opened]),
            "began": torch.cat([opened.began for opened in self.opened]).numpy(),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take up what `arrays` returned, beside a network with the values of that time.

        Raises:
            ValueError: they are not of these lanes and this network.
        """
        steps = arrays["steps"]
        if steps.shape != self._pool.steps.shape or len(arrays["members"]) != len(self.opened):
            raise ValueError("other lanes or neurons")
        self.commits, self.neuron_steps = map(int, arrays["counts"])
        self._pool.steps[:] = steps
        self._pool.is_free[:] = True
        bits = [np.unpackbits(row, count=len(steps)).astype(np.bool_) for row in arrays["members"]]
        opened = [self._open(mask, *map(int, own)) for mask, own in zip(bits, arrays["opened"], strict=True)]
        began = torch.split(torch.from_numpy(arrays["began"]), [len(one.began) for one in opened])
        self.opened = [replace(one, began=values) for one, values in zip(opened, began, strict=True)]
        for mask in bits:
            self._pool.is_free &= ~mask


def equal_specs(program: Program) -> tuple[SubnetSpec, ...]:
    """Return the specs of lanes of equal shares, which leave `training.slack` of what they hold free."""
    training = program.training
    return by_neurons([1 / training.subnets / (1 + training.slack)] * training.subnets)


def check_rolling(program: Program) -> None:
    """Check that a network can be trained without rounds.

    Raises:
        JobError: it cannot.
    """
    layout, training, field = program.layout, program.training, "preemption.policy: rolling"
    if not layout.groups or training.trains_whole:
        raise JobError(f"{field} shares out neurons, and the subnets have all of the network's; set it to reissue")
    if program.output:
        raise JobError(f"{field} does not go with a very wide output, whose labels keep their workers; set reissue")
    if layout.skippable:
        raise JobError(f"{field} shares out neurons, and model.split divides blocks; leave one of the two out")
    if any(layout.fixed):
        raise JobError(f"{field} draws neurons anew, and model.fixed keeps them; leave one of the two out")
    _check_smallest_group(layout, training.subnets, training.slack, field)


def _check_smallest_group(layout: Layout, subnets: int, slack: float, field: str) -> None:
    smallest = min(layout.groups, key=lambda group: group.size)
    needed = math.ceil(subnets * (1 + slack))
    if smallest.size < needed:
        raise JobError(
            f"{field}: {subnets} subnets with training.slack: {slack:g} need {needed} neurons in each group, and "
            f"{smallest.name} has {smallest.size}; take fewer training.subnets, or put it into model.exclude"
        )
