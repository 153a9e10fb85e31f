"""Every file of a run's directory is damaged in every way: nothing wrong comes out, and what is sound is used."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from idletrain.cli import main as command_line
from idletrain.export import load_run
from idletrain.rounds.durable import snapshots

from .helpers import Cluster, Run

ROUNDS = 6


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def halved(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def garbled(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size + 7))


def removed(path: Path) -> None:
    path.unlink()


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Callable[[Path], None], ...] = (emptied, zeroed, halved, flipped, garbled, removed, a_directory)
COMMANDS = (("status",), ("report",), ("evaluate", "--trust"))


@pytest.fixture
def interrupted(make_run: Callable[..., Run], cluster: Cluster) -> Run:
    """A run that was killed in its fourth round, with two snapshots and updates since."""
    run = make_run(rounds=ROUNDS, nodes=1, checkpoint={"every": "1ms", "keep": 2})
    cluster.idletrain_worker()
    head = run.launch_until("update-recorded", 8, scheduler=cluster.address)
    assert head.exit_code() == -signal.SIGKILL
    snapshots.prune(run.dir, 2)  # it may have died before it did so itself
    return run


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Call the command line in this process; return its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["idletrain", *arguments])
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), pytest.raises(SystemExit) as ended:
        command_line.main()
    code = ended.value.code
    return (code if isinstance(code, int) else int(bool(code))), text.getvalue()


def files_of(run: Run) -> list[Path]:
    return sorted(path.relative_to(run.dir) for path in run.dir.rglob("*") if path.is_file())


def test_whatever_file_is_damaged_no_command_meets_a_bug_or_a_wrong_network(
    interrupted: Run, undisturbed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digests, tried, lost = undisturbed(), 0, 0
    copy = tmp_path / "copy"
    kept = {
        manifest.parent.name: int(manifest.parent.name)
        for manifest in interrupted.dir.glob("snapshots/*/manifest.json")
    }
    assert len(kept) == 2
    for file in files_of(interrupted):
        for damage in DAMAGES:
            shutil.copytree(interrupted.dir, copy)
            damage(copy / file)
            for command in COMMANDS:
                code, text = called(monkeypatch, *command, str(copy))
                assert code in (0, 1), (file, damage.__name__, command, text)
                tried += 1
            with contextlib.suppress(Exception):  # refused in a sentence above
                loaded = load_run(copy)
                assert loaded.network.sha256() == digests[loaded.rounds], (file, damage.__name__)
                lost += loaded.rounds < max(round_ for name, round_ in kept.items() if name not in file.parts)
            shutil.rmtree(copy)
    assert tried > 100
    assert not lost, "a damage cost more than the rounds since the newest sound snapshot"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("wal", emptied),
        ("wal", flipped),
        ("wal", removed),
        ("updates/00000003", flipped),
        ("events.jsonl", garbled),
        ("events.jsonl", a_directory),
    ],
)
def test_a_damaged_run_is_resumed_to_the_same_bits(
    file: str,
    damage: Callable[[Path], None],
    interrupted: Run,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    damage(interrupted.dir / file)
    head = interrupted.launch("--resume", "--scheduler", cluster.address)
    assert head.exit_code() == 0, head.text
    end = interrupted.records()[-1]
    assert (end["status"], end["params_sha256"]) == ("completed", undisturbed()[ROUNDS])
    if file == "wal":
        assert interrupted.records("restored"), "the damage was not noticed"
        assert "newest sound snapshot" in head.text


def test_records_whose_schema_number_is_damaged_do_not_keep_a_run_from_going_on(
    interrupted: Run, cluster: Cluster, undisturbed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit makes a 3 of a 2."""
    path = interrupted.dir / "events.jsonl"
    content = path.read_bytes()
    assert content.count(b'"v": 2') > 3
    path.write_bytes(content.replace(b'"v": 2', b'"v": 3', 2))
    assert [called(monkeypatch, command, str(interrupted.dir))[0] for command in ("status", "report")] == [0, 0]
    interrupted.resume("--scheduler", cluster.address)
    assert interrupted.records()[-1]["params_sha256"] == undisturbed()[ROUNDS]


def test_one_altered_key_in_the_records_does_not_keep_a_run_from_going_on(
    interrupted: Run, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    path = interrupted.dir / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for event in lines:
        if event["kind"] == "leased":
            event["wörker"] = event.pop("worker")
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    interrupted.resume("--scheduler", cluster.address)
    assert interrupted.records()[-1]["params_sha256"] == undisturbed()[ROUNDS]


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_log_that_disappears_under_a_running_head_ends_the_run_as_failed(
    how: str, make_run: Callable[..., Run], control: object, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=ROUNDS, checkpoint={"every": "1ms", "keep": 2})
    control.pace(0.02)  # type: ignore[attr-defined]
    head = run.launch()
    run.wait("a round", "round_committed", count=2)
    run.wait("a snapshot", "snapshot")
    content = (run.dir / "wal").read_bytes()
    (run.dir / "wal").unlink()
    if how == "replaced":
        (run.dir / "wal").write_bytes(content)
    assert head.exit_code() == 1
    assert "while the run goes on" in head.text
    assert run.events("run_ended")[-1]["status"] == "failed"
    control.pace(0)  # type: ignore[attr-defined]
    run.resume()
    assert run.records()[-1]["params_sha256"] == undisturbed()[ROUNDS]
