"""Choose the worker for each subnet: the smallest willing worker that can hold it. Pure."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from idletrain.exchange.messages import LeaseId
from idletrain.rounds import lockstep_rules
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import GrantLease
from idletrain.rounds.table import (
    Lease,
    Phase,
    RoundState,
    SubnetState,
    with_subnet,
    with_worker,
)
from idletrain.rounds.verdicts import needs_witness
from idletrain.rounds.worker_table import HeldSubnet, WorkerState

FIRST_LOOK = 64  # workers that are looked at first, beside four for each subnet


def queued_subnets(state: RoundState) -> Sequence[int]:
    """Return the subnets that are leased to a worker that first finishes another one."""
    several = (state.workers[name].attempts for name in state.workers.queueing)
    behind = [item for attempts in several for item in list(attempts.items())[1:]]
    leases = ((held.number, state.lease_of(held.number, attempt)) for attempt, held in behind)
    return [k for k, lease in leases if lease and lease.queued]


def able_workers(state: RoundState, subnet: SubnetState) -> list[str]:
    """Return the workers that could take a subnet now, or (but for lockstep) once they are done with another."""
    return [
        name
        for name, worker in state.workers.items()
        if worker.stays and worker.is_sound and worker.memory_bytes >= subnet.need_bytes
        if worker.is_idle or not state.rules.lockstep
    ]


def lease_subnets(
    state: RoundState, now: float, subnets: Collection[int], names: Collection[str]
) -> tuple[RoundState, tuple[GrantLease, ...]]:
    """Lease subnets, in their order, each to the smallest of these workers whose free memory can hold it.

    Of many workers the first are enough, where they can hold the subnets.
    """
    if not subnets or not names:
        return state, ()
    before, commands = state, list[GrantLease]()
    sound = functools.partial(_sound_workers, before, names)
    left, room, unseen = subnets, list[tuple[int, str]](), _of_cohort(before, names)
    for more in (FIRST_LOOK + 4 * len(subnets), None):
        seen = itertools.islice(unseen, more)
        room = sorted([*room, *((_free_bytes(before.workers[name]), name) for name in seen)])
        unplaced = []
        for k in left if room else ():
            chosen = _chosen(before, before.subnets[k], room, sound)
            if chosen is None:
                unplaced.append(k)
                continue
            state, command = grant(state, now, k, room.pop(chosen)[1])
            commands.append(command)
            if not room:
                break
        left = unplaced
        if not left:
            break
    return state, tuple(commands)


def queue_subnets(
    state: RoundState, now: float, subnets: Collection[int], names: Iterable[str]
) -> tuple[RoundState, tuple[GrantLease, ...]]:
    """Lease subnets, in their order, each to the first of these workers whose free memory can hold it."""
    before, commands, names = state, list[GrantLease](), iter(names)
    sound = functools.partial(_sound_workers, before, ())
    passed: list[str] = []  # too small for what came before them
    for k in subnets:
        subnet = before.subnets[k]
        if not _worth_leasing(before, subnet):
            continue
        avoided = _avoided(subnet, sound)
        for name in itertools.chain(passed, names):
            worker = before.workers[name]
            fits = _free_bytes(worker) >= subnet.need_bytes and _fits(worker, subnet, sound)
            if fits and name not in avoided:
                state, command = grant(state, now, k, name)
                commands.append(command)
                passed = [other for other in passed if other != name]
                break
            if name not in passed:
                passed.append(name)
        else:
            if not passed:
                break
    return state, tuple(commands)


def _chosen(
    state: RoundState,
    subnet: SubnetState,
    room: Sequence[tuple[int, str]],
    sound: Callable[[], Mapping[str, WorkerState]],
) -> int | None:
    """Return the place of a subnet's worker among those with room, sorted by their free bytes; None if none fits."""
    if not _worth_leasing(state, subnet):
        return None
    avoided = _avoided(subnet, sound)
    for at in range(bisect.bisect_left(room, (subnet.need_bytes, "")), len(room)):
        name = room[at][1]
        if name not in avoided and _fits(state.workers[name], subnet, sound):
            return at
    return None


def _of_cohort(state: RoundState, names: Collection[str]) -> Iterator[str]:
    """Yield those of the workers that may train: in lockstep of one cohort, else all."""
    if not state.rules.lockstep:
        return iter(names)
    return iter(lockstep_rules.of_cohort(state, {name: state.workers[name] for name in names}))


def _sound_workers(state: RoundState, names: Collection[str]) -> dict[str, WorkerState]:
    """Return the sound workers that could take a subnet, now or once they are done with another.

    In lockstep a busy worker is not freed until every subnet has a worker.
    """
    candidates = _of_cohort(state, names) if state.rules.lockstep else state.workers
    workers = {name: state.workers[name] for name in candidates}
    return {name: worker for name, worker in workers.items() if worker.stays and worker.is_sound}


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
    begins = max([now, *(held.due for held in worker.attempts.values())])
    due = begins + (state.rules.local_steps - subnet.steps) * (worker.step_seconds or 0.0)
    held = HeldSubnet(k, subnet.need_bytes, subnet.exclusive, due)
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


def _avoided(subnet: SubnetState, sound: Callable[[], Mapping[str, WorkerState]]) -> frozenset[str]:
    """Return the workers that are not to take a subnet while others can hold it, as a second opinion is due.

    They are those on which it failed, and after deaths all but its witnesses.
    """
    failed = frozenset((*subnet.diverged, *subnet.failed))
    witnesses = frozenset(subnet.witnesses) if needs_witness(subnet) else frozenset()
    if not failed and not witnesses:
        return failed
    able = frozenset(name for name, other in sound().items() if other.memory_bytes >= subnet.need_bytes)
    wanted = (able - failed) & witnesses or able - failed
    return able - wanted if wanted else frozenset()


def _fits(worker: WorkerState, subnet: SubnetState, sound: Callable[[], Mapping[str, WorkerState]]) -> bool:
    """Return whether a worker may take a subnet that its memory can hold.

    A worker in quarantine gets only what no sound worker can hold; a subnet that is trained out of core needs a worker
    for itself.
    """
    if subnet.exclusive and worker.attempts:
        return False
    return worker.is_sound or all(other.memory_bytes < subnet.need_bytes for other in sound().values())


def _worth_leasing(state: RoundState, subnet: SubnetState) -> bool:
    """Return whether a subnet is to be leased (again).

    Under `salvage` a lost subnet goes on elsewhere only while others train anyway: nobody waits for it alone, unless
    there are no steps at all that the round could be closed with. Under `rolling` its steps are about to be committed.
    """
    if state.rules.rolling:
        return not subnet.steps
    if not (state.rules.salvage and subnet.lost):
        return True
    return bool(state.subnets.count(Phase.LEASED)) or not state.subnets.started


def _free_bytes(worker: WorkerState) -> int:
    held = worker.attempts.values()
    return 0 if any(subnet.exclusive for subnet in held) else worker.memory_bytes - sum(s.need_bytes for s in held)
