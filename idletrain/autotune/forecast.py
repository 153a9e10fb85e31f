"""Forecast the seconds of a round on a fleet, and find the settings with which a job trains fastest. Pure.

A round is a pull, local steps, a push and a commit. As many nodes pull at once as it takes to fill the head's link, and
likewise push (`exchange.admission`; TCP): the node that pulled first computes and pushes while others still pull. With
more subnets than nodes, a worker pulls the next subnet and pushes the last one while one trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from idletrain.exchange.admission import MIN_HOLDERS
from idletrain.observe.record_fields import ROUND_PARTS

# Numbers of local steps to try. The most of a method are those that paid off in benchmarks/sweep.py (SYNC_INTERVALS,
# IST_INTERVALS; results/time_to_accuracy.json); the fewest of ist those with which its loss is 1 to 2 % higher than
# with 50, where 10 cost 3 to 5 % (results/defaults.json): a subnet has to settle before it is cut again.
TRIED_STEPS = (1, 2, 5, 10, 25, 50, 100)
LEAST_STEPS = {"ist": 25, "local-sgd": 1}
MOST_STEPS = {"ist": 100, "local-sgd": 50}
# Local steps of a subnet that are worth one step of the whole network: as many as there are subnets, and beyond three
# subnets growing with the square root only (results/time_to_accuracy.json: two 1,050 to 550, four 1,600 to 400, eight
# 1,500 to 400; results/autotune.json: with 100 local steps, sixteen are not there in 1.5 times the time of eight). With
# every neuron in several of them, as if there were as many times fewer: in all of them they are whole networks.
ROOT_FROM = 3
AMORTISED = 0.2  # the exchange's share of a round, below which still more local steps gain less than a fifth
CODED_BYTES_PER_SECOND = 2.5e9  # float32 bytes encoded and decoded (int8 push; results/codec.json); each end does one
WIRES = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("int8", "int4"))  # pull and push, the most exact first
FINISH_SHARE = 0.2  # of the rounds of ist, the last ones, that train whole networks (benchmarks/finishing.py)
MOST_TIMES_LONGER = 1.5  # that a run may take for it: with 2.1 times the time, more rounds of ist learn more
WORTH = 1.1  # times faster to be preferred: less is within a forecast's error, so the simpler, more exact one stays


@dataclass(frozen=True)
class FleetFigures:
    """Measured speeds of a fleet; rates in bytes a second of payload.

    Attributes:
        nodes: Number of nodes.
        down: Rate at which one node alone pulls.
        up: Rate at which one node alone pushes.
        down_all: Rate at which all nodes together pull.
        up_all: Rate at which all nodes together push.
        call_seconds: Round trip from the head to a worker through the scheduler.
        commit_bytes_per_second: Rate at which the head writes and reads updates.
        memory_bytes: Memory that every node has for a subnet.
        step_seconds: Seconds of a local step on the slowest node while all compute, by `option_key`.
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
        """Return the figures with steps `times` as long, for nodes that share a machine's cores."""
        return replace(self, step_seconds={key: seconds * times for key, seconds in self.step_seconds.items()})


def slowest(paces: Iterable[tuple[str, float]]) -> float:
    """Return the seconds of a step on the slowest processor.

    Args:
        paces: Each node's processor, and the seconds of its steps.

    Nodes sharing a processor finish together: a node that finishes early leaves its time to the rest. So the harmonic
    mean of their steps counts.
    """
    shared: dict[str, list[float]] = {}
    for processor, seconds in paces:
        shared.setdefault(processor, []).append(seconds)
    return max(statistics.harmonic_mean(each) for each in shared.values())


def option_key(method: str, subnets: int) -> str:
    """Return the key of a step's time: the method and number of subnets, on which alone it depends."""
    return f"{method} {subnets}"


@dataclass(frozen=True)
class TrainingOption:
    """Training settings to choose from, and the cost of a subnet with them.

    Attributes:
        method: `ist` or `local-sgd`.
        subnets: Number of subnets.
        pull: Encoding of pulls.
        push: Encoding of pushes.
        down_bytes: Bytes of the largest subnet's pull, encoded.
        up_bytes: Bytes of the largest subnet's push, encoded.
        plain_bytes: Bytes of the largest subnet in float32.
        step_seconds: Seconds of one local step on the slowest node while all compute.
        copies: Subnets that have a neuron.
    """

    method: str
    subnets: int
    pull: str
    push: str
    down_bytes: int
    up_bytes: int
    plain_bytes: int
    step_seconds: float
    copies: int = 1


