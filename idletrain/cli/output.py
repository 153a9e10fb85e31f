"""Write to the standard streams, and keep a training going where they cannot be written any more.

Their other end may be a pipe that was closed, as by `head -1`, a terminal that is gone, or a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idletrain.cli.printing import tell

NO_READER = (errno.EPIPE, errno.EIO)  # a closed pipe, and a terminal that is gone: nobody would read an error


class OutputFile(io.FileIO):
    """A standard stream that can lose its other end.

    Args:
        descriptor: The stream's.
        may_end: Whether what cannot be written is dropped, instead of raising OSError.

    Attributes:
        fault: Why nothing can be written; None while it can.
        consequence: What is said beside the first fault; if empty, nothing is said.
    """

    def __init__(self, descriptor: int, *, may_end: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.may_end = may_end
        self.fault: OSError | None = None
        self.consequence = ""

    def write(self, content: Any) -> int:
        """Write bytes; return how many were written or dropped."""
        try:
            if self.fault is None:
                return super().write(content)
        except OSError as error:
            self.fault = OSError(error.errno, error.strerror, "standard output")
            if self.consequence:
                tell(f"standard output cannot be written ({error.strerror}); {self.consequence}")
        if self.may_end:
            return memoryview(content).nbytes
        assert self.fault is not None
        raise self.fault


def guard_streams() -> None:
    """Make standard output and errors `OutputFile`s; characters that their encoding lacks become escapes.

    A stream that is closed is opened as /dev/null. Streams that another program has replaced are left alone.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (for the rest of the process)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            raw = OutputFile(stream.fileno(), may_end=name == "stderr")
            buffered, lines = io.BufferedWriter(raw), name == "stderr" or stream.line_buffering or stream.write_through
            text = io.TextIOWrapper(buffered, stream.encoding, "backslashreplace", line_buffering=lines)
            setattr(sys, name, text)


@contextlib.contextmanager
def losable_output() -> Iterator[None]:
    """While a network trains, drop what standard output cannot take, and say once that this happens."""
    raw = _raw(sys.stdout)
    if raw is None:
        yield
        return
    raw.may_end, raw.consequence = True, "training goes on"
    try:
        yield
    finally:
        raw.may_end, raw.consequence = raw.fault is not None, ""


def flush_output() -> None:
    """Write what is still to be written to standard output.

    Raises:
        OSError: it cannot be written.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def drop_unwritten() -> None:
    """Drop what standard output does not take until the process ends."""
    if raw := _raw(sys.stdout):
        raw.may_end = True


def is_unread(error: BaseException) -> bool:
    """Return whether an error is that nobody reads standard output any more."""
    raw = _raw(sys.stdout)
    return raw is not None and error is raw.fault and raw.fault.errno in NO_READER


def _raw(stream: Any) -> OutputFile | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, OutputFile) else None
