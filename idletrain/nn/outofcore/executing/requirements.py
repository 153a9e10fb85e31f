"""Forecast the memory and seconds that out-of-core training of a subnet takes on a node."""

from __future__ import annotations

import functools

import numpy as np
import torch

from idletrain.nn.local_steps import assemble
from idletrain.nn.memory import SCRATCH_BYTES, subnet_need, subnet_of_share
from idletrain.nn.outofcore.executing.learn import learn_profile
from idletrain.nn.outofcore.planning.plan import InfeasibleError, MemoryPlan, least_bytes, make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink
from idletrain.nn.program import Program

# Guaranteed rate of an ordinary cloud disk (EBS gp3 without extras), and the seconds per tensor that the bench
# measured; a worker measures its own before it plans.
ASSUMED_LINK = SwapLink(125e6, 125e6, 2e-4)
WEIGHT_STD = 0.02  # standard deviation of the random values; any does for seconds and bytes, unless they are denormals


class OutOfCoreForecast:
    """Predicts a step of a subnet of any share, from one batch run unit by unit on this machine.

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
        """Return the least bytes to train a subnet in; `streams` is False on GPUs, which do not stream parameters."""
        least: int = self._least_bytes(share, streams)
        return least

    def seconds(self, share: float, memory_bytes: int, *, streams: bool = True) -> float:
        """Return a step's seconds in that memory at this machine's speed, in core if it fits; inf if no plan fits."""
        return self._seconds(share, memory_bytes, streams)

    def plan(self, share: float, memory_bytes: int, *, streams: bool = True) -> MemoryPlan:
        """Return the plan of a node with that much memory.

        Raises:
            InfeasibleError: no plan fits.
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
        flat = torch.empty(subnet.parameters).normal_(0, WEIGHT_STD, generator=torch.Generator().manual_seed(0))
        samples = program.source.open()
        inputs, target = samples.batch(np.arange(min(program.training.batch_size, len(samples))))
        return learn_profile(
            assemble(program.module, subnet, flat),
            inputs,
            target,
            program.training_loss,
            state_slots=len(program.slots) - 1,
            resident_bytes=SCRATCH_BYTES,
            link=ASSUMED_LINK,
            names=program.memory.units,
        ).profile
