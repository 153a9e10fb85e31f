"""What a round was expected to take beside what it took, by part, in its own record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from idletrain.observe.records import Record


class ForecastTracker:
    """Adds `measured` and, where there is a forecast, `expected` to the records of rounds, before they are written.

    Compute is the busiest worker's. What a round took beyond that and its commit is divided between pulls and pushes as
    the workers' own accounts are, so that the parts add up to the round.

    Args:
        expected: Seconds of a round by part, or None.
        why: What there is to say of the settings.
    """

    def __init__(self, expected: Mapping[str, float] | None = None, why: Sequence[str] = ()) -> None:
        self._expected, self._why, self._forecast = expected, tuple(why), expected is not None
        self._compute: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._moved: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._committed = -1

    def recall(self, event: Record) -> None:
        """Take what an earlier sitting of the run expected, unless this one has a forecast of its own."""
        if event["kind"] == "run_started" and "expected" in event and not self._forecast:
            self._expected, self._why = event["expected"], tuple(event["why"])

    def __call__(self, event: Record) -> None:
        """Take the next event, and complete it."""
        match event["kind"]:
            case "run_started" if self._expected:
                event |= {"expected": dict(self._expected), "why": list(self._why)}
            case "staged":
                self._compute[event["round"]][event["worker"]] += event["train_seconds"]
            case "attempt_ended" if event["round"] > self._committed:  # the last may come behind its round
                moved = self._moved[event["round"]]
                moved[0] += event.get("pull_seconds", 0.0)
                moved[1] += event.get("push_seconds", 0.0)
            case "round_committed":
                if self._expected:
                    event["expected"] = dict(self._expected)
                event["measured"] = self._measured(event)

    def _measured(self, event: Record) -> dict[str, float]:
        number = self._committed = event["round"]
        compute = min(max(self._compute.pop(number, {}).values(), default=0.0), event["seconds"])
        left = max(0.0, event["seconds"] - compute - event["commit_seconds"])
        pull, push = self._moved.pop(number, [0.0, 0.0])
        share = pull / (pull + push) if pull + push else 0.5
        return {
            "pull": left * share,
            "compute": compute,
            "push": left * (1 - share),
            "commit": event["commit_seconds"],
        }
