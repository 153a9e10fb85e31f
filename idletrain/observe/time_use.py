"""Where the workers' time goes: every second of every worker in a round, by what it was for. Pure, from a run's events.

compute  local steps that count
push     an update on its way to the store, until it is durable
pull     a subnet on its way from the store
control  there is a subnet for the worker: its lease is on the way, or the worker gets ready
lost     attempts that came to nothing, without the steps that were kept
commit   the updates go into the network
look     all is staged, but the committed network is still being evaluated or written
wait     there is no subnet left for the worker: it waits for the slowest
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from idletrain.observe.records import Record

# Where a worker does two at a time, its second counts as the first of these; what is left is the wait.
TIME_PARTS = ("compute", "push", "pull", "control", "lost", "commit", "evaluate", "wait")
ROUND_PARTS = ("pull", "compute", "push", "commit")  # of its seconds, one behind the other: forecast and measured
OUTSIDE_ROUNDS = "outside committed rounds"  # before the first, while a head was away, behind the last
Span = tuple[float, float]  # from and to, in seconds of the head's clock


@dataclass(frozen=True)
class RoundTimes:
    """A committed round.

    Attributes:
        number: From 0.
        seconds: How long it took.
        worker_seconds: By part, summed over the workers that were there; together, the time that they were.
        bytes_down: Payload from the store to the workers.
        bytes_up: Payload from the workers to the store.
        down_seconds: The time in which at least one worker pulled.
        up_seconds: The time in which at least one worker pushed.
    """

    number: int
    seconds: float
    worker_seconds: Mapping[str, float]
    bytes_down: int
    bytes_up: int
    down_seconds: float
    up_seconds: float


@dataclass
class AttemptTimes:
    """A lease: who held it, from when to when on the head's clock, and what it reported of its time."""

    worker: str
    leased: float
    until: float | None = None
    lost: bool = False
    kept_seconds: float = 0.0
    report: Mapping[str, float] = field(default_factory=dict)

    def spans(self, end: float) -> dict[str, Span]:
        """Its parts, in their order; `end` is that of all events. What was reported beyond the lease is left out."""
        until = max(self.leased, end if self.until is None else self.until)
        left = until - self.leased
        if self.lost and not self.report:
            kept = self.leased + min(left, self.kept_seconds)
            return {"compute": (self.leased, kept), "lost": (kept, until)}
        seconds = {}
        for part in ("compute", "pull", "push", "turn", "hold"):
            seconds[part] = min(left, self.report.get(part, 0.0))
            left -= seconds[part]
        pulling = self.leased + left
        pulled = pulling + seconds["pull"]
        computing = pulled + seconds["turn"]  # another subnet trained meanwhile
        pushing = computing + seconds["compute"]
        return {
            "control": (self.leased, pulling),
            "pull": (pulling, pulled),
            "compute": (computing, pushing),
            "push": (pushing + seconds["hold"], until),  # another was pulled meanwhile
        }


@dataclass
class HeadSession:
    """What one head told, on its clock and with its numbers of attempts.

    Attributes:
        there: Per worker, from when to when it was there.
        unleased: Per round and subnet, when it began to wait for a lease, and when it got one.
        staged: Per round, when its last update was durable.
    """

    alive: dict[str, Span] = field(default_factory=dict)
    attempts: dict[int, AttemptTimes] = field(default_factory=dict)
    unleased: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    staged: dict[int, float] = field(default_factory=dict)
    committed: list[Record] = field(default_factory=list)
    end: float = 0.0
    _opened: float = 0.0
    _lost: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, event: Record) -> None:
        """Take the next event."""
        now = self.end = event["s"]
        attempt = self.attempts.get(event.get("attempt", 0))
        match event["kind"]:
            case "worker_joined":
                self.alive[event["worker"]] = now, float("inf")
            case "worker_left":
                self._leave(event["worker"], now)
            case "leased":
                self.attempts[event["attempt"]] = AttemptTimes(event["worker"], now)
                since = self._lost.pop((event["round"], event["subnet"]), self._opened)
                self.unleased[event["round"]].append((since, now))
            case "lost" if attempt:
                attempt.lost, attempt.kept_seconds = True, event["kept_seconds"]
                self._lost[event["round"], event["subnet"]] = now
            case "staged":
                self.staged[event["round"]] = now
                if attempt and not attempt.lost:
                    attempt.until = now
                    attempt.report = attempt.report or {"compute": event["train_seconds"]}
            case "attempt_ended" if attempt:
                attempt.until = now if attempt.until is None else attempt.until
                self._report(attempt, event)
            case "round_committed":
                self._opened = now
                self.committed.append(event)

    def _leave(self, worker: str, now: float) -> None:
        self.alive[worker] = self.alive[worker][0], now
        for attempt in self.attempts.values():
            if attempt.worker == worker and attempt.until is None:
                attempt.until = now

    @staticmethod
    def _report(attempt: AttemptTimes, event: Record) -> None:
        """What a killed worker did, nobody knows; what a revoked one did is lost but for its marks."""
        if "train_seconds" in event and (not attempt.lost or event["ended"] == "drained"):
            reported = (
                ("compute", "train"),
                ("pull", "pull"),
                ("push", "push"),
                ("turn", "wait"),
                ("hold", "push_wait"),
            )
            attempt.report = {part: event.get(f"{name}_seconds", 0.0) for part, name in reported}


