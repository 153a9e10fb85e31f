"""Store schedules: one JSON file each in a directory, with its history and its lease beside it.

NAME.json            the schedule; locked while its history is read and written
NAME.job             the job that a cloud runs, if one starts it
NAME.history.jsonl   the last executions, one a line
NAME.lease           locked by the running execution, and by the run it started
NAME.waiting         locked by the one execution that may wait for it
NAME.log             the last run's output
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from idletrain.errors import DamageError, JobError
from idletrain.schedules.cron import Execution, Schedule, cron_fault, zone_fault
from idletrain.storage import write_whole

HISTORY_LENGTH = 20
Executions = tuple[Execution, ...]


class ScheduleStore:
    """The schedules of one directory.

    Args:
        directory: Holds the files; created when the first schedule is added.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    def names(self) -> list[str]:
        """Return the names of all schedules, sorted."""
        return sorted(path.stem for path in self.directory.glob("*.json"))

    def get(self, name: str) -> Schedule:
        """Read a schedule.

        Raises:
            JobError: there is none of this name.
            DamageError: its file is not a schedule.
        """
        path = self.path(name, "json")
        try:
            return _schedule(json.loads(path.read_text()))
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none"
            raise JobError(f"NAME: there is no schedule {name}; there are: {known}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise DamageError(
                f"{path} is not a schedule ({reason}); `idletrain schedule remove {name}`, and add it again"
            ) from None

    def add(self, schedule: Schedule, job: str | None = None) -> None:
        """Write a schedule to its file, after the job that a cloud runs, without which it could not be removed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if job is not None:
            write_whole(self.path(schedule.name, "job"), job.encode())
        content = json.dumps(_plain(schedule), indent=1) + "\n"
        write_whole(self.path(schedule.name, "json"), content.encode())

    def remove(self, name: str) -> None:
        """Delete a schedule; a running run is left alone."""
        for path in self.directory.glob(f"{name}.*"):
            path.unlink()

    def history(self, name: str) -> Executions:
        """Return a schedule's last executions, the oldest first."""
        path = self.path(name, "history.jsonl")
        try:
            return tuple(_execution(json.loads(line)) for line in path.read_text().splitlines())
        except FileNotFoundError:
            return ()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamageError(f"{path} is not a history ({error}); remove it to start an empty one") from None

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Callable[[Sequence[Execution]], None]]:
        """Lock a schedule's history against other processes; yield the function that writes it.

        Raises:
            JobError: the schedule does not exist any more.
        """
        try:
            file = self.path(name, "json").open("rb")
        except FileNotFoundError:
            raise JobError(f"NAME: there is no schedule {name} any more; add it again") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield lambda history: self._write_history(name, history)

    @contextlib.contextmanager
    def locked(self, name: str, lock: str) -> Iterator[IO[bytes] | None]:
        """Acquire a schedule's `lease` or `waiting` lock; yield the file that holds it, or None if another has it."""
        with self.path(name, lock).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield file

    @contextlib.contextmanager
    def waited(self, name: str) -> Iterator[IO[bytes]]:
        """Wait for a schedule's lease, acquire it and yield the file that holds it."""
        with self.path(name, "lease").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def path(self, name: str, suffix: str) -> Path:
        """Return the path of one of a schedule's files."""
        return self.directory / f"{name}.{suffix}"

    def _write_history(self, name: str, history: Sequence[Execution]) -> None:
        lines = [json.dumps(_plain(execution)) + "\n" for execution in history[-HISTORY_LENGTH:]]
        write_whole(self.path(name, "history.jsonl"), "".join(lines).encode())


def _plain(record: Schedule | Execution) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in fields.items()}


def _schedule(fields: dict[str, Any]) -> Schedule:
    created = datetime.fromisoformat(fields["created"])
    read = {"created": created, "varied": tuple(fields.get("varied", ()))}
    if wrong := [name for name, value in fields.items() if name not in read and not isinstance(value, str)]:
        raise ValueError(f"{', '.join(wrong)} should be text")
    if created.tzinfo is None:
        raise ValueError("created should have a time zone")
    if fault := cron_fault(fields["cron"]) or zone_fault(fields["tz"]):
        raise ValueError(fault)
    return Schedule(**{**fields, **read})


def _execution(fields: dict[str, Any]) -> Execution:
    timestamps = {k: datetime.fromisoformat(fields[k]) for k in ("due", "started", "ended") if fields[k]}
    return Execution(**{**fields, **timestamps})
