"""Statistics of samples: rates, percentiles, fitted lines, and the cost of a step's exchange. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from idletrain.fabric.analysis import ddp_cost
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point, StencilSample, TrainingSample

# Ethernet's bytes of a frame beyond the MTU; and the bytes of the MTU that IP and TCP with timestamps take.
FRAME_BYTES, TCP_HEADER_BYTES = 14, 52
OUTLIER_DEVIATIONS = 3.0  # scaled median deviations from the median of an outlier (Iglewicz & Hoaglin, 1993: 3.5)
OUTLIER_SHARE = 0.1  # and at least this share of the median: with little spread anything would be an outlier
MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


@dataclass(frozen=True)
class LinearFit:
    """A line `seconds = alpha + beta * bytes` through medians, with the standard error of both coefficients."""

    alpha: float
    beta: float
    alpha_error: float
    beta_error: float


@dataclass(frozen=True)
class CollectiveBandwidth:
    """A collective's bandwidths by nccl-tests' definitions, in bytes a second.

    Attributes:
        of: The samples.
        median: Median seconds.
        p99: 99th percentile of the seconds.
        algorithm: Algorithm bandwidth: bytes over seconds.
        bus: Bus bandwidth: the rate on each link.
        line_share: Share of the links' speed that the operation uses, by the bytes that every algorithm must move over
            each node's link in one direction; at most 1, as what fits into caches and buffers may be faster than a
            stream for a moment. None where that speed is not known.
    """

    of: CollectiveSample
    median: float
    p99: float
    algorithm: float
    bus: float
    line_share: float | None


@dataclass(frozen=True)
class TrainingCost:
    """The cost of the exchange in a network's data-parallel step.

    Attributes:
        of: The samples.
        measured: Whether steps were measured; if not, `step` is computed from the fitted all-reduce.
        compute: Median seconds of the computation alone.
        communicate: Median seconds of the exchange alone.
        step: Median seconds of a step.
        exposed: Seconds that the exchange makes a step longer.
        overlap: Share of the exchange that is hidden behind computation.
        efficiency: Share of a step that is computation.
        scaling: Samples a second on all nodes over nodes times those of one; None where one was not measured.
        at_other_speeds: The step as input of the cost model; its overlap is the measured one only where computation
            was long enough to hide more.
        needed: Slowest links, in bytes/s, over which the step is efficient enough.
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
        """Training samples a second of all nodes together."""
        return self.of.nodes * self.of.batch_size / self.step


def median(samples: Sequence[float]) -> float:
    """Return the median; NaN of no samples."""
    return float(np.median(samples)) if len(samples) else math.nan


