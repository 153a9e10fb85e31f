"""What a round will take on a fleet, and with which settings a job gets on fastest. Pure.

A round is a pull, local steps, a push and a commit. Nodes pull in turns, as many at once as it takes to fill the head's
link, and push likewise (`exchange.admission`; TCP): who pulled first computes and pushes while others still pull. With
more subnets than nodes, a worker pulls the next and pushes the last while one trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from idletrain.exchange.admission import MIN_HOLDERS
from idletrain.observe.time_use import ROUND_PARTS

# Local steps between two exchanges that are tried, and beyond which accuracy suffers: the most that paid in
# benchmarks/candidates.py (INTERVALS, IST_INTERVALS; results/time_to_accuracy.json).
TRIED_STEPS = (1, 2, 5, 10, 25, 50, 100)
MAX_STEPS = {"ist": 100, "local-sgd": 50}
# Local steps that subnets need where the whole network needs one, to the same accuracy: as many as there are subnets,
# beyond three only as their root grows (results/time_to_accuracy.json: two 1,600 to 800, four 2,400 to 600, eight 1,000
# to 200; results/planned.json: sixteen take 1.3 to 1.5 times the rounds of eight).
ROOT_FROM = 3
AMORTISED = 0.2  # of a round: more steps than leave that to the exchange gain less than a fifth
CODED_BYTES_PER_SECOND = 0.6e9  # of float32, encoded and decoded (int8; results/codec.json); each end does one of them
WIRES = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("int8", "int4"))  # pull and push, the most exact first
WORTH = 1.1  # times faster: less is within what a forecast may be wrong by, and the more exact or simpler is taken


@dataclass(frozen=True)
class FleetFigures:
    """Nodes and the way between them and the head; rates in bytes a second of payload.

    Attributes:
        down: What one node alone pulls at.
        up: What it pushes at.
        down_all: What all of them together pull at.
        up_all: What they push at.
        call_seconds: From the head to a worker and back, through the scheduler.
        commit_bytes_per_second: At which the head writes and reads updates.
        memory_bytes: That every node has for a subnet.
        step_seconds: Of a local step on the slowest node while all compute, by the `key_of` its way to train.
    """

    nodes: int
    down: float
    up: float
    down_all: float
    up_all: float
    call_seconds: float
    commit_bytes_per_second: float
    memory_bytes: int
    step_seconds: Mapping[str, float] = field(default_factory=dict)

    def sharing_cores(self, times: float) -> FleetFigures:
        """The same where so many times the nodes share a machine's cores."""
        return replace(self, step_seconds={way: seconds * times for way, seconds in self.step_seconds.items()})


def slowest(paces: Iterable[tuple[str, float]]) -> float:
    """Seconds of a step on the slowest processor, by what every node's steps took on which.

    Nodes that share one end together, whatever each had of it while it was looked at: what one that is done leaves, the
    others take.
    """
    shared: dict[str, list[float]] = {}
    for processor, seconds in paces:
        shared.setdefault(processor, []).append(seconds)
    return max(statistics.harmonic_mean(each) for each in shared.values())


def option_key(method: str, subnets: int) -> str:
    """A way to train, as far as it makes a step's time."""
    return f"{method} {subnets}"


@dataclass(frozen=True)
class TrainingOption:
    """One way to train: settings, and what a subnet of them costs.

    Attributes:
        down_bytes: Of the largest subnet, as it travels.
        up_bytes: Likewise.
        plain_bytes: Of it in float32.
        step_seconds: Of one local step on the slowest node while all compute.
    """

    method: str
    subnets: int
    pull: str
    push: str
    down_bytes: int
    up_bytes: int
    plain_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class RoundForecast:
    """Seconds of a round on its critical path, by part."""

    pull: float
    compute: float
    push: float
    commit: float

    @property
    def round(self) -> float:
        """Of all parts."""
        return self.pull + self.compute + self.push + self.commit

    @property
    def exchange_share(self) -> float:
        """Of a round, what is no compute."""
        return 1 - self.compute / self.round

    def as_record(self) -> dict[str, float]:
        """By part, as events hold it."""
        return {part: round(getattr(self, part), 6) for part in ROUND_PARTS}


@dataclass(frozen=True)
class AutotuneChoice:
    """Settings, what they are expected to take, and why they were taken, in sentences."""

    option: TrainingOption
    local_steps: int
    expected: RoundForecast
    why: tuple[str, ...]

    @property
    def name(self) -> str:
        """The method as people call it."""
        return "data parallel" if is_data_parallel(self.option.method, self.local_steps) else self.option.method


def is_data_parallel(method: str, local_steps: int) -> bool:
    """Whether whole networks are averaged after every step: gradients would come to the same."""
    return method == "local-sgd" and local_steps == 1


