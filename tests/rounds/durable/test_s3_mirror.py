"""A run directory's copy is a state that the directory was in, and a run goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import Mirror
from idletrain.storage import S3Prefix, write_whole


def run_dir(tmp_path: Path) -> Path:
    run_folder = tmp_path / "night"
    (run_folder / "updates").mkdir(parents=True)
    (run_folder / "job.json").write_text("{}")
    (run_folder / "wal").write_bytes(b"one\ntwo\nhal")
    (run_folder / "updates" / "0").write_bytes(b"update")
    snapshot(run_folder, 0)
    return run_folder


def snapshot(run_folder: Path, round_: int) -> None:
    folder = run_folder / "snapshots" / f"{round_:08d}"
    folder.mkdir(parents=True)
    (folder / "network").write_bytes(b"n" * (round_ + 1))
    (folder / "arrays.npz").write_bytes(b"a" * round_)
    (folder / "manifest.json").write_text("{}")


def files(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_a_copy_restores_the_directory_up_to_the_last_whole_line(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    Mirror(run_folder, prefix).copy()
    assert s3_mirror.restore(prefix, tmp_path / "again")
    assert files(tmp_path / "again") == {**files(run_folder), "wal": b"one\ntwo\n", "events.jsonl": b""}


def test_the_copy_of_a_log_that_was_replaced_begins_anew(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    mirror = Mirror(run_folder, prefix)
    mirror.copy()
    with (run_folder / "wal").open("a") as file:
        file.write("three\n")
    mirror.copy()
    write_whole(run_folder / "wal", b"one\nrestored\n")
    mirror.copy()
    with (run_folder / "wal").open("a") as file:
        file.write("another two\n")
    mirror.copy()
    assert s3_mirror.restore(prefix, tmp_path / "again")
    assert (tmp_path / "again" / "wal").read_bytes() == b"one\nrestored\nanother two\n"


def test_snapshots_without_a_log_are_a_run_all_the_same(tmp_path: Path, prefix: S3Prefix) -> None:
    prefix.put("snapshots/00000003/manifest.json", b"{}")
    assert s3_mirror.restore(prefix, tmp_path / "again")
    assert (tmp_path / "again" / "wal").read_bytes() == b""


def test_events_are_read_and_added_to_behind_those_that_are_there(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    (run_folder / "events.jsonl").write_text('{"kind": "first"}\n')
    Mirror(run_folder, prefix).copy()
    s3_mirror.append_events(prefix, [{"kind": "second"}])
    assert s3_mirror.events(prefix) == [{"kind": "first"}, {"kind": "second"}]
    assert s3_mirror.restore(prefix, tmp_path / "again")
    with (tmp_path / "again" / "events.jsonl").open("a") as file:
        file.write('{"kind": "third"}\n')
    Mirror(tmp_path / "again", prefix).copy()
    assert [event["kind"] for event in s3_mirror.events(prefix)] == ["first", "second", "third"]


def test_what_grows_travels_once_and_what_was_pruned_goes(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    copy = Mirror(run_folder, prefix)
    copy.copy()
    before = set(prefix.names())
    with (run_folder / "wal").open("ab") as log:
        log.write(b"f\nthree\n")
    (run_folder / "updates" / "0").unlink()
    snapshot(run_folder, 5)
    copy.copy()
    new = set(prefix.names()) - before
    assert {key for key in new if key.startswith("wal/")} == {"wal/000000000000008"}
    assert "updates/0" not in prefix.names()
    s3_mirror.restore(prefix, tmp_path / "again")
    assert (tmp_path / "again" / "wal").read_bytes() == b"one\ntwo\nhalf\nthree\n"
    assert (tmp_path / "again" / "snapshots" / "00000005" / "network").read_bytes() == b"n" * 6


def test_a_snapshot_without_its_manifest_is_not_copied(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    snapshot(run_folder, 5)
    (run_folder / "snapshots" / "00000005" / "manifest.json").unlink()
    Mirror(run_folder, prefix).copy()
    assert prefix.names("snapshots/") == [
        "snapshots/00000000/arrays.npz",
        "snapshots/00000000/manifest.json",
        "snapshots/00000000/network",
    ]


def test_the_next_head_goes_on_where_the_copy_ends(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    Mirror(run_folder, prefix).copy()
    s3_mirror.restore(prefix, tmp_path / "again")
    with (tmp_path / "again" / "wal").open("ab") as log:
        log.write(b"three\n")
    Mirror(tmp_path / "again", prefix).copy()
    s3_mirror.restore(prefix, tmp_path / "third")
    assert (tmp_path / "third" / "wal").read_bytes() == b"one\ntwo\nthree\n"


def test_where_there_is_no_copy_nothing_is_restored(tmp_path: Path, prefix: S3Prefix) -> None:
    assert not s3_mirror.restore(prefix, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_tail_hands_on_every_line_once(tmp_path: Path, prefix: S3Prefix) -> None:
    run_folder = run_dir(tmp_path)
    copy, lines = Mirror(run_folder, prefix), []

    def take(content: bytes) -> None:
        lines.extend(content.splitlines())

    copy.copy()
    seen = s3_mirror.tail(prefix, "wal", take)
    with (run_folder / "wal").open("ab") as log:
        log.write(b"f\n")
    copy.copy()
    s3_mirror.tail(prefix, "wal", take, seen)
    assert lines == [b"one", b"two", b"half"]


def test_a_pass_that_finds_a_file_pruned_sends_no_log_that_refers_to_it(
    tmp_path: Path, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = run_dir(tmp_path)
    (run_folder / "updates" / "1").write_bytes(b"another")
    put = prefix.put_file

    def slow(key: str, path: Path) -> None:
        put(key, path)
        (run_folder / "updates" / "1").unlink(missing_ok=True)  # a snapshot holds it now

    monkeypatch.setattr(prefix, "put_file", slow)
    copy = Mirror(run_folder, prefix)
    copy.copy()
    assert not any(key.startswith("wal/") for key in prefix.names())
    snapshot(run_folder, 1)
    copy.copy()
    assert s3_mirror.restore(prefix, tmp_path / "again")
    assert files(tmp_path / "again") == {**files(run_folder), "wal": b"one\ntwo\n", "events.jsonl": b""}
