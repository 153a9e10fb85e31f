"""Decide the next step of a round: a pure function of the round's state and an event.

Rules for whoever edits this file. It knows no Dask, no clock, no files and no tensors: time comes with the events.
Whatever the order of events, a run ends, and a subnet of a round is accepted once.

    subnet:  WAITING ──GrantLease──► LEASED ──push of all steps──► STORING ──Persisted──► STAGED
                ▲                      │  lease expired, no step, worker gone, attempt ended, push refused
                └──────────────────────┘  (the next attempt goes on from the latest progress checkpoint)
             a slow one is LEASED a second time to an idle worker under `reissue`; the first update wins
    round:   TRAINING ──all staged, network not in use──► COMMITTING ──Committed──► TRAINING of the next round
             `salvage` closes it early: checkpoints are stored as they are, subnets without one are ABSENT,
             and of an update in flight the rows that arrived are stored, if they are worth more than the checkpoint
             `rolling` has no rounds to wait for: Persisted says that a subnet is in the network, and the next one of
             its lane is WAITING; a round is over when a neuron has had its steps on average

`worker_events` has what follows from what workers do. `assignment` chooses the worker of each subnet, `backups` the
slow ones that get a second lease; `verdicts` says whose fault failures are, `lost_leases` what is left of a lost lease,
`closing` when `salvage` ends a round, `lockstep_rules` and `rolling_rules` what differs in lockstep and without rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from idletrain.exchange.messages import Reply
from idletrain.rounds import backups, lockstep_rules, rolling_rules, verdicts, worker_events
from idletrain.rounds.assignment import free_slot, lease_subnets, queued_subnets
from idletrain.rounds.best import best_round, evaluations_since_best
from idletrain.rounds.closing import close, should_close
from idletrain.rounds.lost_leases import lose_leases
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import (
    AttemptEnded,
    ClockTick,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Finish,
    Heartbeat,
    KeepScore,
    NoticeReceived,
    PartArrived,
    Persisted,
    Pushed,
    Respond,
    RoundCommand,
    RoundEvent,
    ScoreKept,
    StopRequested,
    WorkerJoined,
    WorkerLeft,
    WorkerSick,
)
from idletrain.rounds.table import (
    Phase,
    RoundRules,
    RoundState,
    RunStage,
    SubnetState,
    SubnetTable,
    with_subnet,
    with_worker,
)
from idletrain.rounds.worker_events import Transition
from idletrain.rounds.worker_table import WorkerState, WorkerTable


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
        for k, subnet in enumerate(_new_subnets(needs, exclusive, round_))
    )
    last = round_ >= rules.rounds  # all rounds are committed, but the last evaluation may not have run
    return RoundState(
        rules=rules,
        run=run,
        epoch=epoch,
        round=round_,
        subnets=subnets,
        workers=WorkerTable.of(workers),
        stage=RunStage.LAST_EVALUATION if last else RunStage.TRAINING,
        opened_at=now,
        evaluating=rules.evaluates_after(round_),
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


def _on_persisted(state: RoundState, event: Persisted) -> Transition:
    subnet = state.subnets[event.subnet]
    if subnet.phase is not Phase.STORING:
        raise IllegalEventError(f"subnet {event.subnet} was stored while {subnet.phase.value}")
    if subnet.steps == state.rules.local_steps:
        # The task only has to return: the next lease can travel meanwhile.
        state = free_slot(state, subnet.lease.worker, subnet.lease.attempt, event.now)
    if state.rules.rolling:
        state = replace(state, neuron_steps=event.neuron_steps)
        return rolling_rules.reopen(state, event.subnet, event.now), ()
    return with_subnet(state, event.subnet, replace(subnet, phase=Phase.STAGED)), ()


def _on_tick(state: RoundState, event: ClockTick) -> Transition:
    expired = [
        (k, lease.attempt)
        for k, subnet in enumerate(state.subnets)
        if subnet.phase is Phase.LEASED
        for lease in subnet.leases
        if event.now > lease.expires
    ]
    state, commands = lose_leases(state, expired, event.now, "lease")
    for name, seconds in verdicts.hanging(state, event.now):
        state = with_worker(state, name, replace(state.workers[name], hung=True))
        held = [(k, lease.attempt) for k, s in enumerate(state.subnets) for lease in s.leases if lease.worker == name]
        state, more = lose_leases(state, held, event.now, "hang")
        commands += (WorkerSick(name, "hang", seconds), *more)
    if state.rules.rolling and state.stage is RunStage.TRAINING:
        state, stored = rolling_rules.commit_partial(state, event.now)
        commands += stored
    return state, commands


def _on_committed(state: RoundState, event: Committed) -> Transition:
    rolling = state.rules.rolling
    if state.stage is not RunStage.COMMITTING and not (rolling and state.evaluating):
        raise IllegalEventError(f"round {state.round} was committed while {state.stage.value}")
    done = state.round if rolling else state.round + 1
    if state.stopping:
        return replace(state, round=done, stage=RunStage.DONE), (Finish("stopped"),)
    last = done == state.rules.rounds
    evaluate = state.rules.evaluates_after(done)
    snapshot = event.snapshot_due or last
    evaluations = (
        (evaluation(state.rules, evaluate=evaluate, snapshot=snapshot, last=last),) if evaluate or snapshot else ()
    )
    if last:
        return replace(state, round=done, stage=RunStage.LAST_EVALUATION, evaluating=True), evaluations
    if rolling:
        return replace(state, evaluating=bool(evaluations)), evaluations
    if event.new_local_steps is not None:
        state = _in_new_phase(state, event.new_local_steps)
    opened = replace(
        state,
        round=done,
        stage=RunStage.TRAINING,
        subnets=SubnetTable.of(_new_subnets(event.needs, event.exclusive, done)),
        opened_at=event.now,
        typical_seconds=state.slowest_seconds or state.typical_seconds,
        slowest_seconds=None,
        evaluating=bool(evaluations),
    )
    return opened, evaluations


def evaluation(rules: RoundRules, *, evaluate: bool = True, snapshot: bool, last: bool) -> Evaluate:
    """Return the command to evaluate and/or write the network, for whose scores the next commit waits if it must."""
    return Evaluate(evaluate, snapshot, waits=last or rules.depends_on_scores)


def _in_new_phase(state: RoundState, local_steps: int) -> RoundState:
    """Return the state with a phase's local steps; the pace of other subnets says nothing of its own."""
    workers = WorkerTable.of({name: replace(worker, step_seconds=None) for name, worker in state.workers.items()})
    rules = replace(state.rules, local_steps=local_steps)
    return replace(state, rules=rules, workers=workers, typical_seconds=None, slowest_seconds=None)