def forecast_round(option: TrainingOption, local_steps: int, fleet: FleetFigures) -> RoundForecast:
    """The seconds of a round."""
    active = min(option.subnets, fleet.nodes)
    turns = -(-option.subnets // fleet.nodes)
    down = _link_seconds(option.down_bytes, option.pull, option.plain_bytes, active, fleet.down, fleet.down_all)
    up = _link_seconds(option.up_bytes, option.push, option.plain_bytes, active, fleet.up, fleet.up_all)
    compute = local_steps * option.step_seconds
    commit = option.subnets * option.plain_bytes / fleet.commit_bytes_per_second + fleet.call_seconds
    # The slower way is busy from one end to the other; of the other, the first turn or the last stands alone.
    exchange = max(down.all + up.one, down.one + up.all) + fleet.call_seconds
    # Between the first pull and the last push, each turn takes what is longer.
    exchange += (turns - 1) * max(0.0, down.all - compute, up.all - compute)
    share = down.all / (down.all + up.all)
    return RoundForecast(exchange * share, turns * compute, exchange * (1 - share), commit)


class _LinkSeconds(NamedTuple):
    """Seconds until the first nodes, and until all, have moved a subnet."""

    one: float
    all: float


def _link_seconds(size: int, kind: str, plain: int, active: int, alone: float, together: float) -> _LinkSeconds:
    coded = 0.0 if kind == "fp32" else plain / CODED_BYTES_PER_SECOND / 2  # at either end
    at_once = min(active, max(MIN_HOLDERS, round(together / alone)))
    one, every = (max(size / alone, nodes * size / together) + (1 + nodes) * coded for nodes in (at_once, active))
    return _LinkSeconds(one, every)


def min_steps(option: TrainingOption, fleet: FleetFigures, allowed: Sequence[int]) -> int:
    """The fewest local steps that leave no more than a fifth of a round to the exchange, or the most there are."""
    most = MAX_STEPS[option.method]
    few = [steps for steps in sorted(allowed) if steps <= most] or [min(allowed)]
    return next((s for s in few if forecast_round(option, s, fleet).exchange_share <= AMORTISED), few[-1])


def progress(option: TrainingOption, local_steps: int, fleet: FleetFigures) -> float:
    """Steps of the whole network a second that a way to train is worth."""
    subnets = option.subnets
    each = 1 / min(subnets, math.sqrt(ROOT_FROM * subnets)) if option.method == "ist" else 1.0
    return local_steps * each / forecast_round(option, local_steps, fleet).round


def choose_option(
    options: Iterable[TrainingOption], fleet: FleetFigures, allowed: Sequence[int] = TRIED_STEPS
) -> AutotuneChoice:
    """The way to train that gets on fastest.

    Args:
        options: What the job leaves open, the simplest and most exact first: a later one has to be worth it.
        fleet: Where it trains.
        allowed: Numbers of local steps.
    """
    best: tuple[TrainingOption, int] | None = None
    tried: dict[str, float] = {}
    wires: set[tuple[str, str]] = set()
    for option in options:
        wires.add((option.pull, option.push))
        steps = min_steps(option, fleet, allowed)
        pace = progress(option, steps, fleet)
        tried[option.method] = max(pace, tried.get(option.method, 0.0))
        if best is None or pace > WORTH * progress(*best, fleet):
            best = option, steps
    assert best is not None
    option, steps = best
    bare = AutotuneChoice(option, steps, forecast_round(option, steps, fleet), ())
    return replace(bare, why=tuple(_reasons(bare, fleet, tried, wires)))


def _reasons(
    choice: AutotuneChoice, fleet: FleetFigures, tried: dict[str, float], wires: set[tuple[str, str]]
) -> Iterable[str]:
    option, share = choice.option, choice.expected.exchange_share
    ranked = sorted(tried.items(), key=lambda item: -item[1])
    if len(ranked) > 1:
        others = ", ".join(
            f"{pace / tried[option.method]:.2g} x by {name}" for name, pace in ranked if name != option.method
        )
        yield f"{choice.name}: the most steps' worth a second ({others})"
    over = "no more than" if share <= AMORTISED else "still"
    yield f"{choice.local_steps} local steps: {over} {share:.0%} of a round goes to the exchange"
    kept = "" if option.subnets <= fleet.nodes else ", of which some wait: pulls and pushes overlap compute"
    yield f"{option.subnets} subnets on {fleet.nodes} nodes{kept}"
    if len(wires) == 1:
        yield f"parameters travel as {option.pull} down and {option.push} up: the job or the memory leaves no other way"
    elif (option.pull, option.push) == WIRES[0]:
        yield "parameters travel as they are: coding them would save too little"
    else:
        saved = 1 - (option.down_bytes + option.up_bytes) / (2 * option.plain_bytes)
        yield f"parameters travel as {option.pull} down and {option.push} up: {saved:.0%} fewer bytes on a slow link"


def training_settings(choice: AutotuneChoice) -> dict[str, Any]:
    """A choice as the job file's `training` says it."""
    option = choice.option
    return {
        "method": option.method,
        "subnets": option.subnets,
        "local_steps": choice.local_steps,
        "exchange": {"pull": option.pull, "push": option.push},
    }
