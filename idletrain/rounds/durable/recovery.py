"""Read a run directory: its job, and the network after its last committed round."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from idletrain.errors import DamageError, RunError, reading
from idletrain.job import Job
from idletrain.nn.ist.schemes import SubnetSpec
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.network import Network
from idletrain.nn.program import Program
from idletrain.nn.rolling import RollingSubnets
from idletrain.rounds.durable import snapshots, updates
from idletrain.rounds.durable.history import History, LateUpdate, read_history
from idletrain.rounds.durable.updates import StagedUpdate

logger = logging.getLogger(__name__)
SAY_ALL = "launch with --resume and a job file that says every setting of training by itself, which writes it again"
READ_TRIES = 3  # a run may prune a snapshot while another process reads it; two in a row take two minutes


@dataclass(frozen=True)
class Restored:
    """The newest sound state of a run.

    Attributes:
        network: The network.
        rounds: Rounds committed in it.
        note: Which rounds are lost by damage, as a sentence; empty if none are.
        damaged_snapshots: Rounds of newer snapshots that do not hold what was written.
        rolling: Its open subnets, in a run that commits each by itself and has begun.
    """

    network: Network
    rounds: int
    note: str = ""
    damaged_snapshots: tuple[int, ...] = ()
    rolling: RollingSubnets | None = None


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
        rolling = None
        try:
            snapshots.load(run_dir, start, network)
            if past.is_rolling:
                rolling = _open_subnets(run_dir, start, program, network, past)
        except DamageError as error:
            logger.warning("%s; the snapshot before it is used", error)
            damaged.append(start)
            damages.append(str(error))
            continue
        if rolling:
            damages += _follow(run_dir, rolling, past)
            lost = _lost_updates(rolling, past, damages)
            return Restored(network, rolling.rounds, lost, tuple(damaged), rolling)
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


def _open_subnets(run_dir: Path, start: int, program: Program, network: Network, past: History) -> RollingSubnets:
    """Return the open subnets of a run that commits each by itself, as a snapshot has them.

    Raises:
        DamageError: The snapshot does not hold what was written.
    """
    rolling = RollingSubnets(program, network, past.lanes)
    if arrays := snapshots.load_arrays(run_dir, start):
        with reading(f"the snapshot of round {start}", "start the job again under another name"):
            rolling.restore(arrays)
    return rolling


def _follow(run_dir: Path, rolling: RollingSubnets, past: History) -> list[str]:
    """Commit the updates since, in the log's order; return what is damaged, which ends that."""
    while (next_ := past.rolled.get(rolling.commits)) is not None:
        try:
            change = updates.read(updates.path_of(run_dir, next_.round), next_.update)
        except DamageError as error:
            return [str(error)]
        rolling.commit(next_.update.subnet, torch.from_numpy(change), next_.update.steps)
    return []


def _lost_updates(rolling: RollingSubnets, past: History, damages: Sequence[str]) -> str:
    """Say what is lost between the state that was reached and the last committed update, if anything is."""
    if lost := [number for number in past.rolled if number >= rolling.commits]:
        return f"{'; '.join(damages)}; {len(lost)} updates are lost and --resume trains them again"
    if damages:
        return f"{'; '.join(damages)}; the run counts as far as its newest sound snapshot, of round {rolling.rounds}"
    return ""


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
    apply(run_dir, subnets, network, round_, past.staged[round_], past.steps[round_])
    for late in late_updates:
        apply_late(run_dir, program, network, round_, late, past.specs, past.steps)


def apply(
    run_dir: Path,
    subnets: Sequence[Subnet],
    network: Network,
    round_: int,
    staged: dict[int, StagedUpdate],
    steps: dict[int, int],
) -> None:
    """Write a round's staged updates into the network: the one place where parameters change.

    Args:
        run_dir: The run directory.
        subnets: The round's subnets.
        network: The network.
        round_: The round.
        staged: Its durable updates, by subnet.
        steps: The local steps in each that is taken, by subnet.

    Raises:
        DamageError: An update does not hold what was written; the network is as before.
    """
    path = updates.path_of(run_dir, round_)
    network.commit([(subnets[k], torch.from_numpy(updates.read(path, staged[k])), steps[k]) for k in sorted(steps)])


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
    network.add(subnet, torch.from_numpy(change), steps[of][k] / sum(steps[of].values()))