def _on_evaluated(state: RoundState, event: Evaluated) -> Transition:
    if not state.evaluating or state.keeping is not None:
        raise IllegalEventError(f"the network of round {state.round} was not being evaluated")
    watch, best = state.rules.watch, None
    if watch and event.measured:
        state = replace(state, scores={**state.scores, state.round: event.score})
        best = best_round(state.scores, higher=watch.higher)
    status = _status_after(state, event)
    if watch and event.measured:
        return replace(state, keeping=status), (KeepScore(event.score, best == state.round),)
    return _evaluation_ended(state, status)


def _status_after(state: RoundState, event: Evaluated) -> str:
    """Return the status with which the run ends after an evaluation, or "" if it goes on."""
    rules = state.rules
    if rules.target is not None and event.accuracy is not None and event.accuracy >= rules.target:
        return "reached"
    if state.stage is RunStage.LAST_EVALUATION:
        return "completed"
    if rules.watch and rules.watch.patience and event.measured:
        since = evaluations_since_best(state.scores, higher=rules.watch.higher)
        return "stopped-early" if since >= rules.watch.patience else ""
    return ""


def _on_score_kept(state: RoundState, _event: ScoreKept) -> Transition:
    if state.keeping is None:
        raise IllegalEventError(f"no score of round {state.round} was being kept")
    return _evaluation_ended(replace(state, keeping=None), state.keeping)


