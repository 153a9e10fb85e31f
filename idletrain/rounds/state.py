"""Decide the next step of a round: a pure function of the round's state and an event.

Rules for whoever edits this file. It knows no Dask, no clock, no files and no tensors: time comes with the events.
Whatever the order of events, a run ends, and a subnet of a round is accepted once.

    subnet:  WAITING ──GrantLease──► LEASED ──push of all steps──► STORING ──Persisted──► STAGED
                ▲                      │  lease expired, worker gone, attempt ended, push refused
                └──────────────────────┘  (the next attempt goes on from the latest progress checkpoint)
    round:   TRAINING ──all staged, no evaluation running──► COMMITTING ──Committed──► TRAINING of the next round
             `salvage` closes it early: checkpoints are stored as they are, subnets without one are ABSENT,
             and of an update in flight the rows that arrived are stored, if they are worth more than the checkpoint

`assignment` chooses the worker of each subnet, `lockstep_rules` holds what differs in lockstep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds import lockstep_rules
from idletrain.rounds.assignment import free_slot, has_room, is_idle, lease_subnets, queued_subnets
from idletrain.rounds.protocol import (
    AttemptEnded,
    ClockTick,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Finish,
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
from idletrain.rounds.table import (
    Phase,
    RoundRules,
    RoundState,
    RunStage,
    SubnetState,
    SubnetTable,
    WorkerState,
    with_subnet,
    with_worker,
)

# A round is worth waiting for half as long again as its subnets took last time: a straggler of ordinary noise makes
# it, a dead or starved node does not. OpenDiLoCo and NVFlare wait a fixed 600 s.
CLOSE_AFTER_TYPICAL = 1.5
DIVERGED_AFTER = 3  # attempts at one subnet that end in NaN: the same steps would end so for ever
FAILED_AFTER = 3  # attempts at one subnet that end in an error of the code: another worker would not help


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
    """Return the state at a run's start or resumption.

    Where an evaluation was due after the last commit, it may not have run: the caller runs it if the state is
    `evaluating`, and reports Evaluated. After the last round nothing else is left to do.

    Args:
        rules: The run's rules.
        run: Its name.
        epoch: This head's epoch; a lease of an earlier one is stale.
        round_: The round to begin with.
        needs: Bytes that training each subnet takes.
        staged: Subnets whose updates are durable, and the steps that they hold.
        now: Seconds of the head's monotonic clock.
        workers: Workers that have joined, by address.
        exclusive: Subnets that are trained out of core.
    """
    subnets = SubnetTable.of(
        replace(subnet, phase=Phase.STAGED, steps=staged[k]) if k in staged else subnet
        for k, subnet in enumerate(_new_subnets(needs, exclusive))
    )
    last = round_ >= rules.rounds  # all rounds are committed, but the last evaluation may not have run
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
    """Return the state after an event, and the commands that the caller must carry out.

    Raises:
        IllegalEventError: The event cannot happen now.
    """
    if state.stage is RunStage.DONE:
        answer = isinstance(event, Heartbeat | Pushed | PartArrived)
        return state, (Respond(Reply.STALE_ROUND),) if answer else ()
    state, commands = _HANDLERS[type(event)](state, event)
    state, more = _next_actions(state, event.now)
    return state, commands + more


def _on_worker_joined(state: RoundState, event: WorkerJoined) -> Transition:
    worker = WorkerState(memory_bytes=event.memory_bytes, leases=event.leases, cohort=event.cohort)
    return with_worker(state, event.worker, worker), ()


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
    return (with_worker(state, event.worker, replace(worker, draining=True)) if worker else state), ()


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
        ),  # a heartbeat may be older than a checkpoint, or than the pull of one
        reported_at=event.now,
    )
    return with_subnet(state, event.lease.subnet, subnet), (Respond(reply),)


def _on_pushed(state: RoundState, event: Pushed) -> Transition:
    k = event.lease.subnet
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    subnet = state.subnets[k]
    if event.fault is not None:
        return _on_refused(state, event, event.fault)
    if event.steps <= subnet.steps:  # checkpoints may overtake each other on the way
        return state, (Respond(Reply.DUPLICATE),)
    subnet = replace(subnet, steps=event.steps, reported_steps=event.steps, reported_at=event.now)
    partial = event.steps < state.rules.local_steps and not state.rules.salvage
    if not event.update or partial or state.rules.lockstep:
        subnet = replace(subnet, expires=event.now + state.rules.lease_seconds)
        return with_subnet(state, k, subnet), (Respond(reply), KeepProgress(k))
    state = with_subnet(state, k, replace(subnet, phase=Phase.STORING, queued=False))
    if not (subnet.lost or subnet.queued):
        state = replace(state, slowest_seconds=max(event.now - subnet.leased_at, state.slowest_seconds or 0.0))
    return state, (Respond(reply), Persist(k, subnet.attempt, event.steps))


def _on_part_arrived(state: RoundState, event: PartArrived) -> Transition:
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    subnet = state.subnets[event.lease.subnet]
    in_flight = (event.steps, event.norm_fraction) if event.norm_fraction else subnet.in_flight
    subnet = replace(subnet, in_flight=in_flight, expires=event.now + state.rules.lease_seconds)
    return with_subnet(state, event.lease.subnet, subnet), (Respond(reply),)


def _on_refused(state: RoundState, event: Pushed, fault: Reply) -> Transition:
    """Refuse a payload; its subnet is leased again from its latest checkpoint."""
    k = event.lease.subnet
    subnet = state.subnets[k]
    if fault is Reply.NOT_FINITE:
        subnet = replace(subnet, diverged=subnet.diverged + 1)
        if subnet.diverged >= DIVERGED_AFTER:
            return replace(state, stage=RunStage.DONE), (Respond(fault), Finish("diverged"))
    elif subnet.worker in state.workers:
        worker = state.workers[subnet.worker]
        state = with_worker(state, subnet.worker, replace(worker, faults=worker.faults + 1))
    state, commands = _lose_leases(with_subnet(state, k, subnet), (k,), event.now, "refused")
    return state, (Respond(fault), *commands)


def _on_persisted(state: RoundState, event: Persisted) -> Transition:
    subnet = state.subnets[event.subnet]
    if subnet.phase is not Phase.STORING:
        raise IllegalEventError(f"subnet {event.subnet} was stored while {subnet.phase.value}")
    if subnet.steps == state.rules.local_steps:
        # The task only has to return: the next lease can travel meanwhile.
        state = free_slot(state, subnet.worker, subnet.attempt, event.now)
    return with_subnet(state, event.subnet, replace(subnet, phase=Phase.STAGED)), ()


def _on_attempt_ended(state: RoundState, event: AttemptEnded) -> Transition:
    k, cause = event.lease.subnet, "error"
    if event.failed and check_lease(state, event.lease) is Reply.ACCEPTED:
        failures = state.subnets[k].failures + 1
        state = with_subnet(state, k, replace(state.subnets[k], failures=failures))
        if failures >= FAILED_AFTER:
            return replace(state, stage=RunStage.DONE), (Finish("failed"),)
    worker = state.workers.get(event.worker)
    if worker and event.failed:  # the fault may be the machine's: another worker gets the subnet next
        worker = replace(worker, faults=worker.faults + 1)
        state = with_worker(state, event.worker, worker)
    if worker and event.lease.attempt in worker.attempts:
        state = free_slot(state, event.worker, event.lease.attempt, event.now)
        cause = "notice" if worker.draining else cause
    subnet = state.subnets[k]
    holds = subnet.phase is Phase.LEASED and subnet.attempt == event.lease.attempt
    if worker and holds and event.out_of_memory and subnet.exclusive:  # the worker gets no subnet as large again
        worker = replace(state.workers[event.worker], memory_bytes=subnet.need_bytes - 1)
        state = with_worker(state, event.worker, worker)
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
    evaluations = (Evaluate(evaluate, event.snapshot_due or last),) if evaluate or event.snapshot_due else ()
    if last:
        return replace(state, round=done, stage=RunStage.LAST_EVALUATION, evaluating=True), evaluations
    opened = replace(
        state,
        round=done,
        stage=RunStage.TRAINING,
        subnets=SubnetTable.of(_new_subnets(event.needs, event.exclusive)),
        opened_at=event.now,
        typical_seconds=state.slowest_seconds or state.typical_seconds,
        slowest_seconds=None,
        evaluating=bool(evaluations),
    )
    return opened, evaluations


def _on_evaluated(state: RoundState, event: Evaluated) -> Transition:
    if not state.evaluating:
        raise IllegalEventError(f"the network of round {state.round} was not being evaluated")
    state = replace(state, evaluating=False)
    if state.rules.target is not None and event.accuracy is not None and event.accuracy >= state.rules.target:
        return replace(state, stage=RunStage.DONE), (Finish("reached"),)
    if state.stage is RunStage.LAST_EVALUATION:
        return replace(state, stage=RunStage.DONE), (Finish("completed"),)
    return state, ()


def _on_stop_requested(state: RoundState, _event: StopRequested) -> Transition:
    if state.stage is RunStage.COMMITTING:  # the network is being written: stop after that
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
    """Lease waiting subnets, close the round if it is time, and commit it once every subnet is staged."""
    if state.stage is not RunStage.TRAINING:
        return state, ()
    if lockstep_rules.all_steps_done(state):
        return lockstep_rules.persist_all(state)
    state, leases = _grant_leases(state, now)
    state, closing = _close(state, now) if _should_close(state, now) else (state, ())
    subnets = state.subnets
    whole = subnets.count(Phase.STAGED, Phase.ABSENT) == len(subnets) and subnets.count(Phase.STAGED)
    if whole and not state.evaluating:
        staged = tuple((k, s.steps) for k, s in enumerate(subnets) if s.phase is Phase.STAGED)
        return replace(state, stage=RunStage.COMMITTING), (*leases, *closing, Commit(state.round, staged))
    return state, (*leases, *closing)


def _grant_leases(state: RoundState, now: float) -> Transition:
    """Lease waiting subnets to idle workers, then queue a second one at each, to be pulled while the first trains.

    Queue only if there is one for every worker: the last subnets of a round go to the workers that are done first.
    """
    commands: tuple[RoundCommand, ...] = ()
    if state.rules.lockstep:
        state, commands = _lose_leases(state, lockstep_rules.in_other_cohorts(state), now, "moved")
    if any(map(is_idle, state.workers.values())):  # rarely so, and this runs with every event
        state, first = lease_subnets(state, now, state.subnets.waiting, is_idle)
        state, second = lease_subnets(state, now, queued_subnets(state), is_idle)  # an idle worker trains it at once
        commands += first + second
    if state.rules.lockstep:
        state, moved = _lose_leases(state, lockstep_rules.moved_for_larger(state), now, "moved")
        return state, commands + moved
    if not state.subnets.waiting:
        return state, commands
    if len(state.subnets.waiting) < sum(map(has_room, state.workers.values())):
        return state, commands
    state, second = lease_subnets(state, now, state.subnets.waiting, has_room)
    return state, commands + second


def _should_close(state: RoundState, now: float) -> bool:
    """Return whether a round under `salvage` ends with the steps it has: some, and no more worth waiting for."""
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
    """Return the slowest whole subnet's seconds, in the last round or this one; 0 before there is any."""
    return max(state.typical_seconds or 0.0, state.slowest_seconds or 0.0)


