"""The content of a run directory, and the network that it leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from idletrain.errors import DamageError, RunError
from idletrain.exchange.messages import checksum
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.durable import recovery, s3_mirror, snapshots, updates
from idletrain.rounds.durable.history import FORMAT, collect, read_history
from idletrain.rounds.durable.s3_mirror import Mirror
from idletrain.rounds.durable.updates import StagedUpdate
from idletrain.rounds.durable.write_ahead_log import WriteAheadLog
from idletrain.storage import S3Prefix

SPECS = by_neurons((0.5, 0.5))
PLANNED = [asdict(spec) for spec in SPECS]
ROUNDS = 4


def ignore(_name: str) -> None:
    """No test is interested in the points reached."""


@pytest.fixture
def run(tmp_path: Path, small_program: Callable[..., Prepared]) -> tuple[Path, Prepared, Network]:
    """A run of four rounds of made-up updates, snapshots after rounds 0 and 2, and the network at its end."""
    prepared = small_program(optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9})
    program = prepared.program
    run_dir = tmp_path / "run"
    (run_dir / "updates").mkdir(parents=True)
    network = Network.of(program, prepared.network)
    snapshots.write(run_dir, 0, network, ignore)
    log = WriteAheadLog(run_dir / "wal")
    log.append("epoch", format=FORMAT, epoch=1, round=0, subnets=PLANNED, drop=False)
    torch.manual_seed(0)
    for round_ in range(ROUNDS):
        staged, offset = {}, 0
        for k, subnet in enumerate(program.subnets(round_, SPECS)):
            flat = torch.randn(program.buffer_size(subnet, persistent=True))
            frames = [flat.numpy().data.cast("B")]
            staged[k] = StagedUpdate(k, 3 - k, offset, flat.nbytes, checksum(frames))
            updates.write(updates.path_of(run_dir, round_), offset, frames)
            log.append("stage", round=round_, attempt=1, **asdict(staged[k]))
            offset += flat.nbytes
        steps = {k: s.steps for k, s in staged.items()}
        recovery.apply(run_dir, program.subnets(round_, SPECS), network, round_, staged, steps)
        log.append("commit", round=round_, staged=sorted(steps.items()), next_subnets=PLANNED)
        torch.save(network.flat, tmp_path / f"after-{round_ + 1}")
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
    recovered = recovery.load_network(run_dir, prepared.program)
    restored, rounds = recovered.network, recovered.rounds
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
    assert torch.equal(recovery.load_network(run_dir, prepared.program).network.flat, network.flat)


def test_an_update_that_only_an_old_snapshot_needs_may_be_damaged(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, prepared, network = run
    damage(updates.path_of(run_dir, 0))
    assert torch.equal(recovery.load_network(run_dir, prepared.program).network.flat, network.flat)


def after(run_dir: Path, rounds: int) -> torch.Tensor:
    """Return the network's values after so many rounds of the undamaged run."""
    values: torch.Tensor = torch.load(run_dir.parent / f"after-{rounds}", weights_only=True)
    return values


@pytest.mark.parametrize("damaged", range(2, ROUNDS))
def test_a_damaged_update_since_the_newest_snapshot_costs_its_round_and_those_behind_it(
    run: tuple[Path, Prepared, Network], damaged: int
) -> None:
    run_dir, prepared, _ = run
    damage(updates.path_of(run_dir, damaged))
    recovered = recovery.load_network(run_dir, prepared.program)
    assert recovered.rounds == damaged
    assert torch.equal(recovered.network.flat, after(run_dir, damaged))
    lost = "round 3 is" if damaged == 3 else "rounds 2 to 3 are"
    assert f"{lost} lost and --resume trains them again" in recovered.note