def _evaluation_ended(state: RoundState, status: str) -> Transition:
    """Go on with training, or end the run with a status."""
    state = replace(state, evaluating=False)
    return (replace(state, stage=RunStage.DONE), (Finish(status),)) if status else (state, ())


def _on_stop_requested(state: RoundState, _event: StopRequested) -> Transition:
    if state.stage is RunStage.COMMITTING:  # the network is being written: stop after that
        return replace(state, stopping=True), ()
    return replace(state, stage=RunStage.DONE), (Finish("stopped"),)


_HANDLERS: Mapping[type[RoundEvent], Callable[[RoundState, Any], Transition]] = {
    WorkerJoined: worker_events.on_worker_joined,
    WorkerLeft: worker_events.on_worker_left,
    NoticeReceived: worker_events.on_notice,
    Heartbeat: worker_events.on_heartbeat,
    Pushed: worker_events.on_pushed,
    PartArrived: worker_events.on_part_arrived,
    Persisted: _on_persisted,
    AttemptEnded: worker_events.on_attempt_ended,
    ClockTick: _on_tick,
    Committed: _on_committed,
    Evaluated: _on_evaluated,
    ScoreKept: _on_score_kept,
    StopRequested: _on_stop_requested,
}


def _next_actions(state: RoundState, now: float) -> Transition:
    """Lease waiting subnets, close the round if it is time, and commit it once every subnet is staged."""
    if state.stage is not RunStage.TRAINING:
        return state, ()
    if lockstep_rules.all_steps_done(state):
        return lockstep_rules.persist_all(state)
    state, leases = _grant_leases(state, now)
    state, seconds = backups.lease_slow_again(state, now)
    leases += seconds
    if state.rules.rolling:
        state, passed = rolling_rules.pass_round(state, now)
        return state, (*leases, *passed)
    state, closing = close(state, now) if should_close(state, now) else (state, ())
    subnets = state.subnets
    whole = subnets.count(Phase.STAGED, Phase.ABSENT) == len(subnets) and subnets.count(Phase.STAGED)
    if whole and not state.evaluating:
        staged = tuple((k, s.steps) for k, s in enumerate(subnets) if s.phase is Phase.STAGED)
        return replace(state, stage=RunStage.COMMITTING), (*leases, *closing, Commit(state.round, staged))
    return state, (*leases, *closing)


def _grant_leases(state: RoundState, now: float) -> Transition:
    """Lease waiting subnets to idle workers, then queue a second one at each, to be pulled while the first trains.

    Queue only if there is one for every worker: the last subnets of a round go to the workers that are done first.
    Without rounds there is no last one.
    """
    if state.rules.rolling:
        return rolling_rules.grant_leases(state, now)
    commands: tuple[RoundCommand, ...] = ()
    if state.rules.lockstep:
        state, commands = lose_leases(state, _first_leases(state, lockstep_rules.in_other_cohorts(state)), now, "moved")
    if state.workers.idle:
        state, first = lease_subnets(state, now, state.subnets.waiting, state.workers.idle)
        queued = queued_subnets(state) if state.workers.idle else ()
        state, second = lease_subnets(state, now, queued, state.workers.idle)  # an idle worker trains it at once
        commands += first + second
    if state.rules.lockstep:
        state, moved = lose_leases(state, _first_leases(state, lockstep_rules.moved_for_larger(state)), now, "moved")
        return state, commands + moved
    if not state.subnets.waiting:
        return state, commands
    if len(state.subnets.waiting) < len(state.workers.roomy):
        return state, commands
    state, second = lease_subnets(state, now, state.subnets.waiting, state.workers.roomy)
    return state, commands + second


def _first_leases(state: RoundState, subnets: Iterable[int]) -> Iterable[tuple[int, int]]:
    return [(k, state.subnets[k].lease.attempt) for k in subnets]


def _new_subnets(needs: Sequence[int], exclusive: frozenset[int], round_: int) -> Iterable[SubnetState]:
    return (SubnetState(need_bytes=need, exclusive=k in exclusive, round=round_) for k, need in enumerate(needs))
