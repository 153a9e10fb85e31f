"""Files that are whole or not there, and one head a run."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from s3transfer.exceptions import S3DownloadFailedError

from idletrain.errors import RunError
from idletrain.storage import S3Prefix, has_head, make_private, only_head, owner_only, write_whole


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_whole(path, b"old")
    write_whole(path, memoryview(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_old_content_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "manifest.json"
    write_whole(path, b"old")

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if fails == "fsync" else (Path, "replace")), full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


class ReplacedWhileRead:
    """A client of S3 whose objects are replaced as often while they are read."""

    def __init__(self, times: int) -> None:
        self.times = times

    def download_file(self, bucket: str, key: str, path: str) -> None:
        if self.times:
            self.times -= 1
            raise S3DownloadFailedError(f"{bucket}/{key} did not match expected ETag.")
        Path(path).write_text(key)


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    S3Prefix(ReplacedWhileRead(2), "bucket", "runs/").get_file("updates/1", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "runs/updates/1"
    with pytest.raises(RunError, match="runs/updates/1 changes whenever it is read; try again"):
        S3Prefix(ReplacedWhileRead(9), "bucket", "runs/").get_file("updates/1", tmp_path / "file")


HOLD = """
import sys
from pathlib import Path
from idletrain.storage import only_head
with only_head(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_head_is_refused_by_the_process_of_the_first_until_that_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(RunError, match=f"going on in process {first.pid}; wait for it or stop it"),
            only_head(tmp_path),
        ):
            raise AssertionError("two heads")
        first.kill()
        first.wait()
        with only_head(tmp_path):
            assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_head_may_follow_another_in_one_process(tmp_path: Path) -> None:
    for _ in range(2):
        with only_head(tmp_path):
            pass


def test_a_lock_that_is_no_file_is_no_head(tmp_path: Path) -> None:
    assert not has_head(tmp_path)
    (tmp_path / "lock").mkdir()
    assert not has_head(tmp_path)


def test_directories_and_files_are_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "night"
    before = os.umask(0)
    try:
        make_private(run_dir)
        make_private(run_dir)
        write_whole(run_dir / "whole", b"")
        with open(run_dir / "log", "a", opener=owner_only) as file:
            file.write("line")
    finally:
        os.umask(before)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(run_dir.parent.stat().st_mode) == 0o777  # the user's own
    assert {stat.S_IMODE(file.stat().st_mode) for file in run_dir.iterdir()} == {0o600}
