"""Where things go in charts, and numbers as text, for the page and for reports; pure.

The templates make SVG of it (`charts.html`); colours are the style sheet's.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader

from idletrain.observe.summary import RoundEnd, WorkerView
from idletrain.observe.time_use import OUTSIDE_ROUNDS, TIME_PARTS

WIDTH, HEIGHT = 380, 190  # of a chart: the style sheet's pixels when four are in a row
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
TICKS = 4
TIMELINE_WIDTH, EDGE = 1300, 20
LANES = 200  # in a timeline; of more, the first
LANE_PIXELS = (5, 18)
LANES_PIXELS = 600  # of all lanes, before they are at their thinnest
NAMED_PIXELS, LETTER_PIXELS = 14, 7  # of a lane that has room for a worker's name, and of a letter of it
BANDS = 100  # rounds that are told apart in a timeline
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
CLOCK = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
CAUSES = ("notice", "kill")  # classes of the style sheet
NOTHING = "-"


class Series(NamedTuple):
    """A series: points `(x, y)`, in the style sheet's colour of that number."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


class AxisTick(NamedTuple):
    """A text beside an axis, or a mark on it, with what it says when pointed at."""

    at: float
    text: str
    kind: str = ""


class Curve(NamedTuple):
    """A line in pixels, its last point, and what that says."""

    path: str
    x: float
    y: float
    name: str
    label: str
    colour: int


class Box(NamedTuple):
    """A rectangle in pixels, and what it says."""

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
    x: Sequence[AxisTick] = ()
    y: Sequence[AxisTick] = ()
    marks: Sequence[AxisTick] = ()
    curves: Sequence[Curve] = ()
    target: AxisTick | None = None
    width, height, left, right, top, bottom = WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM


@dataclass(frozen=True)
class Timeline:
    """Workers from their joining to their end, each in a lane that is free then, over bands for the rounds."""

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
) -> Chart:
    """A chart of lines `over` `rounds` or `time`.

    Args:
        what: What the lines are of.
        over: `rounds` or `time` (in seconds).
        lines: The series; one without points is left out.
        preempted: Where on the x axis, cause and name of workers that were taken.
        target: A value to reach.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Chart(what, over)
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
        return Curve(path, at_x(x), at_y(y), line.name, f"{line.name}: {y:.4g} at {text(x)}", line.colour)

    return Chart(
        what,
        over,
        x=[AxisTick(at_x(x), said) for x, said in axis(over, last)],
        y=[AxisTick(at_y(y), f"{y:.3g}") for y in rules],
        marks=[AxisTick(at_x(x), f"{name}: {cause} at {text(x)}", _kind(cause)) for x, cause, name in preempted],
        curves=[curve(line) for line in lines],
        target=None if target is None else AxisTick(at_y(target), f"target {target:g}"),
    )


def run_charts(view: Mapping[str, Any]) -> list[Chart]:
    """A view's accuracy and loss, each over rounds and over time."""
    made = []
    for what, column in (("accuracy", 2), ("loss", 3)):
        for over, x, mark in (("rounds", 0, 1), ("time", 1, 0)):
            points = [(row[x], row[column]) for row in view["curve"] if row[column] is not None]
            preempted = [(row[mark], row[2], row[3]) for row in view["preempted"]]
            target = view["target"] if what == "accuracy" else None
            made.append(chart(what, over, [Series(what, points)], preempted, target))
    return made


def worker_timeline(workers: Sequence[WorkerView], rounds: Sequence[RoundEnd], end: float) -> Timeline:
    """A timeline of workers, in the order that they joined in, until `end`, in seconds of the run."""
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

    def band(one: RoundEnd) -> Box:
        began = at(one.seconds - one.round_seconds)
        text = f"round {one.round}: {duration(one.round_seconds)}"
        return Box(began, 0, round(max(0.3, at(one.seconds) - began), 1), count * pixels, text)

    stride = -(-len(rounds) // BANDS) or 1
    return Timeline(
        height=count * pixels + BOTTOM,
        x=[AxisTick(at(x), said) for x, said in axis("time", end)],
        bands=[band(one) for one in rounds[::stride][::2]],
        workers=[box(lane, worker) for lane, worker in zip(packed, workers, strict=True) if lane < LANES],
        more=sum(lane >= LANES for lane in packed),
    )


def lanes(workers: Sequence[WorkerView], end: float) -> Iterator[int]:
    """For each worker the first lane whose worker before has left by then."""
    free: list[float] = []
    for worker in workers:
        lane = next((n for n, since in enumerate(free) if since <= worker.joined), len(free))
        free[lane : lane + 1] = [end if worker.left is None else worker.left]
        yield lane


def stack(shares: Mapping[str, float]) -> list[Box]:
    """Shares of the workers' time, one behind the other, in a bar of a timeline's width; a part's colour is its own."""
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
    """Round numbers that span a range: steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    rough = span / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [(first + n) * step for n in range(max(1, count) + 1)]


def axis(over: str, last: float) -> list[tuple[float, str]]:
    """Where an x axis from zero has texts, all of one unit, and which."""
    unit, name = next(u for u in CLOCK if last >= u[0] * 3 or u is CLOCK[-1]) if over == "time" else (1, "")
    return [(x * unit, f"{x:g} {name}".strip()) for x in ticks(0.0, last / unit) if x * unit <= last]


def duration(seconds: float | None) -> str:
    """Seconds in the unit that fits."""
    if seconds is None:
        return NOTHING
    if seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float | None) -> str:
    """Bytes in the unit that fits."""
    if count is None:
        return NOTHING
    unit, name = next((u for u in UNITS if count >= u[0]), UNITS[-1])
    return f"{count / unit:.0f} {name}" if count / unit >= 100 else f"{count / unit:.3g} {name}"


def percent(share: float | None) -> str:
    """A share of one."""
    return NOTHING if share is None else f"{share:.1%}"


def number(value: float | None) -> str:
    """A number, its thousands apart."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def fixed(value: float | None) -> str:
    """A number with four places."""
    return NOTHING if value is None else f"{value:.4f}"


def usd(value: float | None) -> str:
    """An amount of money: cents, or four places below a dollar."""
    if value is None:
        return NOTHING
    return f"${value:,.2f}" if abs(value) >= 1 else f"${value:.4f}"


def moment(unix_seconds: float) -> str:
    """A time of day, UTC."""
    return datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _count(x: float) -> str:
    return f"{x:g}"


FILTERS: Sequence[Callable[..., str]] = (duration, size, percent, number, fixed, usd, moment)


def templates() -> Environment:
    """The page's and the report's templates, every text escaped, with the formats above as filters."""
    environment = Environment(
        loader=PackageLoader("idletrain.observe"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {shown.__name__: shown for shown in FILTERS}
    environment.globals |= {"charts_of": run_charts, "stack_of": stack}
    return environment


def _kind(cause: str) -> str:
    """A cause as a class of the style sheet."""
    return cause if cause in CAUSES else "kill"
