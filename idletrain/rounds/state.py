"""What happens next in a round: a pure function of what was and what happened.

Rules for whoever edits this file. It knows no Dask, no clock, no files and no tensors: time comes with the events.
Whatever the order of events, a run ends, and a subnet of a round is accepted once.

    subnet:  WAITING ──Lease──► LEASED ──push of all steps──► STORING ──Stored──► STAGED
                ▲                 │  lease over, worker gone, attempt ended, push refused
                └─────────────────┘  (goes on from the last mark)
    round:   TRAINING ──all staged, nobody looking──► COMMITTING ──Committed──► TRAINING of the next
             `salvage` closes it early: marks are stored as they are, the rest is ABSENT
             and of an update on its way what is there, if that is worth more than the mark
             in lockstep a push of all steps is a mark, too; all are STORING at once when all have them
"""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds.protocol import (
    AttemptEnded,
    ClockTick,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Finish,
    GrantLease,
    Heartbeat,
    KeepProgress,
    LeaseLost,
    NoticeReceived,
    PartArrived,
    Persist,
    Persisted,
    Pushed,
    Respond,
    RoundCommand,
    RoundEvent,
    StopRequested,
    WorkerJoined,
    WorkerLeft,
)
from idletrain.rounds.table import Phase, SubnetState, SubnetTable

# A round is worth waiting for half as long again as its subnets took last time: a straggler of ordinary noise makes
# it, a dead or starved node does not. OpenDiLoCo and NVFlare wait a fixed 600 s.
CLOSE_AFTER_TYPICAL = 1.5
DIVERGED_AFTER = 3  # attempts at one subnet that end in NaN: the same steps would end so for ever
FAILED_AFTER = 3  # attempts at one subnet that end in an error of the code: another worker would not help
QUARANTINE_AFTER = 2  # damaged pushes by one worker (DLRover and NVFlare exclude after a few, too)


