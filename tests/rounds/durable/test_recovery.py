"""The content of a run directory, and the network that it leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from idletrain.errors import DamageError, RunError
from idletrain.exchange.messages import checksum
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.durable import recovery, snapshots, updates
from idletrain.rounds.durable.updates import StagedUpdate
from idletrain.rounds.durable.write_ahead_log import WriteAheadLog

SHARES = (0.5, 0.5)
ROUNDS = 4


def ignore(_name: str) -> None:
    """No test is interested in the points reached."""


@pytest.fixture
def run(tmp_path: Path, small_program: Callable[..., Prepared]) -> tuple[Path, Prepared, Network]:
    """A run of four rounds of made-up updates, snapshots after rounds 0 and 2, and the network at its end."""
    prepared = small_program(optimizer={"lr": 0.1, "momentum": 0.9})
    program = prepared.program
    run_dir = tmp_path / "run"
    (run_dir / "updates").mkdir(parents=True)
    network = Network.of(program, prepared.network)
    snapshots.write(run_dir, 0, network, ignore)
    log = WriteAheadLog(run_dir / "wal")
    log.append("epoch", format=recovery.FORMAT, epoch=1, round=0, shares=SHARES, drop=False)
    torch.manual_seed(0)
    for round_ in range(ROUNDS):
        staged, offset = {}, 0
        for k, subnet in enumerate(program.subnets(round_, SHARES)):
            flat = torch.randn(program.buffer_size(subnet, persistent=True))
            frames = [flat.numpy().data.cast("B")]
            staged[k] = StagedUpdate(k, 3 - k, offset, flat.nbytes, checksum(frames))
            updates.write(updates.path_of(run_dir, round_), offset, frames)
            log.append("stage", round=round_, attempt=1, **asdict(staged[k]))
            offset += flat.nbytes
        steps = {k: s.steps for k, s in staged.items()}
        recovery.apply(run_dir, program.subnets(round_, SHARES), network, round_, staged, steps)
        log.append("commit", round=round_, staged=sorted(steps.items()), next_shares=SHARES)
        if round_ == 1:
            snapshots.write(run_dir, 2, network, ignore)
    log.close()
    return run_dir, prepared, network


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_snapshot_and_the_updates_since_give_the_same_bits(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, prepared, network = run
    restored, rounds = recovery.load_network(run_dir, prepared.program)
    assert rounds == ROUNDS
    assert torch.equal(restored.flat, network.flat)
    assert restored.sha256() == network.sha256()


@pytest.mark.parametrize("file", ["network", "manifest.json"])
def test_a_damaged_newest_snapshot_is_passed_over_for_the_one_before(
    run: tuple[Path, Prepared, Network], file: str
) -> None:
    run_dir, prepared, network = run
    damage(run_dir / "snapshots" / "00000002" / file)
    with pytest.raises(DamageError):
        snapshots.load(run_dir, 2, Network(prepared.program.layout, 2))
    assert torch.equal(recovery.load_network(run_dir, prepared.program)[0].flat, network.flat)


def test_an_update_that_only_an_old_snapshot_needs_may_be_damaged(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, prepared, network = run
    damage(updates.path_of(run_dir, 0))
    assert torch.equal(recovery.load_network(run_dir, prepared.program)[0].flat, network.flat)


def test_damage_that_no_snapshot_leads_around_is_refused_with_every_reason(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, prepared, _ = run
    damage(run_dir / "snapshots" / "00000002" / "network")
    damage(updates.path_of(run_dir, 1))
    with pytest.raises(DamageError, match=r"no snapshot leads to round 4.*00000002.*00000001.*under another name"):
        recovery.load_network(run_dir, prepared.program)


def test_history_has_what_is_committed_and_what_is_only_staged(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, _, _ = run
    log = WriteAheadLog(run_dir / "wal")
    log.append("stage", round=ROUNDS, attempt=9, **asdict(StagedUpdate(1, 3, 0, 8, 5)))
    log.close()
    past = recovery.read_history(run_dir)
    assert past.rounds == ROUNDS
    assert past.epochs == 1
    assert past.steps == {round_: {0: 3, 1: 2} for round_ in range(ROUNDS)}
    assert past.staged[ROUNDS] == {1: StagedUpdate(1, 3, 0, 8, 5)}
    assert past.shares == dict.fromkeys(range(ROUNDS + 1), SHARES)
    assert past.status is None


def test_an_end_counts_until_the_next_epoch_begins(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, _, _ = run
    log = WriteAheadLog(run_dir / "wal")
    log.append("end", status="stopped", rounds=ROUNDS, params_sha256="abc")
    past = recovery.history(log.records)
    assert (past.status, past.params_sha256) == ("stopped", "abc")
    log.append("epoch", format=recovery.FORMAT, epoch=2, round=ROUNDS, shares=[0.7, 0.3], drop=False)
    log.close()
    past = recovery.read_history(run_dir)
    assert (past.status, past.epochs, past.shares[ROUNDS]) == (None, 2, (0.7, 0.3))


def test_what_an_epoch_drops_of_its_round_is_not_staged_and_what_comes_then_is() -> None:
    stage = {"kind": "stage", "round": 0, "attempt": 1, "steps": 3, "size_bytes": 4, "checksum": 7}
    epoch = {"kind": "epoch", "round": 0, "shares": SHARES, "format": recovery.FORMAT}
    records = [
        {**epoch, "epoch": 1, "drop": False},
        {**stage, "subnet": 0, "offset": 0},
        {**stage, "subnet": 1, "offset": 4},
        {**epoch, "epoch": 2, "drop": True},
        {**stage, "subnet": 2, "offset": 8},
        {**epoch, "epoch": 3, "drop": False},
    ]
    assert {k: staged.offset for k, staged in recovery.history(records).staged[0].items()} == {2: 8}


def test_a_missing_run_is_named_beside_those_that_are_there(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, _, _ = run
    with pytest.raises(RunError, match=r"holds no run; in .* there are: run$"):
        recovery.read_history(run_dir.parent / "other")


def test_a_run_of_an_older_format_is_refused_by_its_number(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "wal")
    log.append("epoch", epoch=1, round=0, shares=SHARES, drop=False)
    log.close()
    with pytest.raises(RunError, match=r"with another format \(1, this one reads 2\)"):
        recovery.read_history(tmp_path)


def test_a_run_with_the_log_of_format_1_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"")
    with pytest.raises(RunError, match=r"written by an idletrain of format 1 and this one reads 2"):
        recovery.read_history(tmp_path)
