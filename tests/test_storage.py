"""Files that are whole or not there, and one head a run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from idletrain.errors import RunError
from idletrain.storage import only_head, write_whole


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
