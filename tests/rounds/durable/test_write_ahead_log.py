"""The write-ahead log: a torn end is cut, nothing behind damage counts, and no room leaves it as it was."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idletrain.errors import DamageError
from idletrain.rounds.durable import write_ahead_log

RECORDS = 5


def written(path: Path, records: int = RECORDS) -> bytes:
    """The content of a new log with this many records."""
    path.unlink(missing_ok=True)
    opened = write_ahead_log.WriteAheadLog(path)
    for n in range(records):
        opened.append("commit", round=n, staged=[[0, 50], [1, 50]])
    opened.close()
    return path.read_bytes()


def test_records_are_numbered_from_zero_and_come_back_as_they_were(tmp_path: Path) -> None:
    written(tmp_path / "wal")
    again = write_ahead_log.WriteAheadLog(tmp_path / "wal")
    again.append("end", status="completed")
    again.close()
    records = write_ahead_log.read(tmp_path / "wal").records
    assert [r["n"] for r in records] == list(range(RECORDS + 1))
    assert records[1] == {"kind": "commit", "n": 1, "round": 1, "staged": [[0, 50], [1, 50]]}
    assert records[-1]["status"] == "completed"


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert write_ahead_log.read(tmp_path / "none") == write_ahead_log.LogContent((), 0)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 60))
def test_a_torn_last_line_is_cut_and_its_number_is_given_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "wal"
    content = written(path)
    last = len(content.splitlines(keepends=True)[-1])
    path.write_bytes(content[: -min(cut, last)])
    opened = write_ahead_log.WriteAheadLog(path)
    assert len(opened.records) == RECORDS - 1
    opened.append("commit", round=99)
    opened.close()
    assert [r["round"] for r in write_ahead_log.read(path).records] == [0, 1, 2, 3, 99]


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_accepted_and_is_refused_by_offset_before_the_last_record(
    tmp_path: Path, where: float, bit: int
) -> None:
    check_flip(tmp_path / "wal", lambda content: int(where * len(content)), bit)


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("line", range(RECORDS - 1))
def test_a_flipped_line_break_before_the_last_record_is_refused(tmp_path: Path, line: int, bit: int) -> None:
    """Also the last but one: what looks like one torn line then holds a sound record."""

    def end_of_line(content: bytes) -> int:
        return len(b"".join(content.splitlines(keepends=True)[: line + 1])) - 1

    check_flip(tmp_path / "wal", end_of_line, bit)


def check_flip(path: Path, choose: Any, bit: int) -> None:
    content = written(path)
    sound = write_ahead_log.read(path).records
    at = choose(content)
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    lines = content.splitlines(keepends=True)
    starts = [sum(len(line) for line in lines[:n]) for n in range(RECORDS)]
    if at < starts[-1]:
        start = max(s for s in starts if s <= at)
        read_back = write_ahead_log.read(path)
        assert read_back.damage == f"{path}: damaged at byte {start} (record {starts.index(start)})"
        assert (read_back.records, read_back.sound_bytes) == (sound[: starts.index(start)], start)
        return
    read_back = write_ahead_log.read(path)
    assert read_back.records == sound[:-1]
    assert not read_back.damage or f"byte {starts[-1]} " in read_back.damage


def test_a_log_without_one_of_its_lines_counts_up_to_there_and_is_kept_aside(tmp_path: Path) -> None:
    lines = written(tmp_path / "wal").splitlines(keepends=True)
    (tmp_path / "wal").write_bytes(b"".join(lines[:2] + lines[3:]))
    damaged = (tmp_path / "wal").read_bytes()
    opened = write_ahead_log.WriteAheadLog(tmp_path / "wal")
    assert "(record 2)" in opened.damage
    opened.append("restored", round=2)
    opened.close()
    assert [r["kind"] for r in write_ahead_log.read(tmp_path / "wal").records] == ["commit", "commit", "restored"]
    assert (tmp_path / "wal.damaged").read_bytes() == damaged


@pytest.mark.parametrize("how", ["removed", "replaced", "cut", "grown", "overwritten"])
def test_a_log_that_something_else_changes_is_written_no_more(tmp_path: Path, how: str) -> None:
    path = tmp_path / "wal"
    content = written(path)
    opened = write_ahead_log.WriteAheadLog(path)
    if how == "removed":
        path.unlink()
    elif how == "replaced":
        path.rename(tmp_path / "other")
        path.write_bytes(content)
    else:
        path.write_bytes({"cut": content[:-30], "grown": content + b"0" * 30}.get(how, bytes(len(content))))
    with pytest.raises(DamageError, match=r"while the run goes on.*add --resume"):
        opened.append("commit", round=5)
    opened.close()


def test_no_room_leaves_the_log_as_it_was_and_later_room_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wal"
    written(path)
    opened = write_ahead_log.WriteAheadLog(path)
    before, real = path.read_bytes(), os.pwrite
    calls: list[int] = []

    def full_after_ten_bytes(file: int, content: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) % 2:
            return real(file, content[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full_after_ten_bytes)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as caught:
            opened.append("commit", round=5)
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == before
    assert len(calls) == 4
    monkeypatch.undo()
    opened.append("commit", round=5)
    opened.close()
    assert [r["n"] for r in write_ahead_log.read(path).records] == list(range(RECORDS + 1))


def test_threads_that_append_at_once_do_not_write_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wal"
    opened = write_ahead_log.WriteAheadLog(path)
    real, together = os.pwrite, threading.Barrier(2)

    def slow(file: int, content: bytes, offset: int) -> int:
        try:
            together.wait(0.2)  # both threads are here only if nothing keeps them apart
        except threading.BrokenBarrierError:
            together.reset()
        return real(file, content, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    threads = [threading.Thread(target=opened.append, args=("stage",), kwargs={"subnet": k}) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened.close()
    assert sorted(r["subnet"] for r in write_ahead_log.read(path).records) == [0, 1]


@pytest.mark.parametrize("body", [b"", b"7", b"[]", b"{}", b'{"n": "0"}', b"[" * 100_000])
def test_a_line_with_a_sound_checksum_that_is_no_record_is_damage(tmp_path: Path, body: bytes) -> None:
    line = b"%08x %s\n" % (zlib.crc32(body), body)
    content = written(tmp_path / "wal")
    (tmp_path / "wal").write_bytes(line + content)
    read_back = write_ahead_log.read(tmp_path / "wal")
    assert (read_back.records, read_back.sound_bytes) == ((), 0)
    assert "damaged at byte 0" in read_back.damage
