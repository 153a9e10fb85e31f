"""The append-only log of a run: one line a record, its CRC-32 in front, so that damage is detected and located.

8c736521 {"kind":"commit","n":7,"round":3}
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idletrain.errors import DamageError, RunError
from idletrain.storage import sync_directory, write_whole

LogRecord = dict[str, Any]
TAIL_BYTES = 64  # of the end, compared before each write: a log overwritten in place has another
GO_BACK = "the run ends here; add --resume to go on from the newest sound snapshot"


@dataclass(frozen=True)
class LogContent:
    """A log's undamaged part.

    Attributes:
        records: Its records.
        sound_bytes: The byte at which it ends.
        damage: What is wrong behind it; empty if nothing is, or no more than a crash leaves.
    """

    records: tuple[LogRecord, ...]
    sound_bytes: int
    damage: str = ""


def read(path: Path) -> LogContent:
    """Read and verify a log up to the first line that does not hold what was written.

    An incomplete last line, as a crash leaves it, is no damage.

    Raises:
        RunError: The file cannot be read.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); fix that and try again") from None
    records: list[LogRecord] = []
    offset = 0
    while offset < len(content):
        end = content.find(b"\n", offset) + 1 or len(content)
        record = _parse(content[offset:end])
        if record is None or record["n"] != len(records):
            cut = end == len(content) and not _holds_record(content[offset:end])
            damage = "" if cut else f"{path}: damaged at byte {offset} (record {len(records)})"
            return LogContent(tuple(records), offset, damage)
        records.append(record)
        offset = end
    return LogContent(tuple(records), offset)


class WriteAheadLog:
    """An open log; threads may append to it.

    Args:
        path: The file; it is truncated after its undamaged part, and a damaged one is kept under another name.

    Attributes:
        records: The records that were there when it was opened.
        damage: What was wrong with the file, or an empty string.

    Raises:
        RunError: The file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        content = read(path)
        self._path, self.damage = path, content.damage
        self.records = content.records
        self._count = len(content.records)
        self._one_at_a_time = threading.Lock()
        self._end = content.sound_bytes
        if content.damage:
            sound = path.read_bytes()[: self._end]
            path.replace(path.with_name(path.name + ".damaged"))
            write_whole(path, sound)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._end)
        self._tail = self._read_tail(TAIL_BYTES)
        sync_directory(path.parent)

    def append(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Add a record; `durable` waits until it would survive a power cut (a killed process never loses one).

        Raises:
            OSError: There is no room; the log is as it was before.
            DamageError: Something else removed, replaced or changed the file.
        """
        with self._one_at_a_time:
            self._check_in_place()
            self._append({"kind": kind, "n": self._count, **fields}, durable)

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
        self._end, self._tail = self._end + len(line), line[-TAIL_BYTES:]
        self._count += 1

    def _check_in_place(self) -> None:
        """Raise DamageError unless the path still leads to the open file, as long as it was left."""
        own = os.fstat(self._file)
        try:
            on_disk = self._path.stat()
        except OSError as error:
            raise DamageError(f"{self._path} is gone while the run goes on ({error.strerror}); {GO_BACK}") from None
        in_place = os.path.samestat(own, on_disk) and own.st_size == self._end
        if not in_place or self._read_tail(len(self._tail)) != self._tail:
            raise DamageError(f"{self._path} was changed by something else while the run goes on; {GO_BACK}")

    def _read_tail(self, size: int) -> bytes:
        start = max(0, self._end - size)
        return os.pread(self._file, self._end - start, start)

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
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(body)
        if isinstance(record, dict) and isinstance(record.get("n"), int):
            return record
    return None
