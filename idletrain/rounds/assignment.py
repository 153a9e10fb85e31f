"""Choose the worker for each subnet: the smallest willing worker that can hold it. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from idletrain.exchange.messages import LeaseId
from idletrain.rounds import lockstep_rules
from idletrain.rounds.protocol import GrantLease
from idletrain.rounds.table import (
    HeldSubnet,
    Lease,
    Phase,
    RoundState,
    SubnetState,
    WorkerState,
    with_subnet,
    with_worker,
)

QUARANTINE_AFTER = 2  # damaged pushes by one worker (DLRover and NVFlare exclude after a few, too)


def is_idle(worker: WorkerState) -> bool:
    """Return whether a worker holds no subnet."""
    return not worker.attempts


def has_room(worker: WorkerState) -> bool:
    """Return whether a busy worker may hold another subnet, to pull it while it trains."""
    return worker.stays and 0 < len(worker.attempts) < worker.leases


def queued_subnets(state: RoundState) -> Sequence[int]:
    """Return the subnets that are leased to a worker that first finishes another one."""
    several = (worker.attempts for worker in state.workers.values() if len(worker.attempts) > 1)
    behind = [item for attempts in several for item in list(attempts.items())[1:]]
    leases = ((held.number, state.lease_of(held.number, attempt)) for attempt, held in behind)
    return [k for k, lease in leases if lease and lease.queued]


def able_workers(state: RoundState, subnet: SubnetState) -> list[str]:
    """Return the workers that could take a subnet now, or (but for lockstep) once they are done with another."""
    return [
        name
        for name, worker in state.workers.items()
        if worker.stays and _is_sound(worker) and worker.memory_bytes >= subnet.need_bytes
        if is_idle(worker) or not state.rules.lockstep
    ]


def lease_subnets(
    state: RoundState, now: float, subnets: Sequence[int], willing: Callable[[WorkerState], bool]
) -> tuple[RoundState, tuple[GrantLease, ...]]:
    """Lease subnets, in their order, each to the smallest willing worker whose free memory can hold it."""
    if not subnets:
        return state, ()
    staying = {name: worker for name, worker in state.workers.items() if worker.stays}
    if state.rules.lockstep:
        staying = lockstep_rules.of_cohort(state, staying)
    room = sorted((_free_bytes(worker), name) for name, worker in staying.items() if willing(worker))
    # In lockstep a busy worker is not freed until every subnet has a worker.
    others = {n: w for n, w in staying.items() if _is_sound(w) and (willing(w) or not state.rules.lockstep)}
    largest_sound = max((worker.memory_bytes for worker in others.values()), default=0)
    commands: list[GrantLease] = []
    before = state
    for k in subnets if room else ():
        subnet = before.subnets[k]
        if not _worth_leasing(before, subnet):
            continue
        large = range(bisect.bisect_left(room, (subnet.need_bytes, "")), len(room))
        avoided = _avoided(subnet, others)
        fitting = (i for i in large if _fits(staying[room[i][1]], subnet, largest_sound))
        chosen = next((i for i in fitting if room[i][1] not in avoided), None)
        if chosen is None:
            continue
        _, name = room.pop(chosen)
        state, command = grant(state, now, k, name)
        commands.append(command)
    return state, tuple(commands)


def grant(state: RoundState, now: float, k: int, name: str, *, backup: bool = False) -> tuple[RoundState, GrantLease]:
    """Lease a subnet to a worker under the next attempt's number, in place of its lease or as a backup beside it."""
    worker, subnet, attempt = state.workers[name], state.subnets[k], state.attempts + 1
    lease = Lease(
        attempt=attempt,
        worker=name,
        granted_at=now,
        expires=now + state.rules.lease_seconds,
        base_steps=subnet.steps,
        stored_steps=subnet.steps,
        reported_steps=subnet.steps,
        reported_at=now,
        progress_at=now,
        paced_at=now,
        queued=bool(worker.attempts),
    )
    if backup:
        leased = replace(subnet, backup=lease)
    else:
        for former in subnet.leases:  # it waits behind another subnet
            state = unwanted(state, former, now)
        leased = replace(subnet, phase=Phase.LEASED, lease=lease, in_flight=(0, 0.0))
    state = with_subnet(replace(state, attempts=attempt), k, leased)
    worker = state.workers[name]
    held = HeldSubnet(k, subnet.need_bytes, subnet.exclusive)
    state = with_worker(state, name, replace(worker, attempts={**worker.attempts, attempt: held}))
    return state, GrantLease(LeaseId(state.run, state.epoch, subnet.round, k, attempt), name, subnet.steps, backup)


