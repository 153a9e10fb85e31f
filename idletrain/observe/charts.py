"""Compute the geometry of charts, and format numbers, for the page and for reports. Pure.

The template `charts.html` makes SVG from the geometry; colours are in the style sheet.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader

from idletrain.observe.run_totals import RoundEnd, WorkerView
from idletrain.observe.time_use import OUTSIDE_ROUNDS, TIME_PARTS

WIDTH, HEIGHT = 380, 190  # of a chart, in the style sheet's pixels when four are in a row
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
TICKS = 4
TIMELINE_WIDTH, EDGE = 1300, 20
LANES = 200  # most lanes of a timeline; further workers are counted, not drawn
LANE_PIXELS = (5, 18)
LANES_PIXELS = 600  # height of all lanes until each is at its thinnest
NAMED_PIXELS, LETTER_PIXELS = 14, 7  # height of a lane that has room for a worker's name; width of a letter
BANDS = 100  # most rounds that a timeline marks
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
CLOCK = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
BETTER = {"accuracy": "higher", "loss": "lower"}  # of the curves that say so themselves
CAUSES = ("notice", "kill")  # classes of the style sheet
NOTHING = "-"


class Series(NamedTuple):
    """A named series of points `(x, y)`, with the number of a colour in the style sheet."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


class AxisTick(NamedTuple):
    """A label next to an axis, or a mark on it; of a mark the text is its tooltip."""

    at: float
    text: str
    kind: str = ""


class Dot(NamedTuple):
    """A point in pixels, and its tooltip."""

    x: float
    y: float
    text: str


class Curve(NamedTuple):
    """A line in pixels, its last point with its tooltip, and its best one, if it is known which value is better."""

    path: str
    x: float
    y: float
    name: str
    label: str
    colour: int
    best: Dot | None = None


class Box(NamedTuple):
    """A rectangle in pixels, and its tooltip."""

    x: float
    y: float
    width: float
    height: float
    text: str
    kind: str = ""
    name: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over a common x axis from zero, with preemptions as upright ticks."""

    what: str
    over: str
    better: str = ""
    x: Sequence[AxisTick] = ()
    y: Sequence[AxisTick] = ()
    marks: Sequence[AxisTick] = ()
    curves: Sequence[Curve] = ()
    target: AxisTick | None = None
    width, height, left, right, top, bottom = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM


@dataclass(frozen=True)
class Timeline:
    """Workers from joining to leaving, each in a lane that is free at that time, over bands for the rounds."""

    height: int
    x: Sequence[AxisTick]
    bands: Sequence[Box]
    workers: Sequence[Box]
    more: int
    width = TIMELINE_WIDTH


def chart(
    what: str,
    over: str,
    lines: Sequence[Series],
    preempted: Sequence[tuple[float, str, str]] = (),
    target: float | None = None,
    better: str = "",
) -> Chart:
    """Lay out a chart of lines.

    Args:
        what: Quantity of the y axis.
        over: Quantity of the x axis; `time` is in seconds.
        lines: The series; one without points is left out.
        preempted: Place on the x axis, cause and name of each preempted worker.
        target: A value to reach.
        better: `higher` or `lower` if the chart should say which value is better.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Chart(what, over, better)
    text = duration if over == "time" else _count
    xs = [x for line in lines for x, _ in line.points] + [x for x, _, _ in preempted]
    ys = [y for line in lines for _, y in line.points] + ([] if target is None else [target])
    last, rules = max(xs) or 1.0, ticks(min(ys), max(ys))
    low, high = rules[0], rules[-1]

    def at_x(x: float) -> float:
        return round(LEFT + x / last * (WIDTH - LEFT - RIGHT), 1)

    def at_y(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def curve(line: Series) -> Curve:
        x, y = line.points[-1]
        path = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in line.points)
        label = f"{line.name}: {y:.4g} at {text(x)}"
        return Curve(path, at_x(x), at_y(y), line.name, label, line.colour, best(line))

    def best(line: Series) -> Dot | None:
        which = {"higher": max, "lower": min}.get(better or BETTER.get(what, ""))
        if which is None or len(line.points) == 1:
            return None
        x, y = which(line.points, key=lambda point: point[1])
        return Dot(at_x(x), at_y(y), f"{line.name}: best {y:.4g} at {text(x)}")

    return Chart(
        what,
        over,
        better,
        x=[AxisTick(at_x(x), label) for x, label in axis(over, last)],
        y=[AxisTick(at_y(y), f"{y:.3g}") for y in rules],
        marks=[AxisTick(at_x(x), f"{name}: {cause} at {text(x)}", _kind(cause)) for x, cause, name in preempted],
        curves=[curve(line) for line in lines],
        target=None if target is None else AxisTick(at_y(target), f"target {target:g}"),
    )


