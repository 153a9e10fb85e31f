"""Close a round under `salvage` before all its subnets are done. Pure."""

from __future__ import annotations

from idletrain.rounds.assignment import unwanted
from idletrain.rounds.lost_leases import describe_lost, expected_seconds, salvage_subnet, worth_salvaging
from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import Persist, RoundCommand
from idletrain.rounds.table import Phase, RoundState, with_subnet

# A round is worth waiting for half as long again as its subnets took last time: a straggler of ordinary noise makes
# it, a dead or starved node does not. OpenDiLoCo and NVFlare wait a fixed 600 s.
CLOSE_AFTER_TYPICAL = 1.5


def should_close(state: RoundState, now: float) -> bool:
    """Return whether a round under `salvage` ends with the steps it has: some, and no more worth waiting for."""
    subnets = state.subnets
    if not state.rules.salvage or not subnets.started or subnets.count(Phase.STORING):
        return False
    leased = subnets.count(Phase.LEASED)
    if not (leased or subnets.waiting):
        return False
    if not leased and all(subnets[k].lost for k in subnets.waiting):
        return True
    if not (expected := expected_seconds(state)):
        return False
    active = sum(not worker.draining for worker in state.workers.values())
    turns = -(-len(state.subnets) // max(1, active))
    return now > state.opened_at + CLOSE_AFTER_TYPICAL * expected * turns


def close(state: RoundState, now: float) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Take back all leases; store what each subnet has of its steps, or leave it out of the round."""
    commands: list[RoundCommand] = []
    whole = sum(subnet.steps == state.rules.local_steps for subnet in state.subnets)
    if 2 * whole < len(state.subnets):  # not a straggler: most subnets take longer, so the next round waits longer
        state = replace(state, slowest_seconds=CLOSE_AFTER_TYPICAL * expected_seconds(state))
    for k, subnet in enumerate(state.subnets):
        if subnet.phase is Phase.LEASED and worth_salvaging(subnet, state.rules):
            state, more = salvage_subnet(state, k, now, "closed")
            commands.extend(more)
            continue
        if subnet.phase is Phase.LEASED:
            commands.append(describe_lost(state, k, subnet.lease, now, "closed"))
            state = unwanted(state, subnet.lease, now)
        if subnet.phase in (Phase.WAITING, Phase.LEASED):
            phase = Phase.STORING if subnet.steps else Phase.ABSENT
            lease = replace(subnet.lease, queued=False)
            state = with_subnet(state, k, replace(subnet, phase=phase, lease=lease))
            if subnet.steps:
                commands.append(Persist(k, lease.attempt, subnet.steps))
    return state, tuple(commands)
