"""Lease a slow subnet a second time, to an idle worker, once the rest of its round is done (MapReduce, OSDI 2004, 3.6).

Under `reissue` the bits are the same whichever attempt finishes first. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from idletrain.rounds import rolling_rules
from idletrain.rounds.assignment import grant
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import GrantLease
from idletrain.rounds.table import Lease, Phase, RoundState, SubnetState
from idletrain.rounds.verdicts import DEATHS, suspects, typical_step_seconds
from idletrain.rounds.worker_table import WorkerState

SLOWER = 1.5  # a backup pays where the first attempt needs so many times its seconds
LEAST_GAIN_SECONDS = 1.0  # a lease's own way to a worker, and noise
PAUSE_SECONDS = 0.1


def lease_slow_again(state: RoundState, now: float) -> tuple[RoundState, tuple[GrantLease, ...]]:
    """Lease to each idle worker the subnet that would take longest without it, where that pays."""
    waiting = rolling_rules.still_needed(state) if state.rules.rolling else state.subnets.waiting
    if state.rules.salvage or state.rules.lockstep or waiting or not state.subnets.count(Phase.LEASED):
        return state, ()
    if now - state.backups_at < PAUSE_SECONDS:
        return state, ()
    state = replace(state, backups_at=now)
    idle = sorted(
        (state.workers[name].step_seconds or math.inf, name)
        for name in state.workers.idle
        if state.workers[name].is_sound
    )
    typical = typical_step_seconds(state)
    if not idle or typical is None:
        return state, ()
    commands: list[GrantLease] = []
    slow = [k for k, subnet in enumerate(state.subnets) if subnet.phase is Phase.LEASED and not subnet.backup]
    for k in sorted(slow, key=lambda k: -_seconds_left(state, state.subnets[k].lease, now, math.inf, typical)):
        subnet = state.subnets[k]
        quickest = _first_able(state, subnet, idle)
        if quickest and _pays(state, subnet, state.workers[quickest[1]], now, typical):
            idle.remove(quickest)
            state, command = grant(state, now, k, quickest[1], backup=True)
            commands.append(command)
        if not idle:
            break
    return state, tuple(commands)


def _first_able(state: RoundState, subnet: SubnetState, idle: Sequence[tuple[float, str]]) -> tuple[float, str] | None:
    """Return the first of the idle workers, the quickest first, that can hold a subnet and did not fail on it.

    None after two deaths in it: who trains it next is chosen with care.
    """
    if len(suspects(subnet)) >= DEATHS - 1:
        return None
    failed = {*subnet.diverged, *subnet.failed, subnet.lease.worker}
    able = (one for one in idle if one[1] not in failed and state.workers[one[1]].memory_bytes >= subnet.need_bytes)
    return next(able, None)


def _pays(state: RoundState, subnet: SubnetState, worker: WorkerState, now: float, typical: float) -> bool:
    """Return whether a worker would be done with a subnet, from its last checkpoint, well before its first attempt."""
    needed = (state.rules.local_steps - subnet.steps) * (worker.step_seconds or typical)
    return _seconds_left(state, subnet.lease, now, needed, typical) > SLOWER * needed + LEAST_GAIN_SECONDS


def _seconds_left(state: RoundState, lease: Lease, now: float, needed: float, typical: float) -> float:
    """Estimate the seconds that an attempt still takes, at its own pace; for ever if it has stopped for `needed`."""
    left = state.rules.local_steps - lease.reported_steps
    if now - lease.progress_at > SLOWER * needed + LEAST_GAIN_SECONDS:
        return math.inf
    worker = state.workers.get(lease.worker)
    pace = lease.step_seconds or (worker.step_seconds if worker else None) or typical
    return max(0.0, left * pace - (now - lease.progress_at))
