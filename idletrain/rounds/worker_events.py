"""Decide what follows when a worker joins, leaves, reports steps, pushes an update or ends an attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds import verdicts
from idletrain.rounds.assignment import able_workers, free_slot, take_turn, yield_turn
from idletrain.rounds.lost_leases import lose_leases, overtake
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import (
    AttemptEnded,
    Finish,
    Heartbeat,
    KeepProgress,
    NoticeReceived,
    PartArrived,
    Persist,
    Pushed,
    Respond,
    RoundCommand,
    WorkerJoined,
    WorkerLeft,
    WorkerSick,
)
from idletrain.rounds.table import Lease, Phase, RoundState, RunStage, with_subnet, with_worker
from idletrain.rounds.worker_table import QUARANTINE_AFTER, WorkerState

Transition = tuple[RoundState, tuple[RoundCommand, ...]]


def check_lease(state: RoundState, lease: LeaseId) -> Reply:
    """Return ACCEPTED if a lease still holds, else the reason why it does not."""
    if lease.run != state.run or lease.epoch != state.epoch:
        return Reply.STALE_EPOCH
    if state.stage is not RunStage.TRAINING or not 0 <= lease.subnet < len(state.subnets):
        return Reply.STALE_ROUND
    subnet = state.subnets[lease.subnet]
    if lease.round != subnet.round:
        return Reply.STALE_ROUND
    if subnet.phase in (Phase.STORING, Phase.STAGED):
        return Reply.DUPLICATE
    return Reply.ACCEPTED if subnet.lease_of(lease.attempt) else Reply.NOT_LEASED


def on_worker_joined(state: RoundState, event: WorkerJoined) -> Transition:
    """Add a worker."""
    worker = WorkerState(memory_bytes=event.memory_bytes, leases=event.leases, cohort=event.cohort)
    return with_worker(state, event.worker, worker), ()


def on_worker_left(state: RoundState, event: WorkerLeft) -> Transition:
    """Take back a worker's leases; end the run if a subnet ends every worker that trains it."""
    worker = state.workers.get(event.worker)
    if worker is None:
        return state, ()
    cause = "notice" if worker.draining else "hang" if worker.hung else "kill"
    leases = [(held.number, state.lease_of(held.number, attempt)) for attempt, held in worker.attempts.items()]
    held = sorted(((k, lease) for k, lease in leases if lease), key=lambda one: one[0])
    state = replace(state, workers=state.workers.drop(event.worker))
    suspects = [(k, lease) for k, lease in held if not lease.queued and lease.stored_steps == lease.base_steps]
    if cause == "kill" and not suspects:
        state = _without_deaths(state)
    for k, lease in suspects if cause == "kill" else ():
        able = able_workers(state, state.subnets[k])
        subnet = verdicts.with_death(state.subnets[k], event.worker, lease.reported_steps, able)
        state = with_subnet(state, k, subnet)
        if verdicts.is_deadly(subnet, able):
            return _ended(state, "deadly", k, tuple(name for name, _ in subnet.deaths))
    return lose_leases(state, ((k, lease.attempt) for k, lease in held), event.now, cause)


def _without_deaths(state: RoundState) -> RoundState:
    """Count deaths anew once a worker dies that was idle or made progress: somebody takes workers, no subnet does."""
    for k, subnet in enumerate(state.subnets):
        if subnet.deaths:
            state = with_subnet(state, k, replace(subnet, deaths=()))
    return state


def on_notice(state: RoundState, event: NoticeReceived) -> Transition:
    """Lease nothing more to a worker that will be taken away."""
    worker = state.workers.get(event.worker)
    return (with_worker(state, event.worker, replace(worker, draining=True)) if worker else state), ()


def on_heartbeat(state: RoundState, event: Heartbeat) -> Transition:
    """Prolong a lease and count its steps."""
    k, reply = event.lease.subnet, check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(Reply.HUNG if _is_hung(state, event.lease.attempt) else reply),)
    lease = state.subnets[k].lease_of(event.lease.attempt)
    assert lease
    if lease.doing != event.doing:
        lease = replace(lease, progress_at=event.now, doing=event.doing)
    if event.doing in ("move", "wait"):
        lease = replace(lease, progress_at=event.now, paced_at=event.now)
    trains, since = event.doing == "train" or event.steps > lease.reported_steps, lease.paced_at
    lease = replace(_with_steps(lease, event.steps, event.now), expires=event.now + state.rules.lease_seconds)
    state = with_subnet(state, k, state.subnets[k].with_lease(lease))
    return take_turn(state, lease, since) if trains else yield_turn(state, lease), (Respond(reply),)


def on_pushed(state: RoundState, event: Pushed) -> Transition:
    """Accept a progress checkpoint or an update, or refuse it by what became of its lease."""
    k, attempt = event.lease.subnet, event.lease.attempt
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    if event.fault is not None:
        return _on_refused(state, event, event.fault)
    subnet = state.subnets[k]
    if event.steps <= subnet.steps:  # checkpoints may overtake each other on the way
        return state, (Respond(Reply.DUPLICATE),)
    lease = subnet.lease_of(attempt)
    assert lease
    since = lease.paced_at
    lease = replace(_with_steps(lease, event.steps, event.now), stored_steps=event.steps, progress_at=event.now)
    partial = event.steps < state.rules.local_steps and not state.rules.salvage
    subnet = replace(subnet, steps=event.steps, deaths=())
    if not event.update or partial or state.rules.lockstep:
        lease = replace(lease, expires=event.now + state.rules.lease_seconds)
        state = take_turn(with_subnet(state, k, subnet.with_lease(lease)), lease, since)
        return state, (Respond(reply), KeepProgress(k, attempt))
    state, overtaken = overtake(with_subnet(state, k, subnet.with_lease(lease)), k, attempt, event.now)
    state = _measured(state, lease, event)
    state = with_subnet(state, k, replace(state.subnets[k], phase=Phase.STORING, lease=replace(lease, queued=False)))
    return state, (Respond(reply), *overtaken, Persist(k, attempt, event.steps))