def p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile; NaN of no samples."""
    return float(np.percentile(samples, 99)) if len(samples) else math.nan


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    low, high = np.percentile(samples, [25, 75])
    return float((high - low) / abs(median(samples))) if median(samples) else 0.0


def rate(point: Point) -> float:
    """Return a point's bytes a second: the sum over concurrent connections, the median transfer, or of a stream the
    mean of the middle half of its slices (a process that did not run for a moment says nothing of a link).
    """
    if point.what in ("flows", "incast"):
        return float(np.sum(point.samples))
    return _middle(point.samples) if point.transport == "socket" else median(point.samples)


def _middle(samples: Sequence[float]) -> float:
    ordered, out = np.sort(samples), len(samples) // 4
    return float(ordered[out : len(ordered) - out].mean())


def points_of_kind(fabric: Fabric, what: str, transport: str = "socket") -> list[Point]:
    """Return the points of one kind and transport that have samples."""
    return [point for point in fabric.points if (point.what, point.transport) == (what, transport) and point.samples]


def on_the_wire(fabric: Fabric, point: Point) -> float:
    """Return a point's bytes a second on the link: TCP's payload with all headers."""
    mtu = min(int(fabric.nodes[n].get("mtu") or 1500) for n in (point.source, point.target))
    return rate(point) * (mtu + FRAME_BYTES) / (mtu - TCP_HEADER_BYTES)


def link_rate(fabric: Fabric) -> float | None:
    """Return the measured speed of a typical link, headers included, in bytes a second; None without any."""
    rates = [on_the_wire(fabric, point) for point in points_of_kind(fabric, "one way")]
    return median(rates) if rates else None


def line_rate(fabric: Fabric) -> float | None:
    """Return what the slowest node's link can carry in one direction, in bytes/s with headers; None if nothing says it.

    That is the nominal speed of its network card, or the fastest streams that it was seen to carry, if those were
    faster or the card's speed says nothing: it is unknown, or all nodes share a machine.
    """
    nominal = [float(node.get("link_bits_per_second") or 0.0) / 8 for node in fabric.nodes]
    known = len(set(_hosts(fabric))) > 1 and min(nominal, default=0.0) > 0
    fastest = [max(nominal[node] if known else 0.0, _fastest(fabric, node)) for node in range(len(fabric.nodes))]
    return min((rate for rate in fastest if rate), default=None)


def _fastest(fabric: Fabric, node: int) -> float:
    """Return the fastest streams that a node's link carried in one direction, all connections at once added up.

    Where nodes are on several machines, bytes between those of one machine go over no link, nor do some of an incast.
    """
    hosts = _hosts(fabric)
    several, apart = len(set(hosts)) > 1, len(set(hosts)) == len(hosts)
    kinds = ("one way", "both ways", "flows", *(("incast",) if apart or not several else ()))
    streams = [
        p for what in kinds for p in points_of_kind(fabric, what) if not several or hosts[p.source] != hosts[p.target]
    ]
    # An incast's sum goes over the target's link alone.
    ends = [(p, (p.target,) if p.what == "incast" else (p.source, p.target)) for p in streams]
    return max((on_the_wire(fabric, point) for point, nodes in ends if node in nodes), default=0.0)


def _hosts(fabric: Fabric) -> list[object]:
    return [node.get("host", number) for number, node in enumerate(fabric.nodes)]


def cpu_per_gb(points: Iterable[Point]) -> float | None:
    """Return the CPU seconds of both ends for 10^9 bytes; None if no bytes moved."""
    points = [point for point in points if point.moved_bytes]
    moved = sum(point.moved_bytes for point in points)
    return sum(point.cpu_seconds for point in points) / moved * 1e9 if moved else None


def outlier_nodes(fabric: Fabric) -> list[tuple[int, float]]:
    """Return nodes whose links are unusually slow or fast here, each with its median speed over that of all nodes."""
    by_node = {
        node: [rate(p) for p in points_of_kind(fabric, "one way") if node in (p.source, p.target)]
        for node in range(len(fabric.nodes))
    }
    typical = {node: median(rates) for node, rates in by_node.items() if rates}
    if len(typical) < 3:  # of two, neither is an outlier
        return []
    middle = median(list(typical.values()))
    deviation = MAD_TO_SIGMA * median([abs(value - middle) for value in typical.values()])
    limit = max(OUTLIER_DEVIATIONS * deviation, OUTLIER_SHARE * middle)
    return [(node, value / middle) for node, value in typical.items() if abs(value - middle) > limit]


def fitted(samples: Sequence[tuple[float, Sequence[float]]]) -> LinearFit | None:
    """Fit a line through the median seconds at each size in bytes, minimizing relative errors.

    Args:
        samples: Pairs of a size and its times.

    Returns:
        The line, or None of fewer than three sizes.
    """
    if len(samples) < 3:
        return None
    x = np.array([size for size, _ in samples], float)
    y = np.array([median(seconds) for _, seconds in samples])
    rows = np.stack([np.ones_like(x), x], 1) / y[:, None]
    scale = np.abs(rows).max(0)  # bytes are up to nine orders of magnitude larger than the constant column
    solution, *_ = np.linalg.lstsq(rows / scale, np.ones_like(y), rcond=None)
    residuals = 1 - rows / scale @ solution
    inverse = np.linalg.pinv((rows / scale).T @ (rows / scale))
    errors = np.sqrt(np.diag(inverse) * float(residuals @ residuals) / (len(y) - 2)) / scale
    alpha, beta = solution / scale
    return LinearFit(float(alpha), float(beta), float(errors[0]), float(errors[1]))


def bandwidths(fabric: Fabric) -> list[CollectiveBandwidth]:
    """Return every collective's bandwidths."""
    line = line_rate(fabric)
    return [_bandwidth(collective, line) for collective in fabric.collectives if collective.seconds]