def run_charts(view: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a view's accuracy, loss and metrics, each over rounds and over time."""
    result = []
    for what, better, rows in curves_of(view):
        for over, x, mark in (("rounds", 0, 1), ("time", 1, 0)):
            points = [(row[x], row[2]) for row in rows if row[2] is not None]
            preempted = [(row[mark], row[2], row[3]) for row in view["preempted"]]
            target = view["target"] if what == "accuracy" else None
            result.append(chart(what, over, [Series(what, points)], preempted, target, better))
    return result


def curves_of(view: Mapping[str, Any]) -> list[tuple[str, str, list[Sequence[Any]]]]:
    """Return the curves of a view: the name, which value is better ("" if it says so itself), and the points
    `(round, seconds, value)`.
    """
    own = [(name, curve["better"], curve["points"]) for name, curve in view["metric_curves"].items()]
    scores = [
        (name, "", [(row[0], row[1], row[n]) for row in view["curve"]]) for name, n in (("accuracy", 2), ("loss", 3))
    ]
    return [*scores, *own]


def worker_timeline(workers: Sequence[WorkerView], rounds: Sequence[RoundEnd], end: float) -> Timeline:
    """Lay out a timeline of workers, in the order of joining, until `end` in seconds of the run."""
    end = end or 1.0
    packed = list(lanes(workers, end))
    count = min(LANES, max(packed, default=0) + 1)
    pixels = min(LANE_PIXELS[1], max(LANE_PIXELS[0], LANES_PIXELS // count))

    def at(seconds: float) -> float:
        return round(EDGE + min(seconds, end) / end * (TIMELINE_WIDTH - 2 * EDGE), 1)

    def box(lane: int, worker: WorkerView) -> Box:
        until = end if worker.left is None else worker.left
        text = f"{worker.name}: {duration(worker.joined)} to {duration(until)} {worker.cause}".strip()
        width = round(max(1.0, at(until) - at(worker.joined)), 1)
        kind = worker.cause if worker.cause in CAUSES else ""
        roomy = pixels >= NAMED_PIXELS and width > LETTER_PIXELS * len(worker.name)
        return Box(at(worker.joined), lane * pixels + 1, width, pixels - 2, text, kind, worker.name if roomy else "")

    def band(ended: RoundEnd) -> Box:
        start = at(ended.seconds - ended.round_seconds)
        text = f"round {ended.round}: {duration(ended.round_seconds)}"
        return Box(start, 0, round(max(0.3, at(ended.seconds) - start), 1), count * pixels, text)

    stride = -(-len(rounds) // BANDS) or 1
    return Timeline(
        height=count * pixels + BOTTOM,
        x=[AxisTick(at(x), label) for x, label in axis("time", end)],
        bands=[band(ended) for ended in rounds[::stride][::2]],
        workers=[box(lane, worker) for lane, worker in zip(packed, workers, strict=True) if lane < LANES],
        more=sum(lane >= LANES for lane in packed),
    )


def lanes(workers: Sequence[WorkerView], end: float) -> Iterator[int]:
    """Yield for each worker the first lane whose previous worker has left by then."""
    free: list[float] = []
    for worker in workers:
        lane = next((n for n, since in enumerate(free) if since <= worker.joined), len(free))
        free[lane : lane + 1] = [end if worker.left is None else worker.left]
        yield lane


def stack(shares: Mapping[str, float]) -> list[Box]:
    """Lay out shares of the workers' time as one stacked bar of a timeline's width, each part in its own colour."""
    boxes: list[Box] = []
    x = 0.0
    for name, share in shares.items():
        width = round(share * TIMELINE_WIDTH, 1)
        boxes.append(
            Box(round(x, 1), 0, width, 28, percent(share), f"p{(*TIME_PARTS, OUTSIDE_ROUNDS).index(name)}", name)
        )
        x += width
    return boxes


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers that span a range, in steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    rough = span / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [(first + n) * step for n in range(max(1, count) + 1)]


def axis(over: str, last: float) -> list[tuple[float, str]]:
    """Return places and labels of an x axis from zero, all labels in one unit."""
    unit, name = next(u for u in CLOCK if last >= u[0] * 3 or u is CLOCK[-1]) if over == "time" else (1, "")
    return [(x * unit, f"{x:g} {name}".strip()) for x in ticks(0.0, last / unit) if x * unit <= last]


def duration(seconds: float | None) -> str:
    """Format seconds in the unit that fits."""
    if seconds is None:
        return NOTHING
    if seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float | None) -> str:
    """Format bytes in the unit that fits."""
    if count is None:
        return NOTHING
    unit, name = next((u for u in UNITS if count >= u[0]), UNITS[-1])
    return f"{count / unit:.0f} {name}" if count / unit >= 100 else f"{count / unit:.3g} {name}"


def memory(count: float | None) -> str:
    """Format bytes of memory in GiB, as job files and terminals do."""
    return NOTHING if count is None else f"{count / 2**30:.3g} GiB"


def percent(share: float | None) -> str:
    """Format a share of one as per cent."""
    return NOTHING if share is None else f"{share:.1%}"


def number(value: float | None) -> str:
    """Format a number with thousands separators."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def fixed(value: float | None) -> str:
    """Format a number with four decimal places."""
    return NOTHING if value is None else f"{value:.4f}"


def usd(value: float | None) -> str:
    """Format US dollars: with cents, or four decimal places below a dollar."""
    if value is None:
        return NOTHING
    return f"${value:,.2f}" if abs(value) >= 1 else f"${value:.4f}"


def moment(unix_seconds: float) -> str:
    """Format Unix seconds as date and time in UTC."""
    return datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _count(x: float) -> str:
    return f"{x:g}"


FILTERS: Sequence[Callable[..., str]] = (duration, size, memory, percent, number, fixed, usd, moment)


def templates() -> Environment:
    """Return the environment of the page's and the report's templates: texts escaped, the formats above as filters."""
    environment = Environment(
        loader=PackageLoader("idletrain.observe"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    environment.globals |= {"charts_of": run_charts, "stack_of": stack}
    return environment


def _kind(cause: str) -> str:
    """Return a cause's class in the style sheet."""
    return cause if cause in CAUSES else "kill"
