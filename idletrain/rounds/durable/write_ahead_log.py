"""The append-only log of a run: one line a record, its CRC-32 in front, so that damage is detected and located.

8c736521 {"kind":"commit","n":7,"round":3}
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idletrain.errors import DamageError
from idletrain.storage import sync_directory

LogRecord = dict[str, Any]


@dataclass(frozen=True)
class LogContent:
    """A log's records, and the byte at which its undamaged part ends."""

    records: tuple[LogRecord, ...]
    sound_bytes: int


def read(path: Path) -> LogContent:
    """Read and verify a log; an incomplete last line, as a crash leaves it, is ignored.

    Raises:
        DamageError: A line before the last does not hold what was written; the message names the offset.
    """
    content = path.read_bytes() if path.exists() else b""
    records: list[LogRecord] = []
    offset = 0
    while offset < len(content):
        end = content.find(b"\n", offset) + 1 or len(content)
        record = _parse(content[offset:end])
        if record is None or record["n"] != len(records):
            if end < len(content) or _holds_record(content[offset:end]):
                raise DamageError(
                    f"{path}: damaged at byte {offset} (record {len(records)}); "
                    "restore the file from a copy, or start the job again under another name"
                )
            break
        records.append(record)
        offset = end
    return LogContent(tuple(records), offset)


class WriteAheadLog:
    """An open log; threads may append to it.

    Args:
        path: The file; it is truncated after its undamaged part.
    """

    def __init__(self, path: Path) -> None:
        content = read(path)
        self.records = list(content.records)
        self._one_at_a_time = threading.Lock()
        self._end = content.sound_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, self._end)
        sync_directory(path.parent)

    def append(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Add a record; `durable` waits until it would survive a power cut (a killed process never loses one).

        Raises:
            OSError: There is no room; the log is as it was before.
        """
        with self._one_at_a_time:
            self._append({"kind": kind, "n": len(self.records), **fields}, durable)

    def _append(self, record: LogRecord, durable: bool) -> None:
        line = _format(record)
        try:
            if os.pwrite(self._file, line, self._end) != len(line):
                os.pwrite(self._file, line, self._end)  # raises the error that cut the first write short
                raise OSError(28, "No space left on device")
            if durable:
                os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)
        self.records.append(record)

    def close(self) -> None:
        """Close the file, after a write that is under way."""
        with self._one_at_a_time:
            os.close(self._file)
            self._file = -1


def _format(record: LogRecord) -> bytes:
    body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _holds_record(line: bytes) -> bool:
    """Return whether a whole record follows damage in the same line: a line break was lost, not the line's end."""
    starts = (match.start() for match in re.finditer(rb"[0-9a-f]{8} \{", line))
    return any(_parse(line[start:]) for start in starts if start)


def _parse(line: bytes) -> LogRecord | None:
    if len(line) < 10 or not line.endswith(b"\n"):
        return None
    body = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(body):
        return None
    record: LogRecord = json.loads(body)
    return record