class RunStage(enum.Enum):
    """The run's state."""

    TRAINING = "training"
    COMMITTING = "committing"
    LAST_EVALUATION = "last-evaluation"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """What does not change during a run.

    Attributes:
        salvage: Close a round without lost subnets, with what they have; else every subnet gets all its steps.
        lockstep: Subnets take every step together: each has a worker for itself, and none is done before all are.
        evaluate_every: Rounds between evaluations.
        target: Accuracy at which the run ends, or None.
    """

    salvage: bool
    local_steps: int
    rounds: int
    lease_seconds: float
    evaluate_every: int
    target: float | None = None
    lockstep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker that may be leased subnets.

    Attributes:
        leases: How many it can hold at once: while it trains one subnet, it pulls the next and pushes the last.
        cohort: Those of one compute the same bits.
        attempts: Those that it holds, in the order in which it trains them, and their subnets.
    """

    memory_bytes: int
    leases: int = 1
    cohort: str = ""
    draining: bool = False
    attempts: Mapping[int, int] = field(default_factory=dict)
    faults: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """A run between two events.

    Attributes:
        attempts: Leases given so far; the next one's label.
        typical_seconds: How long the slowest whole subnet took in the last round that had one, or None.
        slowest_seconds: The same of this round so far.
        looking: Whether the committed network is being evaluated or written; it must not change meanwhile.
    """

    rules: RoundRules
    run: str
    epoch: int
    round: int
    subnets: SubnetTable
    workers: Mapping[str, WorkerState] = field(default_factory=dict)
    stage: RunStage = RunStage.TRAINING
    attempts: int = 0
    opened_at: float = 0.0
    typical_seconds: float | None = None
    slowest_seconds: float | None = None
    evaluating: bool = False
    stopping: bool = False


Transition = tuple[RoundState, tuple[RoundCommand, ...]]


class IllegalEventError(Exception):
    """An event that cannot happen in this state; the state is unchanged."""


def open_run(
    rules: RoundRules,
    run: str,
    epoch: int,
    round_: int,
    needs: tuple[int, ...],
    staged: Mapping[int, int],
    now: float,
    workers: Mapping[str, WorkerState],
    exclusive: frozenset[int] = frozenset(),
) -> RoundState:
    """The state at a run's (re)start; `staged` maps subnets whose updates are durable to their steps, those in `alone`
    are to be trained out of core.

    Where a look was due after the last commit, it may not have been taken: the caller takes it if the state is
    `looking`, and says Looked. After the last round nothing else is left to do.
    """
    subnets = SubnetTable.of(
        replace(subnet, phase=Phase.STAGED, steps=staged[k]) if k in staged else subnet
        for k, subnet in enumerate(_new_subnets(needs, exclusive))
    )
    last = round_ >= rules.rounds  # all rounds are done, but the last look at them was not
    due = last or (round_ > 0 and round_ % rules.evaluate_every == 0)
    return RoundState(
        rules=rules,
        run=run,
        epoch=epoch,
        round=round_,
        subnets=subnets,
        workers=workers,
        stage=RunStage.LAST_EVALUATION if last else RunStage.TRAINING,
        opened_at=now,
        evaluating=due,
    )


def advance(state: RoundState, event: RoundEvent) -> Transition:
    """What follows from an event.

    Raises:
        IllegalEventError: the event cannot happen now.
    """
    if state.stage is RunStage.DONE:
        answer = isinstance(event, Heartbeat | Pushed | PartArrived)
        return state, (Respond(Reply.STALE_ROUND),) if answer else ()
    state, commands = _HANDLERS[type(event)](state, event)
    state, more = _next_actions(state, event.now)
    return state, commands + more


def _on_worker_joined(state: RoundState, event: WorkerJoined) -> Transition:
    worker = WorkerState(memory_bytes=event.memory_bytes, leases=event.leases, cohort=event.cohort)
    return _with_worker(state, event.worker, worker), ()


def _on_worker_left(state: RoundState, event: WorkerLeft) -> Transition:
    worker = state.workers.get(event.worker)
    if worker is None:
        return state, ()
    others = {name: w for name, w in state.workers.items() if name != event.worker}
    cause = "notice" if worker.draining else "kill"
    state = replace(state, workers=others)
    held = (k for k, s in enumerate(state.subnets) if s.phase is Phase.LEASED and s.worker == event.worker)
    return _lose_leases(state, tuple(held), event.now, cause)


def _on_notice(state: RoundState, event: NoticeReceived) -> Transition:
    worker = state.workers.get(event.worker)
    return (_with_worker(state, event.worker, replace(worker, draining=True)) if worker else state), ()


def _on_heartbeat(state: RoundState, event: Heartbeat) -> Transition:
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    subnet = state.subnets[event.lease.subnet]
    subnet = replace(
        subnet,
        expires=event.now + state.rules.lease_seconds,
        reported_steps=max(
            subnet.reported_steps, event.steps
        ),  # a beat may be older than a mark, or than the pull of one
        reported_at=event.now,
    )
    return _with_subnet(state, event.lease.subnet, subnet), (Respond(reply),)


def _on_pushed(state: RoundState, event: Pushed) -> Transition:
    k = event.lease.subnet
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    subnet = state.subnets[k]
    if event.fault is not None:
        return _on_refused(state, event, event.fault)
    if event.steps <= subnet.steps:  # marks may overtake each other on the way
        return state, (Respond(Reply.DUPLICATE),)
    subnet = replace(subnet, steps=event.steps, reported_steps=event.steps, reported_at=event.now)
    partial = event.steps < state.rules.local_steps and not state.rules.salvage
    if not event.update or partial or state.rules.lockstep:
        subnet = replace(subnet, expires=event.now + state.rules.lease_seconds)
        return _with_subnet(state, k, subnet), (Respond(reply), KeepProgress(k))
    state = _with_subnet(state, k, replace(subnet, phase=Phase.STORING, queued=False))
    if not (subnet.lost or subnet.queued):
        state = replace(state, slowest_seconds=max(event.now - subnet.leased_at, state.slowest_seconds or 0.0))
    return state, (Respond(reply), Persist(k, subnet.attempt, event.steps))


def _on_part_arrived(state: RoundState, event: PartArrived) -> Transition:
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    subnet = state.subnets[event.lease.subnet]
    coming = (event.steps, event.norm_fraction) if event.norm_fraction else subnet.in_flight
    subnet = replace(subnet, in_flight=coming, expires=event.now + state.rules.lease_seconds)
    return _with_subnet(state, event.lease.subnet, subnet), (Respond(reply),)


def _on_refused(state: RoundState, event: Pushed, fault: Reply) -> Transition:
    """A payload that cannot be taken: the subnet is leased again from its last mark."""
    k = event.lease.subnet
    subnet = state.subnets[k]
    if fault is Reply.NOT_FINITE:
        subnet = replace(subnet, diverged=subnet.diverged + 1)
        if subnet.diverged >= DIVERGED_AFTER:
            return replace(state, stage=RunStage.DONE), (Respond(fault), Finish("diverged"))
    elif subnet.worker in state.workers:
        worker = state.workers[subnet.worker]
        state = _with_worker(state, subnet.worker, replace(worker, faults=worker.faults + 1))
    state, commands = _lose_leases(_with_subnet(state, k, subnet), (k,), event.now, "refused")
    return state, (Respond(fault), *commands)


def _on_persisted(state: RoundState, event: Persisted) -> Transition:
    subnet = state.subnets[event.subnet]
    if subnet.phase is not Phase.STORING:
        raise IllegalEventError(f"subnet {event.subnet} was stored while {subnet.phase.value}")
    if subnet.steps == state.rules.local_steps:
        # Its task has only to return: the next lease may travel meanwhile.
        state = _free_slot(state, subnet.worker, subnet.attempt, event.now)
    return _with_subnet(state, event.subnet, replace(subnet, phase=Phase.STAGED)), ()


def _on_attempt_ended(state: RoundState, event: AttemptEnded) -> Transition:
    k, cause = event.lease.subnet, "error"
    if event.failed and check_lease(state, event.lease) is Reply.ACCEPTED:
        failures = state.subnets[k].failures + 1
        state = _with_subnet(state, k, replace(state.subnets[k], failures=failures))
        if failures >= FAILED_AFTER:
            return replace(state, stage=RunStage.DONE), (Finish("failed"),)
    worker = state.workers.get(event.worker)
    if worker and event.failed:  # it may be this machine that lacks something: others get the subnet next
        worker = replace(worker, faults=worker.faults + 1)
        state = _with_worker(state, event.worker, worker)
    if worker and event.lease.attempt in worker.attempts:
        state = _free_slot(state, event.worker, event.lease.attempt, event.now)
        cause = "notice" if worker.draining else cause
    subnet = state.subnets[k]
    holds = subnet.phase is Phase.LEASED and subnet.attempt == event.lease.attempt
    if worker and holds and event.out_of_memory and subnet.exclusive:  # it gets nothing as large again
        worker = replace(state.workers[event.worker], memory_bytes=subnet.need_bytes - 1)
        state = _with_worker(state, event.worker, worker)
    return _lose_leases(state, (k,) if holds else (), event.now, cause)


def _on_tick(state: RoundState, event: ClockTick) -> Transition:
    commands: tuple[RoundCommand, ...] = ()
    for k, subnet in enumerate(state.subnets):
        if subnet.phase is Phase.LEASED and event.now > subnet.expires:
            state, more = _lose_leases(state, (k,), event.now, "lease")
            commands += more
    return state, commands


def _on_committed(state: RoundState, event: Committed) -> Transition:
    if state.stage is not RunStage.COMMITTING:
        raise IllegalEventError(f"round {state.round} was committed while {state.stage.value}")
    done = state.round + 1
    if state.stopping:
        return replace(state, round=done, stage=RunStage.DONE), (Finish("stopped"),)
    last = done == state.rules.rounds
    evaluate = last or done % state.rules.evaluate_every == 0
    looks = (Evaluate(evaluate, event.snapshot_due or last),) if evaluate or event.snapshot_due else ()
    if last:
        return replace(state, round=done, stage=RunStage.LAST_EVALUATION, evaluating=True), looks
    opened = replace(
        state,
        round=done,
        stage=RunStage.TRAINING,
        subnets=SubnetTable.of(_new_subnets(event.needs, event.exclusive)),
        opened_at=event.now,
        typical_seconds=state.slowest_seconds or state.typical_seconds,
        slowest_seconds=None,
        evaluating=bool(looks),
    )
    return opened, looks


def _on_evaluated(state: RoundState, event: Evaluated) -> Transition:
    if not state.evaluating:
        raise IllegalEventError(f"nobody was looking at the network of round {state.round}")
    state = replace(state, evaluating=False)
    if state.rules.target is not None and event.accuracy is not None and event.accuracy >= state.rules.target:
        return replace(state, stage=RunStage.DONE), (Finish("reached"),)
    if state.stage is RunStage.LAST_EVALUATION:
        return replace(state, stage=RunStage.DONE), (Finish("completed"),)
    return state, ()


def _on_stop_requested(state: RoundState, _event: StopRequested) -> Transition:
    if state.stage is RunStage.COMMITTING:  # the network is being written: stop behind that
        return replace(state, stopping=True), ()
    return replace(state, stage=RunStage.DONE), (Finish("stopped"),)


_HANDLERS: Mapping[type[RoundEvent], Callable[[RoundState, Any], Transition]] = {
    WorkerJoined: _on_worker_joined,
    WorkerLeft: _on_worker_left,
    NoticeReceived: _on_notice,
    Heartbeat: _on_heartbeat,
    Pushed: _on_pushed,
    PartArrived: _on_part_arrived,
    Persisted: _on_persisted,
    AttemptEnded: _on_attempt_ended,
    ClockTick: _on_tick,
    Committed: _on_committed,
    Evaluated: _on_evaluated,
    StopRequested: _on_stop_requested,
}


def _next_actions(state: RoundState, now: float) -> Transition:
    """Give out waiting subnets, close the round if it is time, and commit it once all is staged."""
    if state.stage is not RunStage.TRAINING:
        return state, ()
    if _finish_lockstep(state):
        return _persist_all(state)
    state, leases = _grant_leases(state, now)
    state, closing = _close(state, now) if _should_close(state, now) else (state, ())
    subnets = state.subnets
    whole = subnets.count(Phase.STAGED, Phase.ABSENT) == len(subnets) and subnets.count(Phase.STAGED)
    if whole and not state.evaluating:
        staged = tuple((k, s.steps) for k, s in enumerate(subnets) if s.phase is Phase.STAGED)
        return replace(state, stage=RunStage.COMMITTING), (*leases, *closing, Commit(state.round, staged))
    return state, (*leases, *closing)


def _finish_lockstep(state: RoundState) -> bool:
    if not state.rules.lockstep or not state.subnets.count(Phase.WAITING, Phase.LEASED):
        return False
    return all(subnet.steps == state.rules.local_steps for subnet in state.subnets)


def _persist_all(state: RoundState) -> Transition:
    """What every subnet has of all its steps is its update: before that, it is a mark to go back to."""
    commands = []
    for k, subnet in enumerate(state.subnets):
        if subnet.phase in (Phase.WAITING, Phase.LEASED):
            state = _with_subnet(state, k, replace(subnet, phase=Phase.STORING))
            commands.append(Persist(k, subnet.attempt, subnet.steps))
    return state, tuple(commands)


def _grant_leases(state: RoundState, now: float) -> Transition:
    """Lease waiting subnets to idle workers; then one more to each, to be pulled while the first trains, if there is
    one for everybody: who takes the last ones of a round is decided by who is done first.
    """
    commands: tuple[RoundCommand, ...] = ()
    if state.rules.lockstep:
        state, commands = _release_other_cohorts(state, now)
    if any(map(_is_idle, state.workers.values())):  # it mostly is not so, and this comes with every event
        state, first = _lease(state, now, state.subnets.waiting, _is_idle)
        state, moved = _lease(state, now, _queue_ahead(state), _is_idle)  # rather now than behind another
        commands += first + moved
    if state.rules.lockstep:
        state, moved = _yield_worker(state, now)
        return state, commands + moved
    if not state.subnets.waiting:
        return state, commands
    if len(state.subnets.waiting) < sum(map(_has_room, state.workers.values())):
        return state, commands
    state, second = _lease(state, now, state.subnets.waiting, _has_room)
    return state, commands + second


def _yield_worker(state: RoundState, now: float) -> Transition:
    """In lockstep nobody is done first: what keeps a worker from a larger subnet that waits goes to an idle one."""
    idle = max((w.memory_bytes for w in state.workers.values() if _is_idle(w) and not w.draining), default=0)
    for waiting in state.subnets.waiting:
        need = state.subnets[waiting].need_bytes
        for k, held in enumerate(state.subnets):
            if held.phase is not Phase.LEASED or not held.need_bytes <= idle < need or held.worker not in state.workers:
                continue
            if state.workers[held.worker].memory_bytes >= need:
                return _lose_leases(state, (k,), now, "moved")
    return state, ()


def lockstep_cohort(state: RoundState) -> str:
    """The cohort that trains in lockstep, as hidden layers have to come out the same on all: one that has a worker for
    every subnet if there is one, first of all that which is at it.
    """
    there: dict[str, list[int]] = {}
    for worker in state.workers.values():
        if not worker.draining:
            there.setdefault(worker.cohort, []).append(worker.memory_bytes)
    needs = sorted((subnet.need_bytes for subnet in state.subnets), reverse=True)

    def holds_all(memories: list[int]) -> bool:
        largest = sorted(memories, reverse=True)[: len(needs)]
        return len(largest) == len(needs) and all(has >= need for has, need in zip(largest, needs, strict=True))

    held = {
        state.workers[s.worker].cohort for s in state.subnets if s.phase is Phase.LEASED and s.worker in state.workers
    }
    return max(there, key=lambda name: (holds_all(there[name]), name in held, len(there[name]), name), default="")


def _release_other_cohorts(state: RoundState, now: float) -> Transition:
    """Take back what workers hold that are not of the kind, once a mark of who is warned can be home."""
    chosen = lockstep_cohort(state)
    others = [
        k
        for k, subnet in enumerate(state.subnets)
        if subnet.phase is Phase.LEASED
        and subnet.worker in state.workers
        and state.workers[subnet.worker].cohort != chosen
    ]
    if any(state.workers[state.subnets[k].worker].draining for k in others):
        return state, ()
    return _lose_leases(state, others, now, "moved")


def _is_idle(worker: WorkerState) -> bool:
    return not worker.attempts


def _has_room(worker: WorkerState) -> bool:
    return not worker.draining and 0 < len(worker.attempts) < worker.leases


def _queue_ahead(state: RoundState) -> Sequence[int]:
    several = (worker.attempts for worker in state.workers.values() if len(worker.attempts) > 1)
    return [k for attempts in several for k in list(attempts.values())[1:] if state.subnets[k].queued]


def _lease(state: RoundState, now: float, subnets: Sequence[int], willing: Callable[[WorkerState], bool]) -> Transition:
    """Lease subnets, in their order, each to the smallest willing worker that can hold it beside what it has."""
    if not subnets:
        return state, ()
    only = lockstep_cohort(state) if state.rules.lockstep else None
    staying = {n: w for n, w in state.workers.items() if not w.draining and only in (None, w.cohort)}
    room = sorted((_free_bytes(state, worker), name) for name, worker in staying.items() if willing(worker))
    # In lockstep who is busy stays so for as long as a subnet waits.
    others = [w for w in staying.values() if _is_sound(w) and (willing(w) or not state.rules.lockstep)]
    largest_sound = max((worker.memory_bytes for worker in others), default=0)
    commands: list[RoundCommand] = []
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
        worker = state.workers[name]
        attempt = state.attempts + 1
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
        state = _with_subnet(replace(state, attempts=attempt), k, leased)
        state = _with_worker(state, name, replace(worker, attempts={**worker.attempts, attempt: k}))
        commands.append(GrantLease(LeaseId(state.run, state.epoch, state.round, k, attempt), name, subnet.steps))
    return state, tuple(commands)


def _is_sound(worker: WorkerState) -> bool:
    return worker.faults < QUARANTINE_AFTER


def _fits(worker: WorkerState, subnet: SubnetState, largest_sound: int) -> bool:
    """Those in quarantine get what nobody else can hold; what is trained out of core has its worker for itself."""
    trusted = _is_sound(worker) or subnet.need_bytes > largest_sound
    return trusted and not (subnet.exclusive and worker.attempts)


def _worth_leasing(state: RoundState, subnet: SubnetState) -> bool:
    """Under `salvage` a lost subnet goes on elsewhere only while others train anyway: nobody waits for it alone, unless
    there are no steps at all that the round could be closed with.
    """
    if not (state.rules.salvage and subnet.lost):
        return True
    return bool(state.subnets.count(Phase.LEASED)) or not state.subnets.started


def _should_close(state: RoundState, now: float) -> bool:
    """Whether a round under `salvage` ends with what it has: something, and no more worth waiting for."""
    subnets = state.subnets
    if not state.rules.salvage or not subnets.started or subnets.count(Phase.STORING):
        return False
    leased = subnets.count(Phase.LEASED)
    if not (leased or subnets.waiting):
        return False
    if not leased and all(subnets[k].lost for k in subnets.waiting):
        return True
    if not (expected := _expected_seconds(state)):
        return False
    active = sum(not worker.draining for worker in state.workers.values())
    turns = -(-len(state.subnets) // max(1, active))
    return now > state.opened_at + CLOSE_AFTER_TYPICAL * expected * turns


def _expected_seconds(state: RoundState) -> float:
    """How long a whole subnet may take, of the last round or of this one if it is slower; 0 before there is any."""
    return max(state.typical_seconds or 0.0, state.slowest_seconds or 0.0)


def _close(state: RoundState, now: float) -> Transition:
    commands: list[RoundCommand] = []
    if state.subnets.count(Phase.LEASED):  # they would have taken longer: the next round waits longer
        state = replace(state, slowest_seconds=CLOSE_AFTER_TYPICAL * _expected_seconds(state))
    for k, subnet in enumerate(state.subnets):
        if subnet.phase is Phase.LEASED and _worth_salvaging(subnet, state.rules):
            state, more = _salvage_subnet(state, k, now, "closed")
            commands.extend(more)
            continue
        if subnet.phase is Phase.LEASED:
            commands.append(_lose_lease(state, k, now, "closed"))
        if subnet.phase in (Phase.WAITING, Phase.LEASED):
            kept = subnet.steps > 0
            state = _with_subnet(state, k, replace(subnet, phase=Phase.STORING if kept else Phase.ABSENT, queued=False))
            if kept:
                commands.append(Persist(k, subnet.attempt, subnet.steps))
    return state, tuple(commands)


def rolled_back(state: RoundState, step: int, saved_steps: Sequence[int]) -> RoundState:
    """All go on from a step in lockstep: what is home of later ones is another gang's, whose bits may be others.

    Args:
        state: Where the round is.
        step: Which.
        kept: Of every subnet, the steps of the latest mark that is home still: its member may have a later one.
    """
    for k, subnet in enumerate(state.subnets):
        if subnet.phase in (Phase.WAITING, Phase.LEASED) and subnet.steps > saved_steps[k]:
            state = _with_subnet(state, k, replace(subnet, steps=saved_steps[k], reported_steps=step))
    return state


def check_lease(state: RoundState, lease: LeaseId) -> Reply:
    """Whether a lease still holds."""
    if lease.run != state.run or lease.epoch != state.epoch:
        return Reply.STALE_EPOCH
    if lease.round != state.round or state.stage is not RunStage.TRAINING:
        return Reply.STALE_ROUND
    if not 0 <= lease.subnet < len(state.subnets):
        return Reply.STALE_ROUND
    subnet = state.subnets[lease.subnet]
    if subnet.phase in (Phase.STORING, Phase.STAGED):
        return Reply.DUPLICATE
    if subnet.phase is not Phase.LEASED or subnet.attempt != lease.attempt:
        return Reply.NOT_LEASED
    return Reply.ACCEPTED


def _lose_leases(state: RoundState, subnets: Iterable[int], now: float, cause: str) -> Transition:
    """Take back the leases on these subnets."""
    commands: tuple[RoundCommand, ...] = ()
    for k in subnets:
        if cause != "refused" and _worth_salvaging(state.subnets[k], state.rules):
            state, more = _salvage_subnet(state, k, now, cause)
            commands += more
            continue
        commands += (_lose_lease(state, k, now, cause),)
        state = _with_subnet(state, k, replace(state.subnets[k], phase=Phase.WAITING, lost=True, queued=False))
    return state, commands


def _worth_salvaging(subnet: SubnetState, rules: RoundRules) -> bool:
    """Whether what has come of an update is worth more than the steps that are safe at home."""
    steps, covered = subnet.in_flight
    return rules.salvage and steps * covered > subnet.steps


def _salvage_subnet(state: RoundState, k: int, now: float, cause: str) -> Transition:
    """What has come of a lost lease's update is the subnet's."""
    subnet = state.subnets[k]
    steps, covered = subnet.in_flight
    subnet = replace(subnet, steps=steps, reported_steps=steps, reported_at=now, lost=True, queued=False)
    lost = replace(_lose_lease(_with_subnet(state, k, subnet), k, now, cause), lost_steps=0, norm_fraction=covered)
    state = _with_subnet(state, k, replace(subnet, phase=Phase.STORING))
    return state, (lost, Persist(k, subnet.attempt, steps, covered))


def _free_slot(state: RoundState, name: str, attempt: int, now: float) -> RoundState:
    """A worker is done with an attempt: the next one that it holds, if any, begins to train."""
    worker = state.workers.get(name)
    if worker is None or attempt not in worker.attempts:
        return state
    left = {other: k for other, k in worker.attempts.items() if other != attempt}
    for following, k in list(left.items())[:1]:
        subnet = state.subnets[k]
        if subnet.queued and subnet.attempt == following:
            state = _with_subnet(state, k, replace(subnet, queued=False, leased_at=now, reported_at=now))
    return _with_worker(state, name, replace(worker, attempts=left))


def _free_bytes(state: RoundState, worker: WorkerState) -> int:
    held = [state.subnets[k] for k in worker.attempts.values()]
    return 0 if any(subnet.exclusive for subnet in held) else worker.memory_bytes - sum(s.need_bytes for s in held)


def _lose_lease(state: RoundState, k: int, now: float, cause: str) -> LeaseLost:
    """The account of a lost lease; steps since the last beat are guessed at its pace, or at that of other subnets."""
    subnet = state.subnets[k]
    told = subnet.reported_steps - subnet.steps
    if cause in ("kill", "error", "refused", "closed") and not subnet.queued:
        done, since = subnet.reported_steps - subnet.base_steps, subnet.reported_at - subnet.leased_at
        pace = done / since if done and since > 0 else state.rules.local_steps / (_expected_seconds(state) or math.inf)
        told += min(round(pace * (now - subnet.reported_at)), state.rules.local_steps - subnet.reported_steps)
    return LeaseLost(
        subnet=k,
        attempt=subnet.attempt,
        worker=subnet.worker,
        cause=cause,
        kept_steps=subnet.steps - subnet.base_steps,
        lost_steps=told,
    )


def _new_subnets(needs: Sequence[int], exclusive: frozenset[int]) -> Iterable[SubnetState]:
    return (SubnetState(need_bytes=need, exclusive=k in exclusive) for k, need in enumerate(needs))


def _with_worker(state: RoundState, name: str, worker: WorkerState) -> RoundState:
    return replace(state, workers={**state.workers, name: worker})


def _with_subnet(state: RoundState, k: int, subnet: SubnetState) -> RoundState:
    return replace(state, subnets=state.subnets.put(k, subnet))
