"""Chooses how wide each subnet is: it fits its node, and the nodes finish together. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from idletrain.errors import RunError
from idletrain.phases import TrainingPhase
from idletrain.quantities import steady

WHOLE_NETWORK = 1 - 1e-9  # shares that add up to this cover the network
SEARCH_STEPS = 64  # bisection steps of a share: to the last bit of a float; only a network that does not fit takes them


@dataclass(frozen=True, slots=True)
class Capacity:
    """A worker's offer to a run.

    Attributes:
        memory_bytes: Memory for subnets.
        steps_per_second: Its speed at a reference step.
        leases: Subnets it can hold at once.
        streams: Whether it can train with its parameters on a disk (a GPU cannot).
        cohort: Workers of one cohort compute the same bits.
    """

    memory_bytes: int
    steps_per_second: float
    leases: int = 1
    streams: bool = True
    cohort: str = ""


@dataclass(frozen=True)
class OutOfCoreCosts:
    """Memory and time of out-of-core training, by a subnet's share.

    Attributes:
        least_bytes: The least memory in which a subnet of a given share can be trained at all.
        seconds: Seconds of one step of a subnet of a given share in a given memory; in core where it fits.
        always: Whether subnets get their full width wherever that is possible, even if it is slower.
    """

    least_bytes: Callable[[float], int]
    seconds: Callable[[float, int], float]
    always: bool = False


def networks_held(policy: str, slack: float, copies: int) -> float:
    """Return how many networks' worth of neurons the subnets hold together under a policy."""
    return 1 / (1 + slack) if policy == "rolling" else copies


def shares(
    workers: Sequence[Capacity],
    subnets: int,
    need_bytes: Callable[[float], int],
    neurons: int,
    out_of_core: OutOfCoreCosts | None = None,
    copies: float = 1,
) -> tuple[float, ...]:
    """Return each subnet's share of every neuron group.

    Subnets are dealt to the workers in turn, the most capable first; a worker that cannot hold the narrowest gets
    none. A worker half as fast gets subnets half as wide (in powers of two: finer would follow the measurement's
    noise); none gets more than its memory holds, and the rest goes to workers that can hold it. If none can, the
    shares add up to less than `copies` and the rounds take turns over the network; or subnets get their full width
    and are trained out of core, where that is quicker: the measure is the seconds until every neuron was trained.

    Args:
        workers: At least one.
        subnets: How many subnets a round has.
        need_bytes: Bytes that training a subnet of a given share takes.
        neurons: Neurons of the smallest group (1 for a network that is not cut).
        out_of_core: Memory and time of out-of-core training, or None if it is not allowed.
        copies: Number of subnets that every neuron is in; below 1 if some are to be in none.

    Raises:
        RunError: The narrowest subnet fits no worker.
    """
    if neurons == 1:
        return _in_core(workers, subnets, need_bytes, out_of_core)
    everyone = _Assignment.of(workers, subnets)
    wide = _widths(everyone, need_bytes, out_of_core, copies)
    if out_of_core and wide and out_of_core.always:
        return wide
    roomy = [worker for worker in workers if worker.memory_bytes >= need_bytes(1 / neurons)]
    if not roomy and wide:
        return wide
    if not roomy:
        largest = max(worker.memory_bytes for worker in workers)
        raise RunError(
            f"even the narrowest subnet needs {need_bytes(1 / neurons) >> 20} MiB and the largest worker has "
            f"{largest >> 20} MiB free; use workers with more memory, a smaller training.batch_size, or, of very many "
            "outputs, a sampler with fewer tables"
        )
    deal = _Assignment.of(roomy, subnets)
    caps = [_widest(worker.memory_bytes, need_bytes, 1 / neurons) for worker in deal.workers]
    narrow = tuple(_fill(deal.weights, caps, copies))
    if out_of_core is None or wide is None or sum(narrow) > copies * WHOLE_NETWORK:
        return narrow
    wide_seconds = _cover_seconds(wide, everyone, out_of_core, copies)
    return wide if wide_seconds < _cover_seconds(narrow, deal, out_of_core, copies) else narrow


def shares_of_phase(
    workers: Sequence[Capacity],
    phase: TrainingPhase,
    need_bytes: Callable[[float], int],
    neurons: int,
    out_of_core: OutOfCoreCosts | None = None,
    field: str = "training.phases",
) -> tuple[float, ...]:
    """Return the `shares` of a phase that a job names in a field; the workers must hold all of it in each round.

    Raises:
        RunError: They do not.
    """
    try:
        result = shares(workers, phase.subnets, need_bytes, neurons, out_of_core, phase.copies)
    except RunError as error:
        raise RunError(f"{field}: phase {phase.number}: {error}") from None
    if neurons > 1 and sum(result) < phase.copies * WHOLE_NETWORK:
        share = phase.equal_shares[0]
        raise RunError(
            f"{field}: phase {phase.number} needs {need_bytes(share) >> 20} MiB for a subnet with {share:.0%} "
            f"of each layer, and the largest worker has {max(worker.memory_bytes for worker in workers) >> 20} MiB "
            "free; give it more subnets or fewer copies, or use larger workers"
        )
    return result


