"""Read what a run's write-ahead log says: the rounds committed and planned, and the updates staged for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from idletrain.errors import RunError, reading
from idletrain.nn.ist.schemes import SubnetSpec
from idletrain.rounds.durable import snapshots, updates, write_ahead_log
from idletrain.rounds.durable.updates import StagedUpdate

FORMAT = 3  # of write-ahead log and updates; 2 had shares in place of specs; 1 had updates whose sums were not scaled
FORMER_LOG = "ledger"  # where format 1 had its write-ahead log


@dataclass(frozen=True)
class LateUpdate:
    """Late rows of an update of round `of`, as a change on disk; numbered through the run."""

    number: int
    of: int
    change: StagedUpdate


@dataclass(frozen=True)
class KeptScore:
    """The score of an evaluation, None where it is no number, and whether it was the best then."""

    score: float | None
    best: bool


@dataclass(frozen=True)
class RolledUpdate:
    """An update that was committed by itself, in a lane; it lies in the update file of round `round`."""

    round: int
    update: StagedUpdate


@dataclass(frozen=True)
class History:
    """The content of a write-ahead log.

    Attributes:
        epochs: Heads that the run has had.
        rounds: Number of committed rounds.
        specs: Per round, its subnets as they were planned.
        staged: Per round, the durable updates by subnet.
        steps: Per committed round, the local steps of every subnet in it.
        late_updates: Per round, the late rows that its commit adds; for the open round, all that were recorded.
        late_count: Late updates recorded so far.
        scores: Per metric that chose the best network, the scores by the number of rounds done.
        damage: What is wrong with the log behind these records, or an empty string.
        status: How the run ended, or None.
        planned: Per phase, the subnets of its rounds as an earlier head planned them; empty without phases.
        is_rolling: Whether each subnet is committed by itself (`nn.rolling`).
        rolled: The updates that were committed so, by the number of those before.
    """

    epochs: int
    rounds: int
    specs: dict[int, tuple[SubnetSpec, ...]]
    staged: dict[int, dict[int, StagedUpdate]]
    steps: dict[int, dict[int, int]]
    late_updates: dict[int, list[LateUpdate]]
    late_count: int
    status: str | None
    params_sha256: str | None
    scores: dict[str, dict[int, KeptScore]] = field(default_factory=dict)
    damage: str = ""
    planned: tuple[tuple[SubnetSpec, ...], ...] = ()
    is_rolling: bool = False
    rolled: dict[int, RolledUpdate] = field(default_factory=dict)

    @property
    def lanes(self) -> tuple[SubnetSpec, ...]:
        """Return the specs of a rolling run's lanes, which never change; empty before its first head has begun."""
        return next(iter(self.specs.values()), ())

    def best_round(self, metric: str | None) -> int | None:
        """Return the round after which the network was the best by a metric; None if there is none."""
        return max((round_ for round_, kept in self.scores.get(metric or "", {}).items() if kept.best), default=None)


def collect(records: Sequence[write_ahead_log.LogRecord]) -> History:
    """Collect the records of a write-ahead log.

    Raises:
        RunError: The log has another format.
        DamageError: A record has not the fields of its kind.
    """
    with reading("the write-ahead log", "open the run with the idletrain that wrote it, or start again"):
        return _collected(records)


