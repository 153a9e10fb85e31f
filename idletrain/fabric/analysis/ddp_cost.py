"""A cost model of data-parallel training: how a link's speed changes the time of a step. Pure.

An all-reduce sends and receives 2 (n - 1) / n of the gradient's bytes at every node (a ring, which nothing beats; the
factor of nccl-tests' bus bandwidth). Buckets are exchanged during the backward pass, two thirds of a step's
computation. An exchange longer than that is exposed for the rest of its time; of a shorter one some is exposed as
well: buckets fill late, and the processor that computes also moves data. With half of it exposed the model gives what
Horovod's authors measured (their benchmark page: 25 Gbit/s, 90 % of linear scaling for ResNet-101, 68 % for VGG-16),
so one half is assumed where the overlap was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

EFFICIENT = 0.9  # share of a step spent computing that the verdict asks for
BACKWARD = 2 / 3  # of a step's computation: gradients by inputs and by weights, next to one forward pass
OVERLAP = 0.5  # share of an exchange hidden behind the backward pass


@dataclass(frozen=True)
class DdpStep:
    """A data-parallel step.

    Attributes:
        compute_seconds: Time without any exchange.
        gradient_bytes: Bytes exchanged once a step.
        nodes: Nodes that take part, each with a link of its own.
        overlap: Share of the exchange that is hidden behind computation where there is time for all of it.
    """

    compute_seconds: float
    gradient_bytes: float
    nodes: int
    overlap: float = OVERLAP


def all_reduce_seconds(moved_bytes: float, nodes: int, bytes_per_second: float) -> float:
    """Return the seconds of a ring all-reduce over links of that speed."""
    return bus_factor("all-reduce", nodes) * moved_bytes / bytes_per_second


def bus_factor(operation: str, nodes: int) -> float:
    """Return bus over algorithm bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md there).

    It is what the busiest link carries in one direction with the best algorithm, over the operation's bytes: of a
    broadcast all of them, however many nodes there are.
    """
    if operation == "all-reduce":
        return 2 * (nodes - 1) / nodes
    return (nodes - 1) / nodes if operation in ("all-gather", "reduce-scatter") else 1.0


def exposed_seconds(step: DdpStep, exchange_seconds: float) -> float:
    """Return how many seconds longer a step takes for its exchange."""
    hidden = min(step.overlap * exchange_seconds, BACKWARD * step.compute_seconds)
    return exchange_seconds - hidden


def efficiency(step: DdpStep, exchange_seconds: float) -> float:
    """Return the share of a step that is computation."""
    return step.compute_seconds / (step.compute_seconds + exposed_seconds(step, exchange_seconds))


def efficiency_at(step: DdpStep, bytes_per_second: float) -> float:
    """Return the share of a step that is computation, over links of a given speed."""
    return efficiency(step, all_reduce_seconds(step.gradient_bytes, step.nodes, bytes_per_second))


def break_even(step: DdpStep) -> float:
    """Return the slowest links, in bytes/s, over which `EFFICIENT` of a step is computation; 0 for one node."""
    if step.nodes < 2:
        return 0.0
    allowed = step.compute_seconds * (1 / EFFICIENT - 1)
    window = BACKWARD * step.compute_seconds
    by_share = allowed / (1 - step.overlap) if step.overlap < 1 else allowed + window
    longest = min(by_share, allowed + window)
    return bus_factor("all-reduce", step.nodes) * step.gradient_bytes / longest


def overlap_of(compute_seconds: float, exchange_seconds: float, step_seconds: float) -> float:
    """Return the share of an exchange that was hidden, from measured times; between 0 and 1."""
    exposed = max(0.0, step_seconds - compute_seconds)
    return min(1.0, max(0.0, 1 - exposed / exchange_seconds)) if exchange_seconds > 0 else 1.0
