"""Take back leases: what is kept of their steps, what is lost, and what of an update in flight is salvaged. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from idletrain.rounds.assignment import unwanted
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import LeaseLost, Persist, RoundCommand
from idletrain.rounds.table import Lease, Phase, RoundRules, RoundState, SubnetState, with_subnet


def lose_leases(
    state: RoundState, held: Iterable[tuple[int, int]], now: float, cause: str
) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Take back leases, `(subnet, attempt)` each, and salvage their updates in flight where that pays.

    A subnet with another lease stays with that one.
    """
    commands: tuple[RoundCommand, ...] = ()
    for k, attempt in held:
        subnet = state.subnets[k]
        if cause != "refused" and worth_salvaging(subnet, state.rules):
            state, more = salvage_subnet(state, k, now, cause)
            commands += more
            continue
        lost = subnet.lease_of(attempt)
        assert lost
        commands += (describe_lost(state, k, lost, now, cause),)
        state = unwanted(state, lost, now)
        if others := [lease for lease in subnet.leases if lease is not lost]:
            subnet = replace(subnet, lease=others[0], backup=None, lost=True)
        else:
            subnet = replace(subnet, phase=Phase.WAITING, lost=True, lease=replace(lost, queued=False))
        state = with_subnet(state, k, subnet)
    return state, commands


def worth_salvaging(subnet: SubnetState, rules: RoundRules) -> bool:
    """Return whether the rows of an update that arrived are worth more than the steps of the stored checkpoint."""
    steps, norm_fraction = subnet.in_flight
    return rules.salvage and steps * norm_fraction > subnet.steps


def salvage_subnet(state: RoundState, k: int, now: float, cause: str) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Store the rows that arrived of a lost lease's update as the subnet's update."""
    subnet = state.subnets[k]
    steps, norm_fraction = subnet.in_flight
    lease = replace(subnet.lease, stored_steps=steps, reported_steps=steps, reported_at=now)
    subnet = replace(subnet, steps=steps, lost=True, lease=lease)
    state = unwanted(with_subnet(state, k, subnet), lease, now)
    lost = dataclasses.replace(describe_lost(state, k, lease, now, cause), lost_steps=0, norm_fraction=norm_fraction)
    state = with_subnet(state, k, replace(subnet, phase=Phase.STORING, lease=replace(lease, queued=False)))
    return state, (lost, Persist(k, lease.attempt, steps, norm_fraction))


def describe_lost(state: RoundState, k: int, lease: Lease, now: float, cause: str) -> LeaseLost:
    """Describe a lost lease; steps since its last heartbeat are estimated at its pace, or at other subnets' pace.

    Of two leases on a subnet, the first one's stored steps count up to where the second went on from them.
    """
    subnet = state.subnets[k]
    steps_kept = max(lease.base_steps, min(lease.stored_steps, subnet.steps))
    if cause == "overtaken":
        (winner,) = (other for other in subnet.leases if other.attempt != lease.attempt)
        steps_kept = max(lease.base_steps, min(lease.stored_steps, winner.base_steps))
    lost_steps = max(0, lease.reported_steps - steps_kept)
    if cause in ("kill", "error", "refused", "closed", "overtaken") and not lease.queued:
        done, since = lease.reported_steps - lease.base_steps, lease.reported_at - lease.granted_at
        pace = done / since if done and since > 0 else state.rules.local_steps / (expected_seconds(state) or math.inf)
        lost_steps += min(round(pace * (now - lease.reported_at)), state.rules.local_steps - lease.reported_steps)
    return LeaseLost(
        subnet=k,
        attempt=lease.attempt,
        worker=lease.worker,
        cause=cause,
        kept_steps=steps_kept - lease.base_steps,
        lost_steps=lost_steps,
    )


def overtake(state: RoundState, k: int, attempt: int, now: float) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Take back the other lease on a subnet whose update has arrived; leave the winner's as the only one."""
    subnet = state.subnets[k]
    commands: tuple[RoundCommand, ...] = ()
    for lease in subnet.leases:
        if lease.attempt != attempt:
            commands += (describe_lost(state, k, lease, now, "overtaken"),)
            state = unwanted(state, lease, now)
    winner = subnet.lease_of(attempt)
    assert winner
    return with_subnet(state, k, replace(subnet, lease=winner, backup=None)), commands


def expected_seconds(state: RoundState) -> float:
    """Return the slowest whole subnet's seconds, in the last round or this one; 0 before there is any."""
    return max(state.typical_seconds or 0.0, state.slowest_seconds or 0.0)
