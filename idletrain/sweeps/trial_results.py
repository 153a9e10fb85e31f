"""Keep what a sweep's trials have come to, so that the same command goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from idletrain.errors import reading
from idletrain.observe.records import DONE_STATUSES
from idletrain.storage import write_whole

PRUNED, DIVERGED = "pruned", "diverged"
ENDED = (*DONE_STATUSES, PRUNED, DIVERGED)


@dataclass
class SweepResult:
    """What a trial has come to.

    Attributes:
        state: `waiting`, `running`, how its run ended, `pruned`, `stopped`, `failed`, or `not started`.
        reason: Why it failed or did not start.
        began: Whether its run has begun.
        values: Rounds and the watched value at each evaluation.
        record: The run's summary, once it has one.
        usd: What it has cost.
        settings: Those of its job that its values follow from, by their paths; empty before it begins.
        run_dir: The directory of its run; empty before it begins.
        rounds: Those of its whole run; 0 while they are not known.
    """

    state: str = "waiting"
    reason: str = ""
    began: bool = False
    values: list[tuple[int, float]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    usd: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    run_dir: str = ""
    rounds: int = 0

    @property
    def ended(self) -> bool:
        """Whether it needs no further run."""
        return self.state in ENDED

    @property
    def value(self) -> float | None:
        """The last watched value."""
        return self.values[-1][1] if self.values else None


class ResultsFile:
    """The results of a sweep's trials by their names, in a file.

    Args:
        path: The file; made with the first result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._others: dict[str, SweepResult] = {}

    def read(self, names: Sequence[str]) -> dict[str, SweepResult]:
        """Return the trials' results so far.

        Raises:
            DamageError: the file does not hold them.
        """
        with reading(self.path, "delete it and the runs of its trials to begin the sweep again"):
            content = self.path.read_bytes() if self.path.exists() else b"{}"
            self._others = parse_results(content, sorted(json.loads(content).keys() - set(names)))
            return parse_results(content, names)

    @property
    def usd_of_others(self) -> float:
        """What trials have cost that the sweep does not have any more."""
        return sum(result.usd for result in self._others.values())

    def names(self) -> list[str]:
        """Return the names of the trials that the file has results of; none where it is not there.

        Raises:
            DamageError: the file does not hold results.
        """
        with reading(self.path, "delete it and the runs of its trials to begin the sweep again"):
            return list(json.loads(self.path.read_bytes()).keys()) if self.path.exists() else []

    def write(self, results: Mapping[str, SweepResult]) -> None:
        """Replace these results; those of trials that the sweep had before stay."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: asdict(result) for name, result in {**self._others, **results}.items()}
        write_whole(self.path, json.dumps(kept).encode())


def parse_results(content: bytes, names: Sequence[str]) -> dict[str, SweepResult]:
    """Return the results of trials that a file holds; of those that it does not have, what one begins with."""
    stored = dict(json.loads(content).items())
    return {name: _result(stored[name]) if name in stored else SweepResult() for name in names}


def _result(stored: Mapping[str, Any]) -> SweepResult:
    values = [(int(rounds), float(value)) for rounds, value in stored["values"]]
    record = {str(name): value for name, value in stored["record"].items()}
    state, reason = str(stored["state"]), str(stored["reason"])
    usd, settings, rounds = float(stored["usd"]), dict(stored["settings"].items()), int(stored["rounds"])
    return SweepResult(
        state, reason, bool(stored["began"]), values, record, usd, settings, str(stored["run_dir"]), rounds
    )