def _bandwidth(of: CollectiveSample, line: float | None) -> CollectiveBandwidth:
    typical = median(of.seconds)
    algorithm = of.moved_bytes / typical
    bus = algorithm * ddp_cost.bus_factor(of.operation, of.nodes)
    return CollectiveBandwidth(of, typical, p99(of.seconds), algorithm, bus, min(1.0, bus / line) if line else None)


def linear_fits(fabric: Fabric) -> dict[tuple[str, str, int], LinearFit]:
    """Fit a line for each (backend, operation, number of nodes) with enough sizes."""
    keys = dict.fromkeys((c.backend, c.operation, c.nodes) for c in fabric.collectives)
    fits = {key: fitted(_sizes(fabric, key)) for key in keys}
    return {key: line for key, line in fits.items() if line}


def _sizes(fabric: Fabric, key: tuple[str, str, int]) -> list[tuple[float, Sequence[float]]]:
    return [(c.moved_bytes, c.seconds) for c in fabric.collectives if (c.backend, c.operation, c.nodes) == key]


def costs(fabric: Fabric) -> list[TrainingCost]:
    """Return the cost of each network's steps, from measured steps or, where they were too slow, from the fit."""
    fits, link = linear_fits(fabric), link_rate(fabric)
    alone = {(t.backend, t.model, t.batch_size): median(t.compute) for t in fabric.training if t.nodes == 1}
    return list(_costs(fabric.training, fits, link, alone))


def _costs(
    training: Sequence[TrainingSample],
    fits: dict[tuple[str, str, int], LinearFit],
    link: float | None,
    alone: dict[tuple[str, str, int], float],
) -> Iterator[TrainingCost]:
    for sample in training:
        if sample.nodes < 2 or not sample.compute:
            continue
        compute = median(sample.compute)
        step = ddp_cost.DdpStep(compute, sample.gradient_bytes, sample.nodes)
        fit = fits.get((sample.backend, "all-reduce", sample.nodes))
        if sample.step and sample.communicate:
            communicate, step_seconds = median(sample.communicate), median(sample.step)
        elif fit or link:
            communicate = (
                fit.alpha + fit.beta * sample.gradient_bytes
                if fit
                else ddp_cost.all_reduce_seconds(sample.gradient_bytes, sample.nodes, link or math.nan)
            )
            step_seconds = compute + ddp_cost.exposed_seconds(step, communicate)
        else:
            continue
        overlap = ddp_cost.overlap_of(compute, communicate, step_seconds)
        # The overlap of an exchange longer than the computation says nothing of a shorter one.
        if sample.step and ddp_cost.OVERLAP * communicate <= ddp_cost.BACKWARD * compute:
            step = replace(step, overlap=overlap)
        single = alone.get((sample.backend, sample.model, sample.batch_size))
        exposed = max(0.0, step_seconds - compute)
        yield TrainingCost(
            sample,
            bool(sample.step),
            compute,
            communicate,
            step_seconds,
            exposed,
            overlap,
            compute / (compute + exposed),
            single / step_seconds if single else None,
            step,
            ddp_cost.break_even(step),
        )


def largest_world(costs: Sequence[TrainingCost]) -> list[TrainingCost]:
    """Return for every network, backend and batch size the cost with the most nodes."""
    largest: dict[tuple[str, str, int], TrainingCost] = {}
    for cost in costs:
        key = cost.of.backend, cost.of.model, cost.of.batch_size
        if key not in largest or largest[key].of.nodes < cost.of.nodes:
            largest[key] = cost
    return list(largest.values())


def stencil_efficiency(fabric: Fabric, sample: StencilSample) -> float | None:
    """Return cells a second over nodes times the cells a second of one node; None where one node was not measured."""
    alone = (sample.backend, sample.scaling, sample.blocking, 1)
    single = next((s for s in fabric.stencil if (s.backend, s.scaling, s.blocking, s.nodes) == alone), None)
    if single is None:
        return None
    return sample.cells / median(sample.step) / (sample.nodes * single.cells / median(single.step))
