"""Reads a run directory: the network after its last committed round, and the staged updates of the next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from idletrain.errors import DamageError, RunError
from idletrain.nn.ist.partition import blocks
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.network import Network
from idletrain.nn.program import Program
from idletrain.rounds.durable import snapshots, updates, write_ahead_log
from idletrain.rounds.durable.updates import StagedUpdate

FORMAT = 2  # of write-ahead log and updates; 1 had updates whose sums were not scaled, in a file of another name
FORMER_LOG = "ledger"  # where format 1 had its write-ahead log
logger = logging.getLogger(__name__)
READ_TRIES = 3  # a run may prune a snapshot while another process reads it; two in a row take two minutes


@dataclass(frozen=True)
class LateUpdate:
    """Late rows of an update of round `of`, as a change on disk; numbered through the run."""

    number: int
    of: int
    change: StagedUpdate


@dataclass(frozen=True)
class History:
    """The content of a write-ahead log.

    Attributes:
        epochs: Heads that the run has had.
        shares: Per round, the subnets' shares of every group.
        staged: Per round, the durable updates by subnet.
        steps: Per committed round, the local steps of every subnet in it.
        late_updates: Per round, the late rows that its commit adds; for the open round, all that were recorded.
        late_count: Late updates recorded so far.
        status: How the run ended, or None.
    """

    epochs: int
    shares: dict[int, tuple[float, ...]]
    staged: dict[int, dict[int, StagedUpdate]]
    steps: dict[int, dict[int, int]]
    late_updates: dict[int, list[LateUpdate]]
    late_count: int
    status: str | None
    params_sha256: str | None

    @property
    def rounds(self) -> int:
        """Number of committed rounds."""
        return len(self.steps)


def history(records: Sequence[write_ahead_log.LogRecord]) -> History:
    """Collect the records of a write-ahead log.

    Raises:
        RunError: The log has another format.
    """
    epochs, late_count, status, params = 0, 0, None, None
    shares: dict[int, tuple[float, ...]] = {}
    staged: dict[int, dict[int, StagedUpdate]] = {}
    steps: dict[int, dict[int, int]] = {}
    late_updates: dict[int, list[LateUpdate]] = {}
    for record in records:
        kind, round_ = record["kind"], record.get("round", 0)
        if kind == "epoch":
            if record.get("format") != FORMAT:
                raise RunError(
                    f"the run was written by an idletrain with another format ({record.get('format', 1)}, this one "
                    f"reads {FORMAT}); open it with that version, or start again under another name"
                )
            epochs, status, params = record["epoch"], None, None
            shares[round_] = tuple(record["shares"])
            if record["drop"]:
                staged.pop(round_, None)
        elif kind == "stage":
            staged.setdefault(round_, {})[record["subnet"]] = _staged(record)
        elif kind == "late_rows":
            late_updates.setdefault(round_, []).append(LateUpdate(record["number"], record["of"], _staged(record)))
            late_count = record["number"]
        elif kind == "commit":
            steps[round_] = dict(record["staged"])
            numbers = record.get("late_updates", ())
            late_updates[round_] = [late for late in late_updates.get(round_, ()) if late.number in numbers]
            shares[round_ + 1] = tuple(record["next_shares"])
        elif kind == "end":
            status, params = record["status"], record["params_sha256"]
    return History(epochs, shares, staged, steps, late_updates, late_count, status, params)


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


def read_history(run_dir: Path) -> History:
    """Read the write-ahead log of a run, also while it is going on.

    Raises:
        RunError: There is no such run.
        DamageError: The log is damaged.
    """
    if fault := former_format(run_dir):
        raise RunError(fault)
    if not (run_dir / "wal").exists():
        known = sorted(path.parent.name for path in run_dir.parent.glob("*/wal"))
        raise RunError(f"{run_dir} holds no run; in {run_dir.parent} there are: {', '.join(known) or 'none'}")
    return history(write_ahead_log.read(run_dir / "wal").records)


def load_network(run_dir: Path, program: Program) -> tuple[Network, int]:
    """Return the network after the last committed round, and the number of committed rounds.

    Raises:
        RunError: There is no such run.
        DamageError: No snapshot leads there.
    """
    for tries_left in reversed(range(READ_TRIES)):
        try:
            past = read_history(run_dir)
            return restore(run_dir, program, past), past.rounds
        except DamageError:
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def restore(run_dir: Path, program: Program, past: History) -> Network:
    """Return the newest undamaged snapshot, brought up to the last committed round by the updates since.

    Raises:
        DamageError: No snapshot leads there.
    """
    network = Network.of(program)
    damaged: list[str] = []
    for start in reversed([r for r in snapshots.rounds(run_dir) if r <= past.rounds]):
        try:
            snapshots.load(run_dir, start, network)
            for round_ in range(start, past.rounds):
                replay(run_dir, program, network, past, round_)
        except DamageError as error:
            logger.warning("%s; the snapshot before it is used", error)
            damaged.append(str(error))
        else:
            return network
    reasons = "; ".join(damaged) or "there is no snapshot"
    raise DamageError(
        f"{run_dir}: no snapshot leads to round {past.rounds} ({reasons}); start again under another name"
    )


def replay(run_dir: Path, program: Program, network: Network, past: History, round_: int) -> None:
    """Commit a round from its staged updates and late rows.

    Raises:
        DamageError: An update does not hold what was written.
    """
    subnets = program.subnets(round_, past.shares[round_])
    apply(run_dir, subnets, network, round_, past.staged[round_], past.steps[round_])
    for late in past.late_updates.get(round_, ()):
        apply_late(run_dir, program, network, round_, late, past.shares, past.steps)


def apply(
    run_dir: Path,
    subnets: Sequence[Subnet],
    network: Network,
    round_: int,
    staged: dict[int, StagedUpdate],
    steps: dict[int, int],
) -> None:
    """Write a round's staged updates into the network: the one place where parameters change.

    Raises:
        DamageError: An update does not hold what was written; the network is as before.
    """
    path = updates.path_of(run_dir, round_)
    network.commit([(subnets[k], updates.read(path, staged[k]), steps[k]) for k in sorted(steps)])


def apply_late(
    run_dir: Path,
    program: Program,
    network: Network,
    round_: int,
    late: LateUpdate,
    shares: dict[int, tuple[float, ...]],
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
    subnet = program.subnet(of, blocks(program.layout.sizes, shares[of])[k])
    network.add(subnet, change, steps[of][k] / sum(steps[of].values()))
