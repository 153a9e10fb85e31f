"""What out-of-core training of a subnet would take on a node, foreseen where the network is."""

from __future__ import annotations

import functools

import numpy as np
import torch

from idletrain.nn.local_steps import assemble
from idletrain.nn.memory import SCRATCH_BYTES, subnet_need, subnet_of_share
from idletrain.nn.outofcore.executing.trainer import learn_profile
from idletrain.nn.outofcore.planning.plan import InfeasibleError, MemoryPlan, least_bytes, make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink
from idletrain.nn.program import Program

# An ordinary cloud disk's guaranteed rate (EBS gp3 without extras), and a tensor's handling as the bench saw it; a
# worker measures its own before it plans.
ASSUMED_LINK = SwapLink(125e6, 125e6, 2e-4)
WEIGHT = 0.02  # of the made-up values: any will do for seconds and bytes, as long as they are no denormals


class OutOfCoreForecast:
    """Predicts a step of a subnet of any share, from one batch run unit by unit here.

    Args:
        program: The run's program.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.need_bytes = subnet_need(program)
        self.profile = functools.cache(self._profile)
        self._least_bytes = functools.cache(lambda share, streams: least_bytes(self.profile(share), stream=streams))
        self._seconds = functools.cache(self._seconds_of)

    def least_bytes(self, share: float, *, streams: bool = True) -> int:
        """The least memory in which a subnet can be trained, on a node that can stream parameters or not (a GPU's)."""
        least: int = self._least_bytes(share, streams)
        return least

    def seconds(self, share: float, memory_bytes: int, *, streams: bool = True) -> float:
        """Of a step on such a node at this machine's pace, in core where it fits; infinite where nothing does."""
        return self._seconds(share, memory_bytes, streams)

    def plan(self, share: float, memory_bytes: int, *, streams: bool = True) -> MemoryPlan:
        """The plan of a node with that much memory.

        Raises:
            InfeasibleError: there is none.
        """
        return make_memory_plan(self.profile(share), memory_bytes, stream=streams)

    def _seconds_of(self, share: float, memory_bytes: int, streams: bool) -> float:
        if self.need_bytes(share) <= memory_bytes:
            return self.profile(share).compute_seconds
        try:
            return self.plan(share, memory_bytes, streams=streams).seconds
        except InfeasibleError:
            return float("inf")

    def _profile(self, share: float) -> Profile:
        program = self._program
        subnet = subnet_of_share(program, share)
        flat = torch.empty(subnet.parameters).normal_(0, WEIGHT, generator=torch.Generator().manual_seed(0))
        samples = program.source.open()
        inputs, labels = samples.batch(np.arange(min(program.training.batch_size, len(samples))))
        return learn_profile(
            assemble(program.module, subnet, flat),
            inputs,
            labels,
            program.loss,
            state_slots=len(program.slots) - 1,
            resident_bytes=SCRATCH_BYTES,
            link=ASSUMED_LINK,
            names=program.memory.units,
        ).profile
