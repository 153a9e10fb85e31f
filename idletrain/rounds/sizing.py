"""Choose subnet sizes for the connected workers, and find the subnets that fit nowhere."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.nn.ist.schemes import SubnetSpec
from idletrain.nn.outofcore.executing.requirements import OutOfCoreForecast
from idletrain.nn.program import Program
from idletrain.rounds import lockstep_rules, widths
from idletrain.rounds.table import RoundState
from idletrain.rounds.widths import Capacity


class SubnetSizing:
    """A run's subnets beside its workers' memory and speed.

    Args:
        job: The job.
        program: Its network.
        capacities: What each worker that is here brings, by address, as its membership keeps it.
    """

    def __init__(self, job: Job, program: Program, capacities: Mapping[str, Capacity]) -> None:
        self._job, self._program, self._measured = job, program, capacities
        self._out_of_core = OutOfCoreForecast(program)
        self._need_bytes = self._out_of_core.need_bytes
        self._narrowest_bytes = self._need_bytes(1 / min(program.layout.sizes, default=1))

    def capacities(self) -> dict[str, Capacity]:
        """Return what the workers that are here bring, within the job's memory budget for each."""
        return {address: self.capacity(address) for address in self._measured}

    def capacity(self, address: str) -> Capacity:
        """Return what a worker brings that is here."""
        measured = self._measured[address]
        return replace(measured, memory_bytes=min(measured.memory_bytes, self._job.memory.budget or sys.maxsize))

    def plan(self) -> tuple[tuple[SubnetSpec, ...], ...]:
        """Plan the subnets of every phase for the workers that are here; return nothing for a job without phases.

        Raises:
            RunError: as `specs`, or no worker can hold a subnet of some phase.
        """
        training = self._program.training
        return tuple(self.specs(phase.first_round) for phase in training.every_phase) if training.listed_phases else ()

    def specs(self, round_: int) -> tuple[SubnetSpec, ...]:
        """Plan a round's subnets for the workers that are here.

        Under `reissue` neither their measured speed nor their present number counts, which are noise to a result that
        is a function of the job (one of seven undisturbed runs of workflows/digits.yaml differed).

        Raises:
            RunError: No worker can hold a subnet, or lockstep's workers cannot hold all labels together.
        """
        workers = sorted(self.capacities().values(), key=lambda worker: -worker.memory_bytes)
        if self._job.preemption.policy == "reissue":
            count = self._job.nodes.count
            workers = [replace(worker, steps_per_second=1.0) for worker in workers + workers[-1:] * count][:count]
        training = self._program.training
        phase = training.phase(round_)
        policy = self._job.preemption.policy
        networks = widths.networks_held(policy, training.slack, phase.copies)
        if policy == "rolling":  # a slow node costs its own neurons' pace, a small one is narrow
            lanes = itertools.islice(itertools.cycle(workers), phase.subnets)
            workers = [replace(worker, steps_per_second=1.0) for worker in lanes]
        if self._program.layout.skippable:
            shares = widths.equal_shares(workers, phase.subnets, self._need_bytes, phase.copies)
            return self._program.specs(shares, phase.copies)
        smallest = min(self._program.layout.sizes, default=1)
        mode, costs = self._program.out_of_core, None
        if mode != "never":
            streams = all(worker.streams for worker in workers)
            costs = widths.OutOfCoreCosts(
                functools.partial(self._out_of_core.least_bytes, streams=streams),
                functools.partial(self._out_of_core.seconds, streams=streams),
                mode == "always",
            )
        if training.listed_phases:
            shares = widths.shares_of_phase(workers, phase, self._need_bytes, smallest, costs, training.phases_field)
        else:
            shares = widths.shares(workers, phase.subnets, self._need_bytes, smallest, costs, networks)
        if training.mode == "lockstep" and sum(shares) < widths.WHOLE_NETWORK:
            raise RunError(
                f"training.mode: lockstep needs all labels at once, and the workers hold {sum(shares):.0%} of them; "
                "take more or larger workers"
            )
        return self._program.specs(shares, phase.copies)

    def needs(self, specs: Sequence[SubnetSpec]) -> tuple[tuple[int, ...], frozenset[int]]:
        """Return the bytes that each subnet needs, and the subnets that are trained out of core.

        Those are all or none if the job says so, else those that no worker here can hold.
        """
        shares = [spec.share if self._program.layout.groups else 1.0 for spec in specs]
        capacities = self.capacities().values()
        largest = max((capacity.memory_bytes for capacity in capacities), default=sys.maxsize)
        mode, streams = self._program.out_of_core, all(capacity.streams for capacity in capacities)
        exclusive = frozenset(
            k
            for k, share in enumerate(shares)
            if mode == "always" or (mode == "auto" and self._need_bytes(share) > largest)
        )
        needs = (
            self._out_of_core.least_bytes(share, streams=streams) if k in exclusive else self._need_bytes(share)
            for k, share in enumerate(shares)
        )
        return tuple(needs), exclusive

    def misfit(self, capacity: Capacity) -> str | None:
        """Say why a worker is too small for any subnet, also out of core; None if it is not."""
        need, has = self._narrowest_bytes, capacity.memory_bytes
        if has < need and self._program.out_of_core != "never":
            share = 1 / min(self._program.layout.sizes, default=1)
            need = min(need, self._out_of_core.least_bytes(share, streams=capacity.streams))
        return f"it has {has >> 20} MiB free and the narrowest subnet needs {need >> 20}" if has < need else None

    def misfits(self, state: RoundState) -> Iterator[str]:
        """Say which subnets wait because no worker is large enough, or too few are there to take them together."""
        if not state.subnets.waiting or not self._measured:
            return
        capacities = self.capacities()
        if state.rules.lockstep:
            cohort = lockstep_rules.lockstep_cohort(state)
            alike = {address: capacity for address, capacity in capacities.items() if capacity.cohort == cohort}
            if len(alike) < len(state.subnets):
                here = f"{len(capacities)} workers are here"
                here += f", {len(alike)} alike" if len(alike) < len(capacities) else ""
                yield f"{len(state.subnets)} subnets in lockstep need a worker each, whose machines are alike; {here}"
            capacities = alike
        largest = max((capacity.memory_bytes for capacity in capacities.values()), default=0)
        for k in state.subnets.waiting:
            need = state.subnets[k].need_bytes
            if need <= largest:  # and so do all that follow
                break
            yield f"subnet {k} needs {need >> 20} MiB; the largest worker has {largest >> 20} MiB"
