"""What a link does to a data-parallel step, by arithmetic. Pure.

An all-reduce sends and receives 2 (n - 1) / n of the gradient's bytes at every node (a ring, which nothing beats; the
factor of nccl-tests' bus bandwidth). Buckets travel while the backward pass goes on, two thirds of a step's arithmetic;
what is longer than that is exposed, and of what would fit some still is: buckets fill late, the last one last, and who
computes also moves data. With half of it exposed the model gives what Horovod's authors measured (their benchmark page:
25 Gbit/s, 90 % of linear scaling for ResNet-101, 68 % for VGG-16), so that is taken where it was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

EFFICIENT = 0.9  # of a step spent on arithmetic: what the verdict asks for
BACKWARD = 2 / 3  # of a step's arithmetic: gradients by inputs and by weights, beside one forward pass
OVERLAP = 0.5


@dataclass(frozen=True)
class DdpStep:
    """A data-parallel step.

    Attributes:
        compute_seconds: Without any exchange.
        gradient_bytes: Exchanged once a step.
        nodes: That take part, each with a link of its own.
        overlap: The share of the exchange that is hidden behind arithmetic where there is time for all of it.
    """

    compute_seconds: float
    gradient_bytes: float
    nodes: int
    overlap: float = OVERLAP


def all_reduce_seconds(moved_bytes: float, nodes: int, bytes_per_second: float) -> float:
    """Of a ring over links of that speed."""
    return bus_factor("all-reduce", nodes) * moved_bytes / bytes_per_second


def bus_factor(operation: str, nodes: int) -> float:
    """Bus over algorithm bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md there)."""
    if operation == "all-reduce":
        return 2 * (nodes - 1) / nodes
    return (nodes - 1) / nodes if operation in ("all-gather", "reduce-scatter") else 1.0


def exposed_seconds(step: DdpStep, exchange_seconds: float) -> float:
    """How much longer a step takes for its exchange."""
    hidden = min(step.overlap * exchange_seconds, BACKWARD * step.compute_seconds)
    return exchange_seconds - hidden


def efficiency(step: DdpStep, exchange_seconds: float) -> float:
    """The share of a step that is arithmetic."""
    return step.compute_seconds / (step.compute_seconds + exposed_seconds(step, exchange_seconds))


def efficiency_at(step: DdpStep, bytes_per_second: float) -> float:
    """The same, over links of a given speed."""
    return efficiency(step, all_reduce_seconds(step.gradient_bytes, step.nodes, bytes_per_second))


def break_even(step: DdpStep, wanted: float = EFFICIENT) -> float:
    """The speed of links, in bytes a second, from which on a step is as efficient as wanted; 0 for one node."""
    if step.nodes < 2:
        return 0.0
    allowed = step.compute_seconds * (1 / wanted - 1)
    window = BACKWARD * step.compute_seconds
    by_share = allowed / (1 - step.overlap) if step.overlap < 1 else allowed + window
    longest = min(by_share, allowed + window)
    return bus_factor("all-reduce", step.nodes) * step.gradient_bytes / longest


def overlap_of(compute_seconds: float, exchange_seconds: float, step_seconds: float) -> float:
    """The share of an exchange that was hidden, by what was measured; between 0 and 1."""
    exposed = max(0.0, step_seconds - compute_seconds)
    return min(1.0, max(0.0, 1 - exposed / exchange_seconds)) if exchange_seconds > 0 else 1.0
