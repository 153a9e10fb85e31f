"""Bytes that outlive a process: files that are whole or not there, and room that may run out.

`reached` names the points around every durable write; a test kills the process at each of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from idletrain.errors import RunError

Reached = Callable[[str], None]
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Replace a file's content so that a reader sees the old or the new, also after a power cut.

    Raises:
        OSError: there is no room, or no right to write.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_head(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for one head; the lock goes with the process, however it ends.

    Raises:
        RunError: another process runs it.
    """
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise RunError(
                f"run {run_dir} is going on in process {file.read().strip()}; wait for it or stop it with Ctrl-C"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