def _collected(records: Sequence[write_ahead_log.LogRecord]) -> History:
    epochs, rounds, late_count, status, params = 0, 0, 0, None, None
    specs: dict[int, tuple[SubnetSpec, ...]] = {}
    planned: tuple[tuple[SubnetSpec, ...], ...] = ()
    staged: dict[int, dict[int, StagedUpdate]] = {}
    steps: dict[int, dict[int, int]] = {}
    late_updates: dict[int, list[LateUpdate]] = {}
    for record in records:
        kind, round_ = record["kind"], record.get("round", 0)
        rounds = record.get("rounds", rounds)
        if kind == "epoch":
            _check_format(record)
            epochs, status, params = record["epoch"], None, None
            specs[round_] = _specs(record["subnets"])
            planned = tuple(map(_specs, record.get("phases", ())))
            if record["drop"]:
                staged.pop(round_, None)
        elif kind == "stage":
            staged.setdefault(round_, {})[record["subnet"]] = _staged(record)
        elif kind == "late_rows":
            late_updates.setdefault(round_, []).append(LateUpdate(record["number"], record["of"], _staged(record)))
            late_count = record["number"]
        elif kind == "commit":
            rounds, steps[round_] = round_ + 1, dict(record["staged"])
            numbers = record.get("late_updates", ())
            late_updates[round_] = [late for late in late_updates.get(round_, ()) if late.number in numbers]
            specs[round_ + 1] = _specs(record["next_subnets"])
        elif kind == "restored":
            rounds = round_
            for held in (staged, steps, late_updates):
                _forget(held, round_)
        elif kind == "end":
            status, params = record["status"], record["params_sha256"]
    return History(
        epochs,
        rounds,
        specs,
        staged,
        steps,
        late_updates,
        late_count,
        status,
        params,
        _scores(records),
        planned=planned,
        is_rolling=any(record.get("rolling") for record in records if record["kind"] == "epoch"),
        rolled=_rolled(records),
    )


def _rolled(records: Sequence[write_ahead_log.LogRecord]) -> dict[int, RolledUpdate]:
    """Return the updates that were committed by themselves, by the number of those before, without lost ones."""
    rolled: dict[int, RolledUpdate] = {}
    for record in records:
        if record["kind"] == "rolled":
            rolled[record["number"]] = RolledUpdate(record["round"], _staged(record))
        elif record["kind"] == "restored":
            _forget(rolled, record.get("updates", 0))
    return rolled


def _scores(records: Sequence[write_ahead_log.LogRecord]) -> dict[str, dict[int, KeptScore]]:
    """Return the scores by metric and round: of an evaluation that was repeated the last, of lost rounds none."""
    scores: dict[str, dict[int, KeptScore]] = {}
    for record in records:
        if record["kind"] == "evaluated":
            by_round = scores.setdefault(record["metric"], {})
            by_round[record["round"]] = KeptScore(record["score"], record["best"])
        elif record["kind"] == "restored":
            for by_round in scores.values():
                _forget(by_round, record["round"] + 1)
    return scores


def _check_format(record: write_ahead_log.LogRecord) -> None:
    if record.get("format") != FORMAT:
        raise RunError(
            f"the run was written by an idletrain with another format ({record.get('format', 1)}, this one "
            f"reads {FORMAT}); open it with that version, or start again under another name"
        )


def _forget(by_number: dict[int, Any], first: int) -> None:
    """Remove what is known of round, or update, `first` and later ones."""
    for number in [number for number in by_number if number >= first]:
        del by_number[number]


def _specs(planned: Sequence[Mapping[str, Any]]) -> tuple[SubnetSpec, ...]:
    return tuple(SubnetSpec(**spec) for spec in planned)


def _staged(record: write_ahead_log.LogRecord) -> StagedUpdate:
    return StagedUpdate(*(record[field] for field in ("subnet", "steps", "offset", "size_bytes", "checksum")))


def former_format(run_dir: Path) -> str | None:
    """Return a sentence if an idletrain of format 1 wrote the run, else None."""
    if not (run_dir / FORMER_LOG).exists():
        return None
    return (
        f"{run_dir} was written by an idletrain of format 1 and this one reads {FORMAT}; open it with that version, or "
        "start again under another name"
    )


def holds_run(run_dir: Path) -> bool:
    """Return whether a directory holds a run: its log, or without one its snapshots or updates."""
    return (run_dir / "wal").exists() or bool(snapshots.rounds(run_dir) or updates.rounds(run_dir))


def read_history(run_dir: Path) -> History:
    """Read the undamaged part of a run's write-ahead log, also while the run is going on.

    Raises:
        RunError: There is no such run, or the log cannot be read.
    """
    if fault := former_format(run_dir):
        raise RunError(fault)
    if not holds_run(run_dir):
        known = sorted(path.parent.name for path in run_dir.parent.glob("*/wal"))
        raise RunError(f"{run_dir} holds no run; in {run_dir.parent} there are: {', '.join(known) or 'none'}")
    log = write_ahead_log.read(run_dir / "wal")
    return replace(collect(log.records), damage=log.damage)
