"""Decide whose fault it is when attempts fail, and when a worker that is alive hangs. Pure.

One worker's word is never enough to end a run: a second opinion is another machine's, where there is one, else another
worker's.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from idletrain.rounds.persistent import replace
from idletrain.rounds.table import Lease, RoundState, SubnetState

ATTEMPTS_ALONE = 3  # where nobody else can be asked: the same steps would end so for ever
ATTEMPTS_AT_MOST = 6  # where others are here but never take the subnet
DEATHS = 3  # of workers in one subnet without a stored step
WITNESSES_AT_MOST = 16  # of a subnet's first death
HANG_STEPS = 10  # a step that takes so many times the typical one never ends
FIRST_STEP_SECONDS = 60.0  # kernels are compiled and caches filled in an attempt's first step
UNKNOWN_STEP_SECONDS = 300.0  # before anybody has measured one
LOAD_SECONDS = 600.0  # unpickling the program and opening its data


def machine_of(worker: str) -> str:
    """Return the host of a worker's address."""
    return worker.split("://", 1)[-1].rsplit(":", 1)[0]


def is_jobs_fault(accusers: Sequence[str], able: Collection[str]) -> bool:
    """Return whether attempts that ended in an error, or in NaN, are the job's fault.

    Args:
        accusers: The worker of each attempt that ended so.
        able: Workers that are here and could take the subnet.
    """
    if len(accusers) >= ATTEMPTS_AT_MOST:
        return True
    if not _is_only_machine(accusers, able):
        return len({machine_of(worker) for worker in accusers}) > 1
    if len({*accusers, *able}) > 1:
        return len(set(accusers)) > 1
    return len(accusers) >= ATTEMPTS_ALONE


def with_death(subnet: SubnetState, worker: str, steps: int, able: Sequence[str]) -> SubnetState:
    """Return a subnet after the death of a worker that trained it and had reported `steps`.

    Args:
        able: Workers that are here and could take the subnet.
    """
    witnesses = subnet.witnesses if subnet.deaths else tuple(able[:WITNESSES_AT_MOST])
    return replace(subnet, deaths=(*subnet.deaths, (worker, steps)), witnesses=witnesses)


def needs_witness(subnet: SubnetState) -> bool:
    """Return whether a worker that was here at a subnet's first death is to train it before it is called deadly.

    A sick worker that is restarted has a new address each time and is idle at once, so that it would get the same
    subnet, and end in it, until the subnet seems to be at fault.
    """
    suspect = suspects(subnet)
    return len(suspect) >= DEATHS - 1 and {*suspect}.isdisjoint(subnet.witnesses)


def is_deadly(subnet: SubnetState, able: Collection[str]) -> bool:
    """Return whether a subnet ends the processes that train it; `able` workers are here and could take it."""
    suspect = suspects(subnet)
    if len(suspect) < DEATHS:
        return False
    if needs_witness(subnet) and not {*able}.isdisjoint(subnet.witnesses) and len(suspect) < ATTEMPTS_AT_MOST:
        return False
    several = len({machine_of(worker) for worker in suspect}) > 1
    return several or _is_only_machine(suspect, able) or len(suspect) >= ATTEMPTS_AT_MOST


def suspects(subnet: SubnetState) -> list[str]:
    """Return the workers that seem to have died of a subnet: each had reported no more steps than an earlier one.

    Who dies of the same step again and again was not preempted.
    """
    deaths = subnet.deaths
    furthest = [max((steps for _, steps in deaths[:n]), default=steps) for n, (_, steps) in enumerate(deaths)]
    return [worker for (worker, steps), most in zip(deaths, furthest, strict=True) if steps <= most]


def typical_step_seconds(state: RoundState) -> float | None:
    """Return the median of the workers' seconds a step; None before one is known."""
    known = [worker.step_seconds for worker in state.workers.values() if worker.step_seconds]
    if not known:
        known = [lease.step_seconds for subnet in state.subnets for lease in subnet.leases if lease.step_seconds]
    return statistics.median(known) if known else None


def hanging(state: RoundState, now: float) -> list[tuple[str, float]]:
    """Return the workers that hang, though they are alive, and for how many seconds.

    An attempt hangs if it makes no step while it is to make some. One whose lease is over hangs if it does not end: a
    step is all that it may finish.
    """
    seconds_by_worker: dict[str, float] = {}
    typical = typical_step_seconds(state)
    for lease in _stepping(state):
        progress_at, patience = lease.progress_at, _patience(state, lease, typical)
        if state.rules.lockstep:  # none makes a step before all do
            group = [lease for subnet in state.subnets for lease in subnet.leases]
            progress_at = max(member.progress_at for member in group)
            patience = max(_patience(state, member, typical) for member in group)
        if now - progress_at > patience:
            seconds_by_worker[lease.worker] = now - progress_at
    for name, worker in state.workers.items():
        for since in worker.unwanted.values():
            if now - since > _patience_for_a_step(state, FIRST_STEP_SECONDS, worker.step_seconds, typical):
                seconds_by_worker[name] = now - since
    return [
        (name, s) for name, s in seconds_by_worker.items() if name in state.workers and not state.workers[name].hung
    ]


def _stepping(state: RoundState) -> list[Lease]:
    """Return the leases whose attempts are to make steps, or to load what those take; in lockstep none that waits."""
    leases = [lease for subnet in state.subnets for lease in subnet.leases if not lease.queued]
    loading = [lease for lease in leases if lease.doing == "load"]
    stepping = [lease for lease in leases if lease.doing == "train"]
    if state.rules.lockstep and (loading or state.subnets.waiting):
        return loading
    return loading + stepping


def _patience(state: RoundState, lease: Lease, typical: float | None) -> float:
    """Return the seconds without progress after which an attempt hangs."""
    if lease.doing == "load":
        return max(state.rules.lease_seconds, LOAD_SECONDS)
    first = FIRST_STEP_SECONDS if lease.reported_steps == lease.base_steps else 0.0
    return _patience_for_a_step(state, first, lease.step_seconds, typical)


def _patience_for_a_step(state: RoundState, at_least: float, own_seconds: float | None, typical: float | None) -> float:
    known = [seconds for seconds in (own_seconds, typical) if seconds]
    longest = HANG_STEPS * max(known) if known else UNKNOWN_STEP_SECONDS
    return max(state.rules.lease_seconds, longest, at_least)


def _is_only_machine(workers: Collection[str], able: Collection[str]) -> bool:
    return len({machine_of(worker) for worker in (*workers, *able)}) < 2