def _close(state: RoundState, now: float) -> Transition:
    """Take back all leases; store what each subnet has of its steps, or leave it out of the round."""
    commands: list[RoundCommand] = []
    if state.subnets.count(Phase.LEASED):  # these subnets would have taken longer: the next round waits longer
        state = replace(state, slowest_seconds=CLOSE_AFTER_TYPICAL * _expected_seconds(state))
    for k, subnet in enumerate(state.subnets):
        if subnet.phase is Phase.LEASED and _worth_salvaging(subnet, state.rules):
            state, more = _salvage_subnet(state, k, now, "closed")
            commands.extend(more)
            continue
        if subnet.phase is Phase.LEASED:
            commands.append(_lose_lease(state, k, now, "closed"))
        if subnet.phase in (Phase.WAITING, Phase.LEASED):
            has_steps = subnet.steps > 0
            state = with_subnet(
                state, k, replace(subnet, phase=Phase.STORING if has_steps else Phase.ABSENT, queued=False)
            )
            if has_steps:
                commands.append(Persist(k, subnet.attempt, subnet.steps))
    return state, tuple(commands)


def check_lease(state: RoundState, lease: LeaseId) -> Reply:
    """Return ACCEPTED if a lease still holds, else the reason why it does not."""
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
    """Take back the leases on these subnets, and salvage their updates in flight where that pays."""
    commands: tuple[RoundCommand, ...] = ()
    for k in subnets:
        if cause != "refused" and _worth_salvaging(state.subnets[k], state.rules):
            state, more = _salvage_subnet(state, k, now, cause)
            commands += more
            continue
        commands += (_lose_lease(state, k, now, cause),)
        state = with_subnet(state, k, replace(state.subnets[k], phase=Phase.WAITING, lost=True, queued=False))
    return state, commands


