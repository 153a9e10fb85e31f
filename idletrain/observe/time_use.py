"""Divide every second of every worker in a round by its purpose. Pure, from a run's events.

compute   local steps whose update is committed
push      an update travels to the store, until it is durable
pull      a subnet travels from the store
control   the worker's lease is on its way, or the worker prepares to train
lost      attempts that failed, without the steps that were kept
commit    the head adds the updates to the network
evaluate  all updates are staged, but the network of the last commit is still being evaluated or written
wait      there is no subnet left for the worker: it waits for the slowest
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from idletrain.observe.records import Record

# A second in which a worker does two of these counts as the first of them; the rest is `wait`.
TIME_PARTS = ("compute", "push", "pull", "control", "lost", "commit", "evaluate", "wait")
OUTSIDE_ROUNDS = "outside committed rounds"  # before the first, after the last, and while there was no head
LOW_COMPUTE = 0.8  # share of the workers' time below which a person is told where the rest went
PURPOSES = {  # of the parts that train nothing, behind "21% "
    "push": "sending updates",
    "pull": "receiving subnets",
    "control": "waiting for the head",
    "lost": "on steps that were lost",
    "commit": "waiting for commits",
    "evaluate": "waiting for evaluations",
    "wait": "waiting for other workers",
    OUTSIDE_ROUNDS: "before the first round and after the last",
}
Span = tuple[float, float]  # start and end, in seconds of the head's clock


@dataclass(frozen=True)
class RoundTimes:
    """A committed round.

    Attributes:
        number: The round's number, from 0.
        seconds: Length of the round.
        worker_seconds: Seconds of all workers by `TIME_PARTS`; their sum is the time that workers were alive.
        bytes_down: Payload from the store to the workers.
        bytes_up: Payload from the workers to the store.
        down_seconds: Time in which at least one worker pulled.
        up_seconds: Time in which at least one worker pushed.
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
    """One attempt: its worker, its start and end on the head's clock, and the times that the worker reported."""

    worker: str
    leased: float
    until: float | None = None
    lost: bool = False
    kept_seconds: float = 0.0
    report: Mapping[str, float] = field(default_factory=dict)

    def spans(self, end: float) -> dict[str, Span]:
        """Return its parts in their order; `end` is the last event's time. Reported time beyond the lease is cut."""
        until = max(self.leased, end if self.until is None else self.until)
        rest = until - self.leased
        if self.lost and not self.report:
            kept_until = self.leased + min(rest, self.kept_seconds)
            return {"compute": (self.leased, kept_until), "lost": (kept_until, until)}
        seconds = {}
        for part in ("compute", "pull", "push", "turn", "hold"):
            seconds[part] = min(rest, self.report.get(part, 0.0))
            rest -= seconds[part]
        pull_start = self.leased + rest
        pull_end = pull_start + seconds["pull"]
        compute_start = pull_end + seconds["turn"]  # the worker trains another subnet meanwhile
        compute_end = compute_start + seconds["compute"]
        return {
            "control": (self.leased, pull_start),
            "pull": (pull_start, pull_end),
            "compute": (compute_start, compute_end),
            "push": (compute_end + seconds["hold"], until),  # the worker pulls another subnet meanwhile
        }


@dataclass
class HeadSession:
    """The events of one head, on its clock and with its attempt numbers.

    Attributes:
        alive: By worker, when it joined and left.
        attempts: Attempts by number.
        unleased: By round, for each lease when its subnet began to wait for it and when it was given.
        staged: By round, when its last update was durable.
        committed: The `round_committed` events.
        rolling: Whether rounds are but a clock, and subnets are numbered by lane: then nobody waits for a round.
        end: Time of the last event.
    """

    alive: dict[str, Span] = field(default_factory=dict)
    attempts: dict[int, AttemptTimes] = field(default_factory=dict)
    unleased: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    staged: dict[int, float] = field(default_factory=dict)
    committed: list[Record] = field(default_factory=list)
    rolling: bool = False
    end: float = 0.0
    _opened: float = 0.0
    _lost: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, event: Record) -> None:
        """Add the next event."""
        now = self.end = event["s"]
        attempt = self.attempts.get(event.get("attempt", 0))
        match event["kind"]:
            case "run_started":
                self.rolling = event.get("policy") == "rolling"
            case "worker_joined":
                self.alive[event["worker"]] = now, float("inf")
            case "worker_left":
                self._leave(event["worker"], now)
            case "leased":
                self._lease(event, now)
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

    def _lease(self, event: Record, now: float) -> None:
        """Begin an attempt, and note for how long its subnet was without one; a backup's was not."""
        self.attempts[event["attempt"]] = AttemptTimes(event["worker"], now)
        if not event.get("backup"):
            since = self._lost.pop((event["round"], event["subnet"]), self._opened)
            self.unleased[event["round"]].append((since, now))

    def _leave(self, worker: str, now: float) -> None:
        self.alive[worker] = self.alive[worker][0], now
        for attempt in self.attempts.values():
            if attempt.worker == worker and attempt.until is None:
                attempt.until = now

    @staticmethod
    def _report(attempt: AttemptTimes, event: Record) -> None:
        """Store the times that the worker reported, unless its attempt was lost: then only a drained one's count."""
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
    """Return how the workers' time was spent in every committed round of a run with one or more head sessions."""
    sessions = [HeadSession()]
    for event in events:
        if event["kind"] == "run_started":
            sessions.append(HeadSession())
        sessions[-1].add(event)
    return [round_ for session in sessions for round_ in _rounds_of(session)]


