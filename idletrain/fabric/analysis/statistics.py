"""From samples to figures: rates, percentiles, fits, what a step's exchange costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from idletrain.fabric.analysis import ddp_cost
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point, StencilSample, TrainingSample

# Of an Ethernet frame, beyond the MTU; and of the MTU, what IP and TCP with timestamps take.
FRAME_BYTES, HEADER_BYTES = 14, 52
ODD = 3.0  # scaled median deviations from the median from which on a node is odd (Iglewicz & Hoaglin, 1993: 3.5)
ODD_SHARE = 0.1  # and at least this share of the median: with little spread anything would be odd
MAD_TO_SIGMA = 1.4826  # of a median deviation, to be a standard deviation of a normal distribution


@dataclass(frozen=True)
class LinearFit:
    """`t = alpha + beta * bytes` through medians, with the standard error of each."""

    alpha: float
    beta: float
    alpha_error: float
    beta_error: float


@dataclass(frozen=True)
class CollectiveBandwidth:
    """A collective's figures by nccl-tests' definitions; rates in bytes a second.

    Attributes:
        line_share: Of the nodes' links, None where they are not known.
    """

    of: CollectiveSample
    median: float
    p99: float
    algorithm: float
    bus: float
    line_share: float | None


@dataclass(frozen=True)
class TrainingCost:
    """What its exchange costs a network's step.

    Attributes:
        measured: Whether steps were; computed of the fitted all-reduce otherwise.
        exposed: Seconds that a step takes longer.
        scaling: Samples a second on all nodes over nodes times those of one, None where one was not measured.
        at_other_speeds: The step for the model: the overlap is what was measured only where there was room for more.
        needed: The links' speed at which it is efficient enough, bytes a second.
    """

    of: TrainingSample
    measured: bool
    compute: float
    communicate: float
    step: float
    exposed: float
    overlap: float
    efficiency: float
    scaling: float | None
    at_other_speeds: ddp_cost.DdpStep
    needed: float

    @property
    def samples_per_second(self) -> float:
        """Of all nodes together."""
        return self.of.nodes * self.of.batch_size / self.step


def median(samples: Sequence[float]) -> float:
    """The middle one; NaN of none."""
    return float(np.median(samples)) if len(samples) else math.nan


def p99(samples: Sequence[float]) -> float:
    """What 99 of 100 do not exceed."""
    return float(np.percentile(samples, 99)) if len(samples) else math.nan


def spread(samples: Sequence[float]) -> float:
    """How far apart the middle half lies, as a share of the median."""
    low, high = np.percentile(samples, [25, 75])
    return float((high - low) / abs(median(samples))) if median(samples) else 0.0


def rate(point: Point) -> float:
    """Bytes a second: of connections at once, together; else the mean of the middle half of slices of time (a process
    that was not let run for a moment says nothing of a link), or the median transfer.
    """
    if point.what in ("flows", "incast"):
        return float(np.sum(point.samples))
    return _middle(point.samples) if point.transport == "socket" else median(point.samples)


def _middle(samples: Sequence[float]) -> float:
    ordered, out = np.sort(samples), len(samples) // 4
    return float(ordered[out : len(ordered) - out].mean())


def points_of_kind(fabric: Fabric, what: str, transport: str = "socket") -> list[Point]:
    """Points of one kind."""
    return [point for point in fabric.points if (point.what, point.transport) == (what, transport) and point.samples]


def on_the_wire(fabric: Fabric, point: Point) -> float:
    """Bytes a second of a link that brings so many of TCP's payload: headers come on top."""
    mtu = min(int(fabric.nodes[n].get("mtu") or 1500) for n in (point.source, point.target))
    return rate(point) * (mtu + FRAME_BYTES) / (mtu - HEADER_BYTES)


def link_rate(fabric: Fabric) -> float | None:
    """The speed of a typical link as measured, on the wire, in bytes a second."""
    found = [on_the_wire(fabric, point) for point in points_of_kind(fabric, "one way")]
    return median(found) if found else None


def line_rate(fabric: Fabric) -> float | None:
    """What the nodes' cards say their links do, the slowest, in bytes a second; as measured where one does not know."""
    told = [float(node.get("link_bits_per_second") or 0.0) for node in fabric.nodes]
    return min(told) / 8 if min(told, default=0.0) else link_rate(fabric)


def round_trip(fabric: Fabric) -> float | None:
    """The median of pairs' medians, in seconds."""
    found = [median(point.samples) for point in points_of_kind(fabric, "round trip")]
    return median(found) if found else None


def cpu_per_gb(points: Iterable[Point]) -> float | None:
    """CPU seconds of both ends for 10^9 bytes."""
    points = [point for point in points if point.moved_bytes]
    moved = sum(point.moved_bytes for point in points)
    return sum(point.cpu_seconds for point in points) / moved * 1e9 if moved else None


def odd_nodes(fabric: Fabric) -> list[tuple[int, float]]:
    """Nodes whose pairs are slower or faster than is usual here, with their typical speed over the others'."""
    by_node = {
        node: [rate(p) for p in points_of_kind(fabric, "one way") if node in (p.source, p.target)]
        for node in range(len(fabric.nodes))
    }
    typical = {node: median(rates) for node, rates in by_node.items() if rates}
    if len(typical) < 3:  # of two, neither is odd
        return []
    middle = median(list(typical.values()))
    deviation = MAD_TO_SIGMA * median([abs(value - middle) for value in typical.values()])
    least = max(ODD * deviation, ODD_SHARE * middle)
    return [(node, value / middle) for node, value in typical.items() if abs(value - middle) > least]