def on_part_arrived(state: RoundState, event: PartArrived) -> Transition:
    """Prolong the lease of an update in flight."""
    reply = check_lease(state, event.lease)
    if reply is not Reply.ACCEPTED:
        return state, (Respond(reply),)
    subnet = state.subnets[event.lease.subnet]
    in_flight = (event.steps, event.norm_fraction) if event.norm_fraction else subnet.in_flight
    lease = subnet.lease_of(event.lease.attempt)
    assert lease
    lease = replace(lease, expires=event.now + state.rules.lease_seconds, progress_at=event.now)
    subnet = replace(subnet, in_flight=in_flight).with_lease(lease)
    return with_subnet(state, event.lease.subnet, subnet), (Respond(reply),)


def on_attempt_ended(state: RoundState, event: AttemptEnded) -> Transition:
    """Free a worker's slot; lease its subnet again if it ended without an update."""
    k, attempt = event.lease.subnet, event.lease.attempt
    cause = "error"
    sick: tuple[RoundCommand, ...] = ()
    if event.failed:  # the fault may be the machine's: another worker gets the subnet next
        if check_lease(state, event.lease) is Reply.ACCEPTED:
            subnet = replace(state.subnets[k], failed=(*state.subnets[k].failed, event.worker))
            state = with_subnet(state, k, subnet)
            if verdicts.is_jobs_fault(subnet.failed, able_workers(state, subnet)):
                return _ended(state, "failed", k, subnet.failed)
        state, sick = _faulty(state, event.worker)
    worker = state.workers.get(event.worker)
    if worker and attempt in worker.attempts:
        state = free_slot(state, event.worker, attempt, event.now)
        cause = "notice" if worker.draining else cause
    holds = state.lease_of(k, attempt) is not None  # not of an earlier round's subnet
    if worker and holds and event.out_of_memory and state.subnets[k].exclusive:  # it gets no subnet as large again
        worker = replace(state.workers[event.worker], memory_bytes=state.subnets[k].need_bytes - 1)
        state = with_worker(state, event.worker, worker)
    state, commands = lose_leases(state, ((k, attempt),) if holds else (), event.now, cause)
    return state, (*sick, *commands)


def _on_refused(state: RoundState, event: Pushed, fault: Reply) -> Transition:
    """Refuse a payload; its subnet is leased again, to another worker where there is one, from its last checkpoint."""
    k, attempt = event.lease.subnet, event.lease.attempt
    subnet = state.subnets[k]
    lease = subnet.lease_of(attempt)
    assert lease
    if fault is Reply.NOT_FINITE:
        subnet = replace(subnet, diverged=(*subnet.diverged, lease.worker))
        state = with_subnet(state, k, subnet)
        if verdicts.is_jobs_fault(subnet.diverged, able_workers(state, subnet)):
            state, ended = _ended(state, "diverged", k, subnet.diverged)
            return state, (Respond(fault), *ended)
    state, sick = _faulty(state, lease.worker)
    state, commands = lose_leases(state, ((k, attempt),), event.now, "refused")
    return state, (Respond(fault), *sick, *commands)


def _with_steps(lease: Lease, steps: int, now: float) -> Lease:
    """Return a lease whose attempt reports its steps; a heartbeat may be older than a checkpoint, or its pull."""
    if steps > lease.reported_steps:
        seconds = (now - lease.paced_at) / (steps - lease.reported_steps)
        lease = replace(lease, step_seconds=seconds, reported_steps=steps, progress_at=now, paced_at=now)
    return replace(lease, reported_at=now)


def _measured(state: RoundState, lease: Lease, event: Pushed) -> RoundState:
    """Return the state with the seconds that a whole attempt took, of its subnet and of its worker's steps."""
    seconds, steps = event.now - lease.granted_at, event.steps - lease.base_steps
    worker = state.workers.get(lease.worker)
    if lease.queued or not steps:
        return state
    if worker:
        state = with_worker(state, lease.worker, replace(worker, step_seconds=seconds / steps))
    if state.subnets[event.lease.subnet].lost:
        return state
    return replace(state, slowest_seconds=max(seconds, state.slowest_seconds or 0.0))


def _faulty(state: RoundState, name: str) -> Transition:
    """Count a fault of a worker; say so when it is one too many."""
    worker = state.workers.get(name)
    if worker is None:
        return state, ()
    worker = replace(worker, faults=worker.faults + 1)
    sick = (WorkerSick(name, "faults"),) if worker.faults == QUARANTINE_AFTER else ()
    return with_worker(state, name, worker), sick


def _ended(state: RoundState, status: str, k: int, workers: Sequence[str]) -> Transition:
    """End the run because of a subnet."""
    return replace(state, stage=RunStage.DONE), (Finish(status, k, tuple(dict.fromkeys(workers))),)


def _is_hung(state: RoundState, attempt: int) -> bool:
    return any(worker.hung and attempt in worker.attempts for worker in state.workers.values())