def time_shares(events: Iterable[Record], alive_seconds: float) -> dict[str, float]:
    """Return shares of the workers' whole time by `TIME_PARTS` and `OUTSIDE_ROUNDS`; empty if there is none.

    Args:
        events: The run's events.
        alive_seconds: Seconds that workers were alive, of all together.
    """
    if alive_seconds <= 0:
        return {}
    committed = round_times(events)
    inside = {part: sum(r.worker_seconds[part] for r in committed) / alive_seconds for part in TIME_PARTS}
    return inside | {OUTSIDE_ROUNDS: 1.0 - sum(inside.values())}


def why_low(shares: Mapping[str, float], workers: int = 0, cores: int | None = None) -> str:
    """Return where most of the time went that trained nothing, as a phrase; empty if nearly all of it trained.

    Args:
        shares: Of the workers' time, as `time_shares` returns them.
        workers: How many work at the same time.
        cores: Cores of the one machine that they are on; None if they are on several.
    """
    if not shares or shares.get("compute", 0.0) >= LOW_COMPUTE:
        return ""
    part = max(PURPOSES, key=lambda name: shares.get(name, 0.0))
    crowd = f": {workers} workers on {cores} cores" if cores is not None and workers > cores else ""
    return f"{shares.get(part, 0.0):.0%} {PURPOSES[part]}{crowd}"


def _rounds_of(session: HeadSession) -> Iterator[RoundTimes]:
    windows = [(event["s"] - event["seconds"], event["s"]) for event in session.committed]
    for event, window, busy in zip(session.committed, windows, _busy(session, windows), strict=True):
        number, commit_start = event["round"], event["s"] - event["commit_seconds"]
        in_round = {
            "control": merged_spans(session.unleased[number]),
            "commit": [(commit_start, event["s"])],
            "evaluate": [(session.staged.get(number, commit_start), commit_start)],
        }
        idle = {} if session.rolling else in_round
        total = dict.fromkeys(TIME_PARTS, 0.0)
        for worker, (since, until) in session.alive.items():
            alive = (max(window[0], since), min(window[1], until))
            for part, seconds in divided(alive, busy[worker], idle).items():
                total[part] += seconds
        down, up = (
            sum(end - start for start, end in merged_spans(span for parts in busy.values() for span in parts[part]))
            for part in ("pull", "push")
        )
        yield RoundTimes(number, event["seconds"], total, event["bytes_down"], event["bytes_up"], down, up)


def _busy(session: HeadSession, windows: Sequence[Span]) -> list[dict[str, dict[str, list[Span]]]]:
    """Return for each window the attempts' spans by worker and part; a lost attempt may reach into the next round."""
    busy: list[dict[str, dict[str, list[Span]]]] = [defaultdict(lambda: defaultdict(list)) for _ in windows]
    ends = [until for _, until in windows]
    for attempt in session.attempts.values():
        spans = attempt.spans(session.end)
        until = max(end for _, end in spans.values())
        for number in range(bisect.bisect_right(ends, attempt.leased), len(windows)):
            window_start, window_end = windows[number]
            if window_start >= until:
                break
            for part, (start, end) in spans.items():
                if start < window_end and end > window_start:
                    busy[number][attempt.worker][part].append((max(start, window_start), min(end, window_end)))
    return busy


def divided(alive: Span, busy: Mapping[str, Sequence[Span]], idle: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """Return a worker's seconds by part: first its attempts in the order of `TIME_PARTS`, then why it had none.

    Args:
        alive: When the worker was alive.
        busy: By part, the spans of its attempts.
        idle: By part, the spans in which a worker without an attempt waits for that part.
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
    """Return the union of spans as disjoint spans, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _without(spans: Iterable[Span], cut: Span) -> list[Span]:
    rest = ((s, e) for start, end in spans for s, e in ((start, min(end, cut[0])), (max(start, cut[1]), end)))
    return [(start, end) for start, end in rest if start < end]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