@dataclass(frozen=True)
class RoundForecast:
    """Seconds of a round on its critical path, by part."""

    pull: float
    compute: float
    push: float
    commit: float

    @property
    def round(self) -> float:
        """Seconds of all parts together."""
        return self.pull + self.compute + self.push + self.commit

    @property
    def exchange_share(self) -> float:
        """Share of a round that is not computation."""
        return 1 - self.compute / self.round

    def as_record(self) -> dict[str, float]:
        """Return the seconds by part, as a run's records hold them."""
        return {part: round(getattr(self, part), 6) for part in ROUND_PARTS}


class WholeRounds(NamedTuple):
    """Rounds at the end of ist that train whole networks: their option, and the forecast of one."""

    option: TrainingOption
    expected: RoundForecast


@dataclass(frozen=True)
class AutotuneChoice:
    """The chosen settings, the forecast of their round, and the reasons as sentences.

    Attributes:
        option: The settings.
        local_steps: Local steps of a round.
        expected: The forecast of a round.
        why: The reasons.
        finish: The last rounds, where they train whole networks.
    """

    option: TrainingOption
    local_steps: int
    expected: RoundForecast
    why: tuple[str, ...]
    finish: WholeRounds | None = None

    @property
    def name(self) -> str:
        """The method's name for people."""
        if is_data_parallel(self.option.method, self.local_steps):
            return "data parallel"
        copies = f" in {self.option.copies} copies" if self.option.copies > 1 else ""
        return f"{self.option.method}{copies}" + (f" with its last {FINISH_SHARE:.0%} whole" if self.finish else "")

    @property
    def round_seconds(self) -> float:
        """Seconds of a round, as the mean over the run."""
        return self._mean(lambda _option, expected: expected.round)

    @property
    def step_seconds(self) -> float:
        """Seconds of a subnet's local step, as the mean over the run."""
        return self._mean(lambda option, _expected: option.step_seconds)

    def _mean(self, of: Callable[[TrainingOption, RoundForecast], float]) -> float:
        before = of(self.option, self.expected)
        return (1 - FINISH_SHARE) * before + FINISH_SHARE * of(*self.finish) if self.finish else before

    @property
    def progress(self) -> float:
        """Steps of the whole network a second that it is worth by the forecast."""
        return _progress(self.option, self.local_steps, self.expected)


def is_data_parallel(method: str, local_steps: int) -> bool:
    """Return whether whole networks are averaged after every step, which equals averaging gradients."""
    return method == "local-sgd" and local_steps == 1


