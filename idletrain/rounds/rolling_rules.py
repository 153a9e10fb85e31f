"""What differs without rounds, under `rolling`: which subnets are leased, and which are committed as they are. Pure.

A subnet is committed when it is done, and another drawn in its lane. What a lost subnet has of its steps is committed
at once, so that its neurons are free again; a slow node's subnet is, too, before its neurons fall far behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from idletrain.rounds.assignment import lease_subnets, queue_subnets, queued_subnets, unwanted
from idletrain.rounds.lost_leases import describe_lost, lose_leases
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import Commit, Persist, RoundCommand
from idletrain.rounds.table import Phase, RoundState, RunStage, SubnetState, SubnetTable, with_subnet

HELD_AT_MOST = 4.0  # times as long as a typical node needs for all steps; then its neurons go to whoever is next


def with_lanes(state: RoundState, numbers: Sequence[int], neuron_steps: int) -> RoundState:
    """Return the state that a run without rounds begins with.

    Args:
        state: The state with a subnet for each lane.
        numbers: How many subnets each lane had before.
        neuron_steps: The committed local steps of all neurons together.
    """
    opened = (
        replace(subnet, round=number, opened_at=state.opened_at)
        for subnet, number in zip(state.subnets, numbers, strict=True)
    )
    return replace(state, subnets=SubnetTable.of(opened), neuron_steps=neuron_steps)


def reopen(state: RoundState, k: int, now: float) -> RoundState:
    """Return the state in which another subnet is drawn in a lane whose subnet was committed."""
    ended = state.subnets[k]
    opened = SubnetState(need_bytes=ended.need_bytes, exclusive=ended.exclusive, round=ended.round + 1, opened_at=now)
    return with_subnet(state, k, opened)


def rounds_passed(state: RoundState) -> int:
    """Return how many times a neuron had a round's steps on average, at most the run's rounds."""
    rules = state.rules
    return min(rules.rounds, state.neuron_steps // (rules.neurons * rules.local_steps))


def still_needed(state: RoundState) -> Collection[int]:
    """Return the waiting subnets that the run still needs, those waiting longest first.

    Towards its end it waits for those that are under way and begins no more than it takes.
    """
    rules, under_way = state.rules, (Phase.LEASED, Phase.STORING)
    if not state.subnets.waiting:
        return ()
    left = rules.rounds * rules.local_steps * rules.neurons - state.neuron_steps
    if left > rules.local_steps * rules.open_neurons:  # more than all lanes give
        return state.subnets.waiting
    left -= sum(
        rules.local_steps * rules.lane_neurons[k] for k, subnet in enumerate(state.subnets) if subnet.phase in under_way
    )
    needed: list[int] = []
    for k in state.subnets.waiting:
        if left <= 0:
            break
        needed.append(k)
        left -= rules.local_steps * rules.lane_neurons[k]
    return needed


def grant_leases(state: RoundState, now: float) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Lease the waiting subnets that the run still needs: to idle workers first, then to those with room for one.

    Of these the one that is done first comes first.
    """
    state, first = lease_subnets(state, now, still_needed(state), state.workers.idle)
    queued = queued_subnets(state) if state.workers.idle else ()
    state, moved = lease_subnets(state, now, queued, state.workers.idle)
    state, second = queue_subnets(state, now, still_needed(state), state.workers.roomy)
    return state, (*first, *moved, *second)


def pass_round(state: RoundState, now: float) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Count a round once a neuron has had its steps on average; after the last, end what is under way.

    A round waits for the evaluation of the one before: evaluations are what it is for.
    """
    if state.evaluating or rounds_passed(state) == state.round:
        return state, ()
    done, commands = state.round + 1, ()  # type: int, tuple[RoundCommand, ...]
    if done == state.rules.rounds:
        held = [(k, lease.attempt) for k, subnet in enumerate(state.subnets) for lease in subnet.leases]
        state, commands = lose_leases(state, held, now, "closed")
        state = replace(state, stage=RunStage.COMMITTING)
    return replace(state, round=done, evaluating=True), (*commands, Commit(state.round, ()))


def commit_partial(state: RoundState, now: float) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Store what subnets have of their steps that nobody trains any more, and those that a slow node holds too long."""
    commands: tuple[RoundCommand, ...] = ()
    typical = _typical_seconds(state)
    for k, subnet in enumerate(state.subnets):
        if not subnet.steps:
            continue
        if subnet.phase is Phase.LEASED and typical and _held_seconds(subnet, now) > HELD_AT_MOST * typical:
            for lease in subnet.leases:
                commands += (describe_lost(state, k, lease, now, "closed"),)
                state = unwanted(state, lease, now)
        elif subnet.phase is not Phase.WAITING:
            continue
        stored = replace(subnet, phase=Phase.STORING, backup=None, lease=replace(subnet.lease, queued=False))
        state = with_subnet(state, k, stored)
        commands += (Persist(k, subnet.lease.attempt, subnet.steps),)
    return state, commands


def _held_seconds(subnet: SubnetState, now: float) -> float:
    """Return for how long the oldest of a subnet's leases that trains has been held."""
    return max((now - lease.granted_at for lease in subnet.leases if not lease.queued), default=0.0)


def _typical_seconds(state: RoundState) -> float:
    """Return the seconds that a typical worker needs for all steps of a subnet, of two the faster; 0 if not known."""
    known = [worker.step_seconds for worker in state.workers.values() if worker.step_seconds]
    return statistics.median_low(known) * state.rules.local_steps if known else 0.0