def unwanted(state: RoundState, lease: Lease, now: float) -> RoundState:
    """Return the state in which a worker is to end an attempt that has no lease any more."""
    worker = state.workers.get(lease.worker)
    if worker is None or lease.attempt not in worker.attempts:
        return state
    over = {**worker.unwanted, lease.attempt: now}
    pace = lease.step_seconds or worker.step_seconds  # what is newer
    return with_worker(state, lease.worker, replace(worker, unwanted=over, step_seconds=pace))


def free_slot(state: RoundState, name: str, attempt: int, now: float) -> RoundState:
    """Remove a finished attempt from its worker; the next one that it holds, if any, begins to train."""
    worker = state.workers.get(name)
    if worker is None or attempt not in worker.attempts:
        return state
    left = {other: held for other, held in worker.attempts.items() if other != attempt}
    for following, (k, *_) in list(left.items())[:1]:
        lease = state.lease_of(k, following)
        if lease and lease.queued:
            lease = replace(lease, queued=False, granted_at=now, reported_at=now, progress_at=now, paced_at=now)
            state = with_subnet(state, k, state.subnets[k].with_lease(lease))
    over = {other: since for other, since in worker.unwanted.items() if other != attempt}
    hung = worker.hung and attempt not in worker.unwanted  # what seemed to hang has ended after all
    return with_worker(state, name, replace(worker, attempts=left, unwanted=over, hung=hung))


def take_turn(state: RoundState, lease: Lease, since: float) -> RoundState:
    """Return the state in which an attempt has trained since a time, perhaps before one that its worker got earlier.

    A worker trains first what it has pulled first.
    """
    worker = state.workers.get(lease.worker)
    if not lease.queued or worker is None or lease.attempt not in worker.attempts:
        return state
    first, *_ = worker.attempts
    turn = worker.attempts[lease.attempt]
    trains = replace(lease, queued=False, granted_at=since)
    state = with_subnet(state, turn.number, state.subnets[turn.number].with_lease(trains))
    state = with_worker(state, lease.worker, replace(worker, attempts={lease.attempt: turn, **worker.attempts}))
    expected = state.lease_of(worker.attempts[first].number, first)
    return _queued_last(state, expected) if expected and expected.doing == "wait" else state


def yield_turn(state: RoundState, lease: Lease) -> RoundState:
    """Return the state in which an attempt that says that it waits is queued behind the one that its worker trains."""
    worker = state.workers.get(lease.worker)
    if lease.queued or lease.doing != "wait" or worker is None or lease.attempt not in worker.attempts:
        return state
    leases = (state.lease_of(held.number, attempt) for attempt, held in worker.attempts.items())
    trains = any(other and other.doing == "train" and not other.queued for other in leases)
    return _queued_last(state, lease) if trains else state


def _queued_last(state: RoundState, lease: Lease) -> RoundState:
    worker = state.workers[lease.worker]
    own = worker.attempts[lease.attempt]
    queued = state.subnets[own.number].with_lease(replace(lease, queued=True))
    others = {attempt: held for attempt, held in worker.attempts.items() if attempt != lease.attempt}
    state = with_subnet(state, own.number, queued)
    return with_worker(state, lease.worker, replace(worker, attempts={**others, lease.attempt: own}))


def _avoided(subnet: SubnetState, others: Mapping[str, WorkerState]) -> frozenset[str]:
    """Return the workers on which a subnet failed, if there is another that can hold it; a second opinion is due."""
    failed = frozenset((*subnet.diverged, *subnet.failed))
    if not failed:
        return failed
    fresh = any(name not in failed and other.memory_bytes >= subnet.need_bytes for name, other in others.items())
    return failed if fresh else frozenset()


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


def _free_bytes(worker: WorkerState) -> int:
    held = worker.attempts.values()
    return 0 if any(subnet.exclusive for subnet in held) else worker.memory_bytes - sum(s.need_bytes for s in held)