def round_times(events: Iterable[Record]) -> list[RoundTimes]:
    """What became of the workers' time in every committed round of a run, of one or more sittings."""
    sittings = [HeadSession()]
    for event in events:
        if event["kind"] == "run_started":
            sittings.append(HeadSession())
        sittings[-1].add(event)
    return [round_ for sitting in sittings for round_ in _rounds_of(sitting)]


def time_shares(events: Iterable[Record], alive_seconds: float) -> dict[str, float]:
    """What all of the workers' time went into, by `PARTS` and `OUTSIDE`; empty before there is any.

    Args:
        events: The run's.
        alive_seconds: Node-seconds that workers were there.
    """
    if alive_seconds <= 0:
        return {}
    committed = round_times(events)
    inside = {part: sum(r.worker_seconds[part] for r in committed) / alive_seconds for part in TIME_PARTS}
    return inside | {OUTSIDE_ROUNDS: 1.0 - sum(inside.values())}


def _rounds_of(session: HeadSession) -> Iterator[RoundTimes]:
    windows = [(event["s"] - event["seconds"], event["s"]) for event in session.committed]
    for event, window, busy in zip(session.committed, windows, _busy(session, windows), strict=True):
        number, begun = event["round"], event["s"] - event["commit_seconds"]
        idle = {
            "control": merged_spans(session.unleased[number]),
            "commit": [(begun, event["s"])],
            "evaluate": [(session.staged.get(number, begun), begun)],
        }
        total = dict.fromkeys(TIME_PARTS, 0.0)
        for worker, (since, until) in session.alive.items():
            there = (max(window[0], since), min(window[1], until))
            for part, seconds in divided(there, busy[worker], idle).items():
                total[part] += seconds
        down, up = (
            sum(end - start for start, end in merged_spans(span for parts in busy.values() for span in parts[part]))
            for part in ("pull", "push")
        )
        yield RoundTimes(number, event["seconds"], total, event["bytes_down"], event["bytes_up"], down, up)


def _busy(session: HeadSession, windows: Sequence[Span]) -> list[dict[str, dict[str, list[Span]]]]:
    """Per window, by worker and part, what attempts did in it; one that was lost may reach into the next round's."""
    busy: list[dict[str, dict[str, list[Span]]]] = [defaultdict(lambda: defaultdict(list)) for _ in windows]
    ends = [until for _, until in windows]
    for attempt in session.attempts.values():
        spans = attempt.spans(session.end)
        until = max(end for _, end in spans.values())
        for number in range(bisect.bisect_right(ends, attempt.leased), len(windows)):
            since, by = windows[number]
            if since >= until:
                break
            for part, (start, end) in spans.items():
                if start < by and end > since:
                    busy[number][attempt.worker][part].append((max(start, since), min(end, by)))
    return busy


def divided(alive: Span, busy: Mapping[str, Sequence[Span]], idle: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """A worker's seconds by part: what its attempts did first, in the order of PARTS, then why it had none.

    Args:
        there: When it was there.
        busy: By part, what its attempts did.
        idle: By part, what a worker without an attempt waits for.
    """
    seconds = dict.fromkeys(TIME_PARTS, 0.0)
    free = [alive] if alive[0] < alive[1] else []
    for spans_by_part in (busy, idle):
        for part in TIME_PARTS:
            before = _length(free)
            for span in spans_by_part.get(part, ()):
                free = _without(free, span)
            seconds[part] += before - _length(free)
    seconds["wait"] += _length(free)
    return seconds


def merged_spans(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _without(spans: Iterable[Span], taken: Span) -> list[Span]:
    rest = ((s, e) for start, end in spans for s, e in ((start, min(end, taken[0])), (max(start, taken[1]), end)))
    return [(start, end) for start, end in rest if start < end]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