def test_a_damaged_snapshot_and_a_damaged_update_lead_to_the_round_between(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, prepared, _ = run
    damage(run_dir / "snapshots" / "00000002" / "network")
    damage(updates.path_of(run_dir, 1))
    recovered = recovery.load_network(run_dir, prepared.program)
    assert (recovered.rounds, recovered.damaged_snapshots) == (1, (2,))
    assert torch.equal(recovered.network.flat, after(run_dir, 1))


@pytest.mark.parametrize(("part", "rounds"), [("snapshots/00000002/network", 4), ("updates/", 3), ("wal/", 2)])
def test_a_damaged_copy_in_s3_leads_to_its_newest_sound_state(
    run: tuple[Path, Prepared, Network], prefix: S3Prefix, part: str, rounds: int
) -> None:
    run_dir, prepared, _ = run
    (run_dir / "job.json").write_text("{}")
    Mirror(run_dir, prefix).copy()
    key = [name for name in prefix.names() if name.startswith(part)][-1]
    stored = prefix.get(key)
    assert stored
    content = bytearray(stored.content)
    content[len(content) // 2] ^= 1
    prefix.put(key, bytes(content))
    restored = run_dir.parent / "restored"
    assert s3_mirror.restore(prefix, restored)
    recovered = recovery.load_network(restored, prepared.program)
    assert recovered.rounds == rounds
    assert torch.equal(recovered.network.flat, after(run_dir, rounds))


def test_without_a_sound_snapshot_the_run_is_refused_with_every_reason(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, prepared, _ = run
    for folder in ("00000000", "00000002"):
        damage(run_dir / "snapshots" / folder / "network")
    with pytest.raises(DamageError, match=r"no snapshot is sound.*00000002.*00000000.*under another name"):
        recovery.load_network(run_dir, prepared.program)


def emptied(content: bytes) -> bytes:
    return b""


def zeroed(content: bytes) -> bytes:
    return bytes(len(content))


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    at = len(content) // 3
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("how", [emptied, zeroed, halved, flipped, None])
def test_where_the_log_is_damaged_or_gone_the_newest_snapshot_counts(
    run: tuple[Path, Prepared, Network], how: Callable[[bytes], bytes] | None
) -> None:
    run_dir, prepared, _ = run
    log = run_dir / "wal"
    if how:
        log.write_bytes(how(log.read_bytes()))
    else:
        log.unlink()
    recovered = recovery.load_network(run_dir, prepared.program)
    assert recovered.rounds == 2
    assert torch.equal(recovered.network.flat, after(run_dir, 2))
    assert "newest sound snapshot, of round 2" in recovered.note


def test_a_file_that_may_not_be_read_is_reported_as_that_and_not_as_damage(
    run: tuple[Path, Prepared, Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, prepared, _ = run

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("numpy.memmap", forbidden)
    with pytest.raises(RunError, match=r"00000002 cannot be read \(Permission denied\); fix that and try again"):
        recovery.load_network(run_dir, prepared.program)


@pytest.mark.parametrize("how", [emptied, zeroed, halved, b"{}".__add__, None])
def test_a_job_record_that_holds_none_is_named(tmp_path: Path, how: Callable[[bytes], bytes] | None) -> None:
    if how:
        (tmp_path / "job.json").write_bytes(how(b'{"name": "a"}'))
    with pytest.raises(DamageError, match=r"job\.json .* --resume and a job file"):
        recovery.read_job(tmp_path)


def test_history_has_what_is_committed_and_what_is_only_staged(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, _, _ = run
    log = WriteAheadLog(run_dir / "wal")
    log.append("stage", round=ROUNDS, attempt=9, **asdict(StagedUpdate(1, 3, 0, 8, 5)))
    log.close()
    past = read_history(run_dir)
    assert past.rounds == ROUNDS
    assert past.epochs == 1
    assert past.steps == {round_: {0: 3, 1: 2} for round_ in range(ROUNDS)}
    assert past.staged[ROUNDS] == {1: StagedUpdate(1, 3, 0, 8, 5)}
    assert past.specs == dict.fromkeys(range(ROUNDS + 1), SPECS)
    assert past.status is None


def test_an_end_counts_until_the_next_epoch_begins(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, _, _ = run
    log = WriteAheadLog(run_dir / "wal")
    log.append("end", status="stopped", rounds=ROUNDS, params_sha256="abc")
    past = read_history(run_dir)
    assert (past.status, past.params_sha256) == ("stopped", "abc")
    log.append(
        "epoch",
        format=FORMAT,
        epoch=2,
        round=ROUNDS,
        subnets=[{"kind": "neurons", "share": share} for share in (0.7, 0.3)],
        drop=False,
    )
    log.close()
    past = read_history(run_dir)
    assert (past.status, past.epochs, past.specs[ROUNDS]) == (None, 2, by_neurons((0.7, 0.3)))


def test_the_subnets_of_all_phases_are_those_of_the_newest_epoch() -> None:
    epoch = {"kind": "epoch", "round": 0, "subnets": PLANNED, "format": FORMAT, "drop": False}
    whole = [{"kind": "neurons", "share": 1.0, "copies": 1}]
    assert collect([{**epoch, "epoch": 1}]).planned == ()
    past = collect([{**epoch, "epoch": 1}, {**epoch, "epoch": 2, "phases": [PLANNED, whole]}])
    assert past.planned == (SPECS, by_neurons((1.0,)))


def test_what_an_epoch_drops_of_its_round_is_not_staged_and_what_comes_then_is() -> None:
    stage = {"kind": "stage", "round": 0, "attempt": 1, "steps": 3, "size_bytes": 4, "checksum": 7}
    epoch = {"kind": "epoch", "round": 0, "subnets": PLANNED, "format": FORMAT}
    records = [
        {**epoch, "epoch": 1, "drop": False},
        {**stage, "subnet": 0, "offset": 0},
        {**stage, "subnet": 1, "offset": 4},
        {**epoch, "epoch": 2, "drop": True},
        {**stage, "subnet": 2, "offset": 8},
        {**epoch, "epoch": 3, "drop": False},
    ]
    assert {k: staged.offset for k, staged in collect(records).staged[0].items()} == {2: 8}


def test_a_missing_run_is_named_beside_those_that_are_there(run: tuple[Path, Prepared, Network]) -> None:
    run_dir, _, _ = run
    with pytest.raises(RunError, match=r"holds no run; in .* there are: run$"):
        read_history(run_dir.parent / "other")


def test_a_run_of_an_older_format_is_refused_by_its_number(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "wal")
    log.append("epoch", epoch=1, round=0, subnets=PLANNED, drop=False)
    log.close()
    with pytest.raises(RunError, match=r"with another format \(1, this one reads 3\)"):
        read_history(tmp_path)


def test_a_run_with_the_log_of_format_1_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"")
    with pytest.raises(RunError, match=r"written by an idletrain of format 1 and this one reads 3"):
        read_history(tmp_path)