def equal_shares(
    workers: Sequence[Capacity], subnets: int, need_bytes: Callable[[float], int], copies: int = 1
) -> tuple[float, ...]:
    """Return each subnet's share of a network that is cut by depth, where none is narrower than another.

    Args:
        workers: At least one.
        subnets: How many subnets a round has.
        need_bytes: Bytes that training the largest of them takes.
        copies: Number of subnets that every residual block is in.

    Raises:
        RunError: The largest subnet fits no worker.
    """
    share = min(1.0, copies / subnets)
    largest = max(worker.memory_bytes for worker in workers)
    if (need := need_bytes(share)) > largest:
        raise RunError(
            f"the largest subnet needs {need >> 20} MiB for its residual blocks and all that subnets share, and the "
            f"largest worker has {largest >> 20} MiB; use more training.subnets, a smaller training.micro_batch or "
            "workers with more memory"
        )
    return (share,) * subnets


@dataclass(frozen=True)
class _Assignment:
    """Subnets dealt to workers in turn.

    Attributes:
        workers: Each subnet's worker.
        turns: How many subnets that worker gets.
        weights: Each subnet's width relative to the others.
    """

    workers: Sequence[Capacity]
    turns: Sequence[int]
    weights: Sequence[float]

    @classmethod
    def of(cls, workers: Sequence[Capacity], subnets: int) -> _Assignment:
        ranked = sorted(workers, key=lambda w: (-w.memory_bytes, -w.steps_per_second))
        fastest = max(worker.steps_per_second for worker in workers)
        assigned = [ranked[k % len(ranked)] for k in range(subnets)]
        turns = [-(-(subnets - k % len(ranked)) // len(ranked)) for k in range(subnets)]
        speeds = [2.0 ** round(math.log2(worker.steps_per_second / fastest)) for worker in assigned]
        return cls(assigned, turns, [speed / turn for speed, turn in zip(speeds, turns, strict=True)])


def _widths(
    deal: _Assignment, need_bytes: Callable[[float], int], out_of_core: OutOfCoreCosts | None, copies: float
) -> tuple[float, ...] | None:
    """Return shares that cover the network, trained out of core where they do not fit; None if that is impossible."""
    if out_of_core is None:
        return None
    wide = tuple(_fill(deal.weights, [1.0] * len(deal.weights), copies))
    possible = all(
        min(need_bytes(share), out_of_core.least_bytes(share)) <= steady(worker.memory_bytes)
        for share, worker in zip(wide, deal.workers, strict=True)
    )
    return wide if possible else None


def _cover_seconds(shares: Sequence[float], deal: _Assignment, out_of_core: OutOfCoreCosts, copies: float) -> float:
    """Return the seconds of compute per local step until every neuron was trained."""
    slowest = max(
        turn * out_of_core.seconds(share, steady(worker.memory_bytes))
        for share, worker, turn in zip(shares, deal.workers, deal.turns, strict=True)
    )
    return slowest / min(1.0, sum(shares) / copies)


def _in_core(
    workers: Sequence[Capacity], subnets: int, need_bytes: Callable[[float], int], out_of_core: OutOfCoreCosts | None
) -> tuple[float, ...]:
    """Return the shares of local SGD, where every worker trains the whole network."""
    largest = max(worker.memory_bytes for worker in workers)
    if need_bytes(1.0) > largest and (out_of_core is None or out_of_core.least_bytes(1.0) > largest):
        least = f", {out_of_core.least_bytes(1.0) >> 20} MiB out of core," if out_of_core else ""
        raise RunError(
            f"the whole network needs {need_bytes(1.0) >> 20} MiB{least} on a worker and the largest has "
            f"{largest >> 20} MiB; "
            "use training.method: ist, a smaller training.micro_batch or workers with more memory"
        )
    return (1 / subnets,) * subnets


def _widest(memory_bytes: int, need_bytes: Callable[[float], int], narrowest: float) -> float:
    """Return the largest share that fits, by bisection; the narrowest is known to fit."""
    memory_bytes = steady(memory_bytes)
    if need_bytes(1.0) <= memory_bytes:
        return 1.0
    low, high = narrowest, 1.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if need_bytes(middle) <= memory_bytes else (low, middle)
    return low


def _fill(weights: Sequence[float], caps: Sequence[float], total: float) -> list[float]:
    """Return shares in proportion to weights, none above its cap, adding up to `total` as far as the caps allow."""
    result = [0.0] * len(weights)
    free = set(range(len(weights)))
    left = total
    while free:
        unit = left / sum(weights[k] for k in free)
        full = {k for k in free if weights[k] * unit >= caps[k]}
        for k in full or free:
            result[k] = caps[k] if full else weights[k] * unit
        if not full:
            break
        left = max(0.0, total - sum(result))
        free -= full
    return result