def _worth_salvaging(subnet: SubnetState, rules: RoundRules) -> bool:
    """Return whether the rows of an update that arrived are worth more than the steps of the stored checkpoint."""
    steps, norm_fraction = subnet.in_flight
    return rules.salvage and steps * norm_fraction > subnet.steps


def _salvage_subnet(state: RoundState, k: int, now: float, cause: str) -> Transition:
    """Store the rows that arrived of a lost lease's update as the subnet's update."""
    subnet = state.subnets[k]
    steps, norm_fraction = subnet.in_flight
    subnet = replace(subnet, steps=steps, reported_steps=steps, reported_at=now, lost=True, queued=False)
    lost = replace(_lose_lease(with_subnet(state, k, subnet), k, now, cause), lost_steps=0, norm_fraction=norm_fraction)
    state = with_subnet(state, k, replace(subnet, phase=Phase.STORING))
    return state, (lost, Persist(k, subnet.attempt, steps, norm_fraction))


def _lose_lease(state: RoundState, k: int, now: float, cause: str) -> LeaseLost:
    """Describe a lost lease; steps since its last heartbeat are estimated at its pace, or at other subnets' pace."""
    subnet = state.subnets[k]
    lost_steps = subnet.reported_steps - subnet.steps
    if cause in ("kill", "error", "refused", "closed") and not subnet.queued:
        done, since = subnet.reported_steps - subnet.base_steps, subnet.reported_at - subnet.leased_at
        pace = done / since if done and since > 0 else state.rules.local_steps / (_expected_seconds(state) or math.inf)
        lost_steps += min(round(pace * (now - subnet.reported_at)), state.rules.local_steps - subnet.reported_steps)
    return LeaseLost(
        subnet=k,
        attempt=subnet.attempt,
        worker=subnet.worker,
        cause=cause,
        kept_steps=subnet.steps - subnet.base_steps,
        lost_steps=lost_steps,
    )


def _new_subnets(needs: Sequence[int], exclusive: frozenset[int]) -> Iterable[SubnetState]:
    return (SubnetState(need_bytes=need, exclusive=k in exclusive) for k, need in enumerate(needs))
