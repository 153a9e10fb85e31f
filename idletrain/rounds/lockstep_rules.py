"""The rules of lockstep, where all subnets of a round take every step together.

Each subnet has a worker for itself, and all workers are of one cohort. A push of all steps is a checkpoint until every
subnet has one; then all are stored at once. A group whose member is replaced goes back to the latest step that all
have. Pure functions of a round's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from idletrain.rounds.persistent import replace
from idletrain.rounds.protocol import Persist, RoundCommand
from idletrain.rounds.table import Phase, RoundState, with_subnet
from idletrain.rounds.worker_table import WorkerState


def all_steps_done(state: RoundState) -> bool:
    """Return whether every subnet has a checkpoint of all its local steps, and some are not yet being stored."""
    if not state.rules.lockstep or not state.subnets.count(Phase.WAITING, Phase.LEASED):
        return False
    return all(subnet.steps == state.rules.local_steps for subnet in state.subnets)


def persist_all(state: RoundState) -> tuple[RoundState, tuple[RoundCommand, ...]]:
    """Store every subnet's checkpoint of all steps as its update."""
    commands = []
    for k, subnet in enumerate(state.subnets):
        if subnet.phase in (Phase.WAITING, Phase.LEASED):
            state = with_subnet(state, k, replace(subnet, phase=Phase.STORING))
            commands.append(Persist(k, subnet.lease.attempt, subnet.steps))
    return state, tuple(commands)


def lockstep_cohort(state: RoundState) -> str:
    """Return the cohort whose workers train, because hidden layers must have the same bits in all subnets.

    Prefer a cohort with a large enough worker for every subnet, then one that already trains, then the largest.
    """
    memories: dict[str, list[int]] = {}
    for worker in state.workers.values():
        if worker.stays:
            memories.setdefault(worker.cohort, []).append(worker.memory_bytes)
    needs = sorted((subnet.need_bytes for subnet in state.subnets), reverse=True)

    def holds_all(cohort: list[int]) -> bool:
        largest = sorted(cohort, reverse=True)[: len(needs)]
        return len(largest) == len(needs) and all(has >= need for has, need in zip(largest, needs, strict=True))

    training = {
        state.workers[s.lease.worker].cohort
        for s in state.subnets
        if s.phase is Phase.LEASED and s.lease.worker in state.workers
    }
    return max(
        memories, key=lambda name: (holds_all(memories[name]), name in training, len(memories[name]), name), default=""
    )


def in_other_cohorts(state: RoundState) -> Sequence[int]:
    """Return the subnets to take back, leased to workers outside `lockstep_cohort`.

    Return none while such a worker is draining: its last checkpoint can still arrive.
    """
    chosen = lockstep_cohort(state)
    others = [
        k
        for k, subnet in enumerate(state.subnets)
        if subnet.phase is Phase.LEASED
        and subnet.lease.worker in state.workers
        and state.workers[subnet.lease.worker].cohort != chosen
    ]
    return () if any(state.workers[state.subnets[k].lease.worker].draining for k in others) else others


def moved_for_larger(state: RoundState) -> Sequence[int]:
    """Return the one subnet, if any, to move to an idle worker, so that a larger one that waits gets its worker.

    In lockstep no worker finishes before the others, so a larger subnet would wait for ever.
    """
    idle = max((w.memory_bytes for w in state.workers.values() if w.stays and not w.attempts), default=0)
    for waiting in state.subnets.waiting:
        need = state.subnets[waiting].need_bytes
        for k, leased in enumerate(state.subnets):
            if leased.phase is not Phase.LEASED or not leased.need_bytes <= idle < need:
                continue
            if leased.lease.worker in state.workers and state.workers[leased.lease.worker].memory_bytes >= need:
                return (k,)
    return ()


def of_cohort(state: RoundState, workers: Mapping[str, WorkerState]) -> dict[str, WorkerState]:
    """Return those of the workers that belong to `lockstep_cohort`."""
    cohort = lockstep_cohort(state)
    return {name: worker for name, worker in workers.items() if worker.cohort == cohort}


def rolled_back(state: RoundState, step: int, saved_steps: Sequence[int]) -> RoundState:
    """Roll every unfinished subnet back to the step from which a new group goes on.

    Later checkpoints came from an earlier group and may differ bitwise.

    Args:
        state: The round's state.
        step: The group's common step.
        saved_steps: For every subnet, the steps of its latest checkpoint in the store; its member may have a later one.
    """
    for k, subnet in enumerate(state.subnets):
        if subnet.phase in (Phase.WAITING, Phase.LEASED) and subnet.steps > saved_steps[k]:
            lease = replace(subnet.lease, reported_steps=step)
            state = with_subnet(state, k, replace(subnet, steps=saved_steps[k], lease=lease))
    return state
