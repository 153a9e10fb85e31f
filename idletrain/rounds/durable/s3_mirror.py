"""Copies a run directory below an S3 prefix, for the next head to start from and for a laptop to read.

Files that grow (write-ahead log, events) are copied as parts named by their offset, all others whole. A copy is always
a state that the run directory was in: the log's next part follows the files that it refers to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from idletrain.errors import reading
from idletrain.observe.records import parse
from idletrain.storage import S3Prefix, make_private, write_whole

logger = logging.getLogger(__name__)
COPY_SECONDS = 1.0  # how much work is lost with a head's machine, and how late a laptop sees events
EVENTS = "events.jsonl"
SWEEP_RESULTS = "sweep.json"  # of a sweep that has its own machines
APPENDED_FILES = ("wal", EVENTS)
RESTORED_FILE = re.compile(r"(job|sweep)\.json|updates/[0-9]{1,20}|snapshots/[0-9]{1,20}/[a-z]{1,20}(\.[a-z]{1,20})?")


class Mirror:
    """The copy of one run directory below one prefix.

    Args:
        run_dir: The run directory.
        prefix: The run's prefix.
    """

    def __init__(self, run_dir: Path, prefix: S3Prefix) -> None:
        self._run_dir, self._prefix = run_dir, prefix
        self._sent = {name: _end_of(name, prefix.names(f"{name}/"), prefix) for name in APPENDED_FILES}
        self._files = {name: _number_of(run_dir / name) for name in APPENDED_FILES}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._one_at_a_time = threading.Lock()  # a thread that copies goes on when its awaiter is cancelled

    async def keep(self) -> None:
        """Copy what changed, every second, until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.copy)
            except Exception as error:  # noqa: BLE001 (S3's client has retried; a late copy does not end the run)
                logger.warning("%s: the copy is late: %r", self._prefix.url, error)
            await asyncio.sleep(COPY_SECONDS)

    def copy(self) -> None:
        """Copy what changed since the last time."""
        with self._one_at_a_time:
            self._copy()

    def _copy(self) -> None:
        replaced = [name for name in APPENDED_FILES if self._is_another(name)]
        appended = {name: self._appended(name) for name in APPENDED_FILES}  # before the files they refer to
        names = self._whole_files()
        if not all(self._copy_whole(name) for name in names):
            return  # a file that the log refers to was pruned meanwhile: the next pass copies its replacement
        for name, content in appended.items():
            if content:
                self._prefix.put(f"{name}/{self._sent[name]:015d}", content)
                self._sent[name] += len(content)
        for name in replaced:
            self._prefix.delete([key for key in self._prefix.names(f"{name}/") if key != f"{name}/{0:015d}"])
        removed = self._stamps.keys() - set(names)
        self._prefix.delete(removed)
        for name in removed:
            del self._stamps[name]

    def _whole_files(self) -> list[str]:
        """List the files to copy whole, a snapshot's manifest after its data; one without a manifest is unfinished."""
        manifests = sorted(self._run_dir.glob("snapshots/*/manifest.json"))
        states = sorted(self._run_dir.glob("snapshots/*/state.safetensors"))
        snapshots = [
            path
            for manifest in manifests
            for path in (manifest.with_name("network"), *manifest.parent.glob("*.npz"), manifest)
        ]
        curves = sorted(self._run_dir.glob("tensorboard/*"))
        paths = [
            *(self._run_dir / name for name in ("job.json", SWEEP_RESULTS) if (self._run_dir / name).exists()),
            *curves,
            *sorted(self._run_dir.glob("updates/*")),
            *states,
            *snapshots,
        ]
        return [str(path.relative_to(self._run_dir)) for path in paths]

    def _copy_whole(self, name: str) -> bool:
        """Copy a file if it has changed; return False if it was pruned meanwhile."""
        try:
            stat = (self._run_dir / name).stat()
            stamp = stat.st_mtime_ns, stat.st_size
            if self._stamps.get(name) != stamp:
                self._prefix.put_file(name, self._run_dir / name)
                self._stamps[name] = stamp
        except FileNotFoundError:
            return False
        return True

    def _is_another(self, name: str) -> bool:
        """Return whether a growing file was replaced, as a damaged log is; its copy then begins anew."""
        number, before = _number_of(self._run_dir / name), self._files[name]
        self._files[name] = number
        if before is None or number in (None, before):
            return False
        self._sent[name] = 0
        return True

    def _appended(self, name: str) -> bytes:
        """Return the whole lines after the part that was sent."""
        path = self._run_dir / name
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self._sent[name])
            content = file.read()
        return content[: content.rfind(b"\n") + 1]


def restore(prefix: S3Prefix, run_dir: Path) -> bool:
    """Make a run directory from its copy, and of nothing else that is there; return False if there is none."""
    keys = prefix.names()
    if not any(key.startswith("wal/") or key.endswith("/manifest.json") or key == SWEEP_RESULTS for key in keys):
        return False
    make_private(run_dir)
    for key in keys:
        if RESTORED_FILE.fullmatch(key):
            make_private((run_dir / key).parent)
            prefix.get_file(key, run_dir / key)
    for name in APPENDED_FILES:
        write_whole(run_dir / name, b"".join(_content(prefix, key) for key in keys if key.startswith(f"{name}/")))
    return True


def tail(prefix: S3Prefix, name: str, take: Callable[[bytes], None], after: str = "") -> str:
    """Call `take` with a growing file's new lines; return what to pass as `after` next time."""
    for key in prefix.names(f"{name}/", after):
        take(_content(prefix, key))
        after = key
    return after


def events(prefix: S3Prefix) -> list[dict[str, Any]]:
    """Return all events of a run so far."""
    result: list[dict[str, Any]] = []
    tail(prefix, EVENTS, lambda content: result.extend(parse(content.splitlines())))
    return result


def append_events(prefix: S3Prefix, more: Iterable[Mapping[str, Any]]) -> None:
    """Add to the copy of a run's events while no head adds to it."""
    end = _end_of(EVENTS, prefix.names(f"{EVENTS}/"), prefix)
    prefix.put(f"{EVENTS}/{end:015d}", "".join(f"{json.dumps(event)}\n" for event in more).encode())


def _content(prefix: S3Prefix, key: str) -> bytes:
    stored = prefix.get(key)
    return stored.content if stored else b""


def _number_of(path: Path) -> int | None:
    """Return a file's inode number; None if there is no such file."""
    return path.stat().st_ino if path.exists() else None


def _end_of(name: str, keys: list[str], prefix: S3Prefix) -> int:
    """Return the byte at which the copy of a growing file ends."""
    if not keys:
        return 0
    with reading(f"{prefix.url}{keys[-1]}", "take that object away"):
        start = int(keys[-1].removeprefix(f"{name}/"))
    return start + len(_content(prefix, keys[-1]))