def fitted(samples: Sequence[tuple[float, Sequence[float]]]) -> LinearFit | None:
    """A line through the medians of times at sizes, weighted so that each size counts by its relative error; None of
    fewer than three sizes.
    """
    if len(samples) < 3:
        return None
    x = np.array([size for size, _ in samples], float)
    y = np.array([median(seconds) for _, seconds in samples])
    rows = np.stack([np.ones_like(x), x], 1) / y[:, None]
    scale = np.abs(rows).max(0)  # bytes are nine orders of magnitude beyond one
    found, *_ = np.linalg.lstsq(rows / scale, np.ones_like(y), rcond=None)
    left = 1 - rows / scale @ found
    inverse = np.linalg.pinv((rows / scale).T @ (rows / scale))
    errors = np.sqrt(np.diag(inverse) * float(left @ left) / (len(y) - 2)) / scale
    alpha, beta = found / scale
    return LinearFit(float(alpha), float(beta), float(errors[0]), float(errors[1]))


def bandwidths(fabric: Fabric) -> list[CollectiveBandwidth]:
    """Every collective's figures."""
    line = line_rate(fabric)
    return [_bandwidth(collective, line) for collective in fabric.collectives if collective.seconds]


def _bandwidth(of: CollectiveSample, line: float | None) -> CollectiveBandwidth:
    typical = median(of.seconds)
    algorithm = of.moved_bytes / typical
    bus = algorithm * ddp_cost.bus_factor(of.operation, of.nodes)
    return CollectiveBandwidth(of, typical, p99(of.seconds), algorithm, bus, bus / line if line else None)


def linear_fits(fabric: Fabric) -> dict[tuple[str, str, int], LinearFit]:
    """A fitted line for each backend, operation and number of nodes."""
    keys = dict.fromkeys((c.backend, c.operation, c.nodes) for c in fabric.collectives)
    fits = {key: fitted(_sizes(fabric, key)) for key in keys}
    return {key: line for key, line in fits.items() if line}


def _sizes(fabric: Fabric, key: tuple[str, str, int]) -> list[tuple[float, Sequence[float]]]:
    return [(c.moved_bytes, c.seconds) for c in fabric.collectives if (c.backend, c.operation, c.nodes) == key]


def costs(fabric: Fabric) -> list[TrainingCost]:
    """What each network's steps cost, by what was measured, or by the fit where steps were too slow to be taken."""
    fits, link = linear_fits(fabric), link_rate(fabric)
    alone = {(t.backend, t.model, t.batch_size): median(t.compute) for t in fabric.training if t.nodes == 1}
    return list(_costs(fabric.training, fits, link, alone))


def _costs(
    training: Sequence[TrainingSample],
    fits: dict[tuple[str, str, int], LinearFit],
    link: float | None,
    alone: dict[tuple[str, str, int], float],
) -> Iterator[TrainingCost]:
    for one in training:
        if one.nodes < 2 or not one.compute:
            continue
        compute = median(one.compute)
        step = ddp_cost.DdpStep(compute, one.gradient_bytes, one.nodes)
        fit = fits.get((one.backend, "all-reduce", one.nodes))
        if one.step and one.communicate:
            communicate, took = median(one.communicate), median(one.step)
        elif fit or link:
            communicate = (
                fit.alpha + fit.beta * one.gradient_bytes
                if fit
                else ddp_cost.all_reduce_seconds(one.gradient_bytes, one.nodes, link or math.nan)
            )
            took = compute + ddp_cost.exposed_seconds(step, communicate)
        else:
            continue
        overlap = ddp_cost.overlap_of(compute, communicate, took)
        # Of an exchange for which no arithmetic was left, that says nothing of one that is shorter.
        if one.step and ddp_cost.OVERLAP * communicate <= ddp_cost.BACKWARD * compute:
            step = replace(step, overlap=overlap)
        single = alone.get((one.backend, one.model, one.batch_size))
        exposed = max(0.0, took - compute)
        yield TrainingCost(
            one,
            bool(one.step),
            compute,
            communicate,
            took,
            exposed,
            overlap,
            compute / (compute + exposed),
            single / took if single else None,
            step,
            ddp_cost.break_even(step),
        )


def largest_world(costs: Sequence[TrainingCost]) -> list[TrainingCost]:
    """Of every network, backend and batch size the cost with the most nodes."""
    most: dict[tuple[str, str, int], TrainingCost] = {}
    for cost in costs:
        key = cost.of.backend, cost.of.model, cost.of.batch_size
        if key not in most or most[key].of.nodes < cost.of.nodes:
            most[key] = cost
    return list(most.values())


def stencil_efficiency(fabric: Fabric, one: StencilSample) -> float | None:
    """Cells a second on these nodes over nodes times those of one node; None where one node was not measured."""
    alone = (one.backend, one.scaling, one.blocking, 1)
    single = next((s for s in fabric.stencil if (s.backend, s.scaling, s.blocking, s.nodes) == alone), None)
    if single is None:
        return None
    return one.cells / median(one.step) / (one.nodes * single.cells / median(single.step))
