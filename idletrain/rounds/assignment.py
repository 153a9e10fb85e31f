"""Choose the worker for each subnet: the smallest willing worker that can hold it. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

from idletrain.exchange.messages import LeaseId
from idletrain.rounds import lockstep_rules
from idletrain.rounds.protocol import GrantLease
from idletrain.rounds.table import Phase, RoundState, SubnetState, WorkerState, with_subnet, with_worker

QUARANTINE_AFTER = 2  # damaged pushes by one worker (DLRover and NVFlare exclude after a few, too)


def is_idle(worker: WorkerState) -> bool:
    """Return whether a worker holds no subnet."""
    return not worker.attempts


def has_room(worker: WorkerState) -> bool:
    """Return whether a busy worker may hold another subnet, to pull it while it trains."""
    return not worker.draining and 0 < len(worker.attempts) < worker.leases


def queued_subnets(state: RoundState) -> Sequence[int]:
    """Return the subnets that are leased to a worker that first finishes another one."""
    several = (worker.attempts for worker in state.workers.values() if len(worker.attempts) > 1)
    return [k for attempts in several for k in list(attempts.values())[1:] if state.subnets[k].queued]


def lease_subnets(
    state: RoundState, now: float, subnets: Sequence[int], willing: Callable[[WorkerState], bool]
) -> tuple[RoundState, tuple[GrantLease, ...]]:
    """Lease subnets, in their order, each to the smallest willing worker whose free memory can hold it."""
    if not subnets:
        return state, ()
    staying = {name: worker for name, worker in state.workers.items() if not worker.draining}
    if state.rules.lockstep:
        staying = lockstep_rules.of_cohort(state, staying)
    room = sorted((_free_bytes(state, worker), name) for name, worker in staying.items() if willing(worker))
    # In lockstep a busy worker is not freed until every subnet has a worker.
    others = [w for w in staying.values() if _is_sound(w) and (willing(w) or not state.rules.lockstep)]
    largest_sound = max((worker.memory_bytes for worker in others), default=0)
    commands: list[GrantLease] = []
    before = state
    for k in subnets if room else ():
        subnet = before.subnets[k]
        if not _worth_leasing(before, subnet):
            continue
        able = range(bisect.bisect_left(room, (subnet.need_bytes, "")), len(room))
        chosen = next((i for i in able if _fits(staying[room[i][1]], subnet, largest_sound)), None)
        if chosen is None:
            continue
        _, name = room.pop(chosen)
        state, command = _grant(state, now, k, subnet, name)
        commands.append(command)
    return state, tuple(commands)


def _grant(state: RoundState, now: float, k: int, subnet: SubnetState, name: str) -> tuple[RoundState, GrantLease]:
    """Lease a subnet to a worker under the next attempt's number."""
    worker, attempt = state.workers[name], state.attempts + 1
    leased = replace(
        subnet,
        phase=Phase.LEASED,
        attempt=attempt,
        worker=name,
        leased_at=now,
        expires=now + state.rules.lease_seconds,
        base_steps=subnet.steps,
        reported_steps=subnet.steps,
        reported_at=now,
        queued=bool(worker.attempts),
        in_flight=(0, 0.0),
    )
    state = with_subnet(replace(state, attempts=attempt), k, leased)
    state = with_worker(state, name, replace(worker, attempts={**worker.attempts, attempt: k}))
    return state, GrantLease(LeaseId(state.run, state.epoch, state.round, k, attempt), name, subnet.steps)


def free_slot(state: RoundState, name: str, attempt: int, now: float) -> RoundState:
    """Remove a finished attempt from its worker; the next one that it holds, if any, begins to train."""
    worker = state.workers.get(name)
    if worker is None or attempt not in worker.attempts:
        return state
    left = {other: k for other, k in worker.attempts.items() if other != attempt}
    for following, k in list(left.items())[:1]:
        subnet = state.subnets[k]
        if subnet.queued and subnet.attempt == following:
            state = with_subnet(state, k, replace(subnet, queued=False, leased_at=now, reported_at=now))
    return with_worker(state, name, replace(worker, attempts=left))


def _is_sound(worker: WorkerState) -> bool:
    return worker.faults < QUARANTINE_AFTER


def _fits(worker: WorkerState, subnet: SubnetState, largest_sound: int) -> bool:
    """Return whether a worker may take a subnet that its memory can hold.

    A worker in quarantine gets only what no sound worker can hold; a subnet that is trained out of core needs a worker
    for itself.
    """
    trusted = _is_sound(worker) or subnet.need_bytes > largest_sound
    return trusted and not (subnet.exclusive and worker.attempts)


def _worth_leasing(state: RoundState, subnet: SubnetState) -> bool:
    """Return whether a subnet is to be leased (again).

    Under `salvage` a lost subnet goes on elsewhere only while others train anyway: nobody waits for it alone, unless
    there are no steps at all that the round could be closed with.
    """
    if not (state.rules.salvage and subnet.lost):
        return True
    return bool(state.subnets.count(Phase.LEASED)) or not state.subnets.started


def _free_bytes(state: RoundState, worker: WorkerState) -> int:
    held = [state.subnets[k] for k in worker.attempts.values()]
    return 0 if any(subnet.exclusive for subnet in held) else worker.memory_bytes - sum(s.need_bytes for s in held)
