"""Reads a run directory: the network after its last committed round, and the staged updates of the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from idletrain.errors import DamageError, RunError
from idletrain.job import Job
from idletrain.nn.ist.schemes import SubnetSpec
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.network import Network
from idletrain.nn.program import Program
from idletrain.rounds.durable import snapshots, updates, write_ahead_log
from idletrain.rounds.durable.updates import StagedUpdate

FORMAT = 3  # of write-ahead log and updates; 2 had shares in place of specs; 1 had updates whose sums were not scaled
FORMER_LOG = "ledger"  # where format 1 had its write-ahead log
logger = logging.getLogger(__name__)
SAY_ALL = "launch with --resume and a job file that says every setting of training by itself, which writes it again"
READ_TRIES = 3  # a run may prune a snapshot while another process reads it; two in a row take two minutes


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

    def best_round(self, metric: str | None) -> int | None:
        """Return the round after which the network was the best by a metric; None if there is none."""
        return max((round_ for round_, kept in self.scores.get(metric or "", {}).items() if kept.best), default=None)


@dataclass(frozen=True)
class Restored:
    """The newest sound state of a run.

    Attributes:
        network: The network.
        rounds: Rounds committed in it.
        note: Which rounds are lost by damage, as a sentence; empty if none are.
        damaged_snapshots: Rounds of newer snapshots that do not hold what was written.
    """

    network: Network
    rounds: int
    note: str = ""
    damaged_snapshots: tuple[int, ...] = ()


def history(records: Sequence[write_ahead_log.LogRecord]) -> History:
    """Collect the records of a write-ahead log.

    Raises:
        RunError: The log has another format.
    """
    epochs, rounds, late_count, status, params = 0, 0, 0, None, None
    specs: dict[int, tuple[SubnetSpec, ...]] = {}
    planned: tuple[tuple[SubnetSpec, ...], ...] = ()
    staged: dict[int, dict[int, StagedUpdate]] = {}
    steps: dict[int, dict[int, int]] = {}
    late_updates: dict[int, list[LateUpdate]] = {}
    for record in records:
        kind, round_ = record["kind"], record.get("round", 0)
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
    scores = _scores(records)
    return History(
        epochs, rounds, specs, staged, steps, late_updates, late_count, status, params, scores, planned=planned
    )


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


def _forget(by_round: dict[int, Any], first: int) -> None:
    """Remove what is known of round `first` and later ones."""
    for round_ in [round_ for round_ in by_round if round_ >= first]:
        del by_round[round_]


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
    return replace(history(log.records), damage=log.damage)


def read_job(run_dir: Path) -> Job:
    """Return the job that a run began with.

    Raises:
        RunError: Its record cannot be read.
        DamageError: It does not hold a job.
    """
    path = run_dir / "job.json"
    try:
        return Job.model_validate_json(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError):
        raise DamageError(f"{path} is missing; {SAY_ALL}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); fix that and try again") from None
    except ValueError:
        raise DamageError(f"{path} does not hold a job any more; {SAY_ALL}") from None


def load_network(run_dir: Path, program: Program) -> Restored:
    """Return the network after the last committed round, or the newest sound one before it.

    Raises:
        RunError: There is no such run, or a file of it cannot be read.
        DamageError: No snapshot of it is sound.
    """
    for tries_left in reversed(range(READ_TRIES)):
        try:
            restored = restore(run_dir, program, read_history(run_dir))
        except DamageError:
            if not tries_left:
                raise
        else:
            if not restored.note or not tries_left:
                return restored
    raise AssertionError("unreachable")


def load_result(run_dir: Path, program: Program, metric: str | None) -> Restored:
    """Return the network that a run gives: the best one by a metric, or without one that of its last committed round.

    Raises:
        RunError: There is no such run, or a file of it cannot be read.
        DamageError: No snapshot of it is sound.
    """
    note = ""
    for _ in range(READ_TRIES):
        past = read_history(run_dir)
        best = past.best_round(metric)
        if best is None or best == past.rounds:
            break
        network = Network.of(program)
        try:
            snapshots.load(run_dir, best, network)
        except DamageError as error:
            note = f"{error}; it was the best by {metric}, and the last network is taken in its place"
        else:
            return Restored(network, best)
    restored = load_network(run_dir, program)
    return replace(restored, note="; ".join(filter(None, (note, restored.note))))


def restore(run_dir: Path, program: Program, past: History) -> Restored:
    """Return the newest undamaged snapshot, brought up to the last committed round by the updates since.

    A damaged update ends that, and so does the log where it is damaged or missing: snapshots beyond it count all the
    same, as they are written after their rounds were committed.

    Raises:
        DamageError: No snapshot is sound.
        RunError: A file is there and cannot be read.
    """
    network = Network.of(program)
    damaged, damages = [], [past.damage] if past.damage else []
    for start in reversed(snapshots.rounds(run_dir)):
        try:
            snapshots.load(run_dir, start, network)
        except DamageError as error:
            logger.warning("%s; the snapshot before it is used", error)
            damaged.append(start)
            damages.append(str(error))
            continue
        reached = start
        try:
            while reached < past.rounds:
                replay(run_dir, program, network, past, reached)
                reached += 1
        except DamageError as error:
            damages.append(str(error))
        return Restored(network, reached, _lost_rounds(reached, past, start, damages), tuple(damaged))
    reasons = "; ".join(damages) or "there is no snapshot"
    raise DamageError(f"{run_dir}: no snapshot is sound ({reasons}); start the job again under another name")


def _lost_rounds(reached: int, past: History, start: int, damages: Sequence[str]) -> str:
    """Say what is lost between the state that was reached and the last committed round, if anything is."""
    if reached < past.rounds:
        which = f"round {reached} is" if reached + 1 == past.rounds else f"rounds {reached} to {past.rounds - 1} are"
        return f"{'; '.join(damages)}; {which} lost and --resume trains them again"
    if start > past.rounds or any("wal" in damage for damage in damages):
        reasons = "; ".join(damages) or "the write-ahead log ends before the newest snapshot"
        return f"{reasons}; the run counts as far as its newest sound snapshot, of round {reached}"
    return ""


def replay(run_dir: Path, program: Program, network: Network, past: History, round_: int) -> None:
    """Commit a round from its staged updates and late rows.

    Raises:
        DamageError: An update does not hold what was written; the network is as before.
    """
    late_updates = past.late_updates.get(round_, ())
    for late in late_updates:
        updates.read(updates.path_of(run_dir, round_), late.change)
    subnets = program.subnets(round_, past.specs[round_])
    copies = past.specs[round_][0].copies
    apply(run_dir, subnets, network, round_, past.staged[round_], past.steps[round_], copies)
    for late in late_updates:
        apply_late(run_dir, program, network, round_, late, past.specs, past.steps)


def apply(
    run_dir: Path,
    subnets: Sequence[Subnet],
    network: Network,
    round_: int,
    staged: dict[int, StagedUpdate],
    steps: dict[int, int],
    copies: int,
) -> None:
    """Write a round's staged updates into the network: the one place where parameters change.

    Args:
        run_dir: The run directory.
        subnets: The round's subnets.
        network: The network.
        round_: The round.
        staged: Its durable updates, by subnet.
        steps: The local steps in each that is taken, by subnet.
        copies: Number of its subnets that every neuron is in.

    Raises:
        DamageError: An update does not hold what was written; the network is as before.
    """
    path = updates.path_of(run_dir, round_)
    network.commit([(subnets[k], updates.read(path, staged[k]), steps[k]) for k in sorted(steps)], copies)


def apply_late(
    run_dir: Path,
    program: Program,
    network: Network,
    round_: int,
    late: LateUpdate,
    specs: dict[int, tuple[SubnetSpec, ...]],
    steps: dict[int, dict[int, int]],
) -> None:
    """Add late rows of an earlier round to the network; they lie in the update file of round `round_`.

    Raises:
        DamageError: The file does not hold what was written.
    """
    k, of = late.change.subnet, late.of
    if k not in steps[of]:  # the round ended without that update
        return
    change = updates.read(updates.path_of(run_dir, round_), late.change)
    subnet = program.subnet(of, program.places(specs[of])[k])
    network.add(subnet, change, steps[of][k] / sum(steps[of].values()))
