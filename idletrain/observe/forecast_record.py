"""Add a round's forecast and its measured time, by part, to its record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from idletrain.observe.records import Record


class ForecastTracker:
    """Add `measured` and, with a forecast, `expected` to the records of rounds before they are written.

    Compute is the busiest worker's time. The rest of the round without its commit is divided between pull and push in
    the ratio that workers report, so that the parts add up to the round.

    Args:
        expected: Forecast seconds of a round by part, or None.
        why: The reasons for the chosen settings, as sentences.
    """

    def __init__(self, expected: Mapping[str, float] | None = None, why: Sequence[str] = ()) -> None:
        self._expected, self._why, self._forecast = expected, tuple(why), expected is not None
        self._compute: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._moved: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._committed = -1

    def recall(self, event: Record) -> None:
        """Take the forecast from an earlier head session's `run_started`, unless this one has its own forecast."""
        if event["kind"] == "run_started" and "expected" in event and not self._forecast:
            self._expected, self._why = event["expected"], tuple(event["why"])
        self._end_with_phase(event)

    def __call__(self, event: Record) -> None:
        """Add the forecast and measured times to the next event."""
        self._end_with_phase(event)
        match event["kind"]:
            case "run_started" if self._expected:
                event |= {"expected": dict(self._expected), "why": list(self._why)}
            case "staged":
                self._compute[event["round"]][event["worker"]] += event["train_seconds"]
            case "attempt_ended" if event["round"] > self._committed:  # the last may arrive after its round's commit
                moved = self._moved[event["round"]]
                moved[0] += event.get("pull_seconds", 0.0)
                moved[1] += event.get("push_seconds", 0.0)
            case "round_committed":
                if self._expected:
                    event["expected"] = dict(self._expected)
                event["measured"] = self._measured(event)

    def _end_with_phase(self, event: Record) -> None:
        """Drop the forecast where a later phase begins: it is of the first one's rounds."""
        if event["kind"] == "phase_started" and event["phase"] > 1:
            self._expected = None

    def _measured(self, event: Record) -> dict[str, float]:
        number = self._committed = event["round"]
        compute = min(max(self._compute.pop(number, {}).values(), default=0.0), event["seconds"])
        exchange = max(0.0, event["seconds"] - compute - event["commit_seconds"])
        pull, push = self._moved.pop(number, [0.0, 0.0])
        share = pull / (pull + push) if pull + push else 0.5
        return {
            "pull": exchange * share,
            "compute": compute,
            "push": exchange * (1 - share),
            "commit": event["commit_seconds"],
        }