def forecast_round(option: TrainingOption, local_steps: int, fleet: FleetFigures) -> RoundForecast:
    """Forecast the seconds of a round by part."""
    active = min(option.subnets, fleet.nodes)
    turns = -(-option.subnets // fleet.nodes)
    down = _link_seconds(option.down_bytes, option.pull, option.plain_bytes, active, fleet.down, fleet.down_all)
    up = _link_seconds(option.up_bytes, option.push, option.plain_bytes, active, fleet.up, fleet.up_all)
    compute = local_steps * option.step_seconds
    commit = option.subnets * option.plain_bytes / fleet.commit_bytes_per_second + fleet.call_seconds
    # The slower direction is busy all the time; of the other one only the first or last transfer is not hidden by it.
    exchange = max(down.all + up.one, down.one + up.all) + fleet.call_seconds
    # Between the first pull and the last push, each turn takes the longer of transfers and computation.
    exchange += (turns - 1) * max(0.0, down.all - compute, up.all - compute)
    share = down.all / (down.all + up.all)
    return RoundForecast(exchange * share, turns * compute, exchange * (1 - share), commit)


class _LinkSeconds(NamedTuple):
    """Seconds until the first nodes, and until all, have moved a subnet."""

    one: float
    all: float


def _link_seconds(size: int, encoding: str, plain: int, active: int, alone: float, together: float) -> _LinkSeconds:
    codec_seconds = 0.0 if encoding == "fp32" else plain / CODED_BYTES_PER_SECOND / 2  # seconds at either end
    at_once = min(active, max(MIN_HOLDERS, round(together / alone)))
    one, every = (
        max(size / alone, nodes * size / together) + (1 + nodes) * codec_seconds for nodes in (at_once, active)
    )
    return _LinkSeconds(one, every)


def min_steps(option: TrainingOption, fleet: FleetFigures, allowed: Sequence[int]) -> int:
    """Return the fewest local steps whose rounds spend at most a fifth on the exchange, or else the most allowed.

    They are within what the method learns well with, unless the job allows no such number.
    """
    least, most = LEAST_STEPS[option.method], MOST_STEPS[option.method]
    candidates = [steps for steps in sorted(allowed) if least <= steps <= most] or [min(allowed)]
    return next((s for s in candidates if forecast_round(option, s, fleet).exchange_share <= AMORTISED), candidates[-1])


def progress(option: TrainingOption, local_steps: int, fleet: FleetFigures) -> float:
    """Return how many steps of the whole network a second an option is worth."""
    return _progress(option, local_steps, forecast_round(option, local_steps, fleet))


def _progress(option: TrainingOption, local_steps: int, expected: RoundForecast) -> float:
    subnets = option.subnets / option.copies
    step_worth = 1 / min(subnets, math.sqrt(ROOT_FROM * subnets)) if option.method == "ist" else 1.0
    return local_steps * step_worth / expected.round


def choose_option(
    options: Iterable[TrainingOption], fleet: FleetFigures, allowed: Sequence[int] = TRIED_STEPS
) -> AutotuneChoice:
    """Choose the option that makes the fastest progress.

    Args:
        options: What the job leaves open, the simplest and most exact first; a later one must be `WORTH` times faster.
        fleet: Speeds of the nodes.
        allowed: Numbers of local steps to try.
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
    choice = AutotuneChoice(option, steps, forecast_round(option, steps, fleet), ())
    return replace(choice, why=tuple(_reasons(choice, fleet, tried, wires)))


def in_copies(choice: AutotuneChoice, option: TrainingOption, fleet: FleetFigures) -> AutotuneChoice:
    """Return a choice of ist with every neuron in several subnets.

    Args:
        choice: The choice with every neuron in one.
        option: Its option in copies.
        fleet: Speeds of the nodes.
    """
    expected = forecast_round(option, choice.local_steps, fleet)
    times = expected.round / choice.expected.round
    reason = f"every neuron is in {option.copies} subnets of a round, which takes {times:.2g} x the time"
    return replace(choice, option=option, expected=expected, why=(*choice.why, reason))


def finished_whole(
    choice: AutotuneChoice, options: Iterable[TrainingOption], fleet: FleetFigures
) -> AutotuneChoice | None:
    """Return a choice of ist with whole networks in its last rounds; None if they fit no node with its encoding, or
    make the run too long.
    """
    wire = choice.option.pull, choice.option.push
    whole = next((o for o in options if o.method == "local-sgd" and (o.pull, o.push) == wire), None)
    if whole is None:
        return None
    whole = replace(whole, subnets=choice.option.subnets)
    finished = replace(choice, finish=WholeRounds(whole, forecast_round(whole, choice.local_steps, fleet)))
    times = finished.round_seconds / choice.round_seconds
    if times > MOST_TIMES_LONGER:
        return None
    reason = f"the last {FINISH_SHARE:.0%} of the rounds train whole networks, which takes {times:.2g} x the time"
    return replace(finished, why=(*choice.why, reason))


def _reasons(
    choice: AutotuneChoice, fleet: FleetFigures, tried: dict[str, float], wires: set[tuple[str, str]]
) -> Iterable[str]:
    option, share = choice.option, choice.expected.exchange_share
    ranked = sorted(tried.items(), key=lambda item: -item[1])
    if len(ranked) > 1:
        others = ", ".join(
            f"{name} {pace / tried[option.method]:.2g} times as much" for name, pace in ranked if name != option.method
        )
        yield f"{choice.name} makes the fastest progress ({others})"
    only = "only" if share <= AMORTISED else "still"
    yield f"{choice.local_steps} local steps: {only} {share:.0%} of a round goes to the exchange"
    queued = "" if option.subnets <= fleet.nodes else ", of which some wait: pulls and pushes overlap compute"
    yield f"{option.subnets} subnets on {fleet.nodes} nodes{queued}"
    if len(wires) == 1:
        yield f"pulls are sent as {option.pull}, pushes as {option.push}: the job or the memory allows no other"
    elif (option.pull, option.push) == WIRES[0]:
        yield "pulls and pushes are sent as fp32: encoding them would save too little"
    else:
        saved = 1 - (option.down_bytes + option.up_bytes) / (2 * option.plain_bytes)
        yield f"pulls are sent as {option.pull}, pushes as {option.push}: {saved:.0%} fewer bytes on a slow link"


def training_settings(choice: AutotuneChoice) -> dict[str, Any]:
    """Return a choice as fields of the job file's `training`."""
    option = choice.option
    return {
        "method": option.method,
        "subnets": option.subnets,
        "copies": option.copies,
        "local_steps": choice.local_steps,
        "finish_whole": FINISH_SHARE if choice.finish else 0.0,
        "exchange": {"pull": option.pull, "push": option.push},
    }
