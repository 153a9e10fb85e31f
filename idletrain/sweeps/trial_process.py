"""A trial's `idletrain launch` in a process of its own: a fork of one that has imported what it needs.

The imports of a launch and its workers take some seconds of two cores, which each trial would spend again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from idletrain.cluster import forked_processes
from idletrain.cluster.forked_processes import ForkedProcess
from idletrain.job import Job

LONGEST_LINE = 1 << 20  # of a round's JSON
YOUNG_SECONDS = 1.0  # a process that is forked forgets the signals of its first milliseconds
# What a launch imports beside its workers, while it starts.
MODULES = (
    "idletrain.autotune.choose",
    "idletrain.cli.job_check",
    "idletrain.cluster.dask_scheduler",
    "idletrain.nn.models",
    "idletrain.observe.display",
    "idletrain.providers.table",
    "idletrain.run",
)


def warm_up() -> None:
    """Import what trials need in another process, meanwhile.

    Raises:
        OSError: no process can be started.
    """
    forked_processes.warm_up(os.environ, MODULES)


class TrialProcess:
    """A launch under way (see `TrialUnderWay`).

    Args:
        process: Its process, which ends in order when this one does.
        output: The lines that it prints.
        errors: The file of its errors.
    """

    def __init__(
        self, process: ForkedProcess | subprocess.Popen[bytes], output: asyncio.StreamReader, errors: Path
    ) -> None:
        self._process, self._output, self._errors = process, output, errors
        self._started_at = time.monotonic()

    async def records(self) -> AsyncIterator[dict[str, Any]]:
        """Yield its summary after each round and at its end."""
        async for line in self._output:
            if record := _record_in(line):
                yield record

    def interrupt(self) -> None:
        """Stop it as Ctrl-C does, once it is old enough to notice."""
        young = YOUNG_SECONDS - (time.monotonic() - self._started_at)
        if young > 0:
            asyncio.get_running_loop().call_later(young, self._process.send_signal, signal.SIGINT)
        else:
            self._process.send_signal(signal.SIGINT)

    async def wait(self) -> str:
        """Wait for its end, whatever it still prints; return why it failed, if it did."""
        while await self._output.read(LONGEST_LINE):
            pass
        code = await asyncio.to_thread(self._process.wait)
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        own = [line for line in lines if line.startswith("idletrain: ")] or lines
        return (own or [f"it ended with exit code {code}"])[-1].removeprefix("idletrain: ") if code else ""

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()


@contextlib.asynccontextmanager
async def launched(job: Job, *, again: bool, options: Sequence[str]) -> AsyncIterator[TrialProcess]:
    """Run `idletrain launch`; kill it if it outlives the context.

    Args:
        job: What to run.
        again: Go on with it, as `--resume` does.
        options: More arguments.
    """
    output, (ours, theirs) = asyncio.StreamReader(limit=LONGEST_LINE), os.pipe()
    with tempfile.TemporaryDirectory(prefix="idletrain-sweep-") as folder, os.fdopen(theirs, "wb") as printed:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", 0)
        )
        file, errors = Path(folder, "job.yaml"), Path(folder, "errors")
        file.write_text(job.model_dump_json(exclude_unset=True))  # JSON is YAML, too, and quotes all text
        process = forked_processes.start(
            ("launch", str(file), "--json", *(("--resume",) if again else ()), *options),
            errors,
            os.environ,
            output=printed.fileno(),
            at_parents_end=signal.SIGTERM,
            has_forks=True,
        )
        printed.close()
        trial = TrialProcess(process, output, errors)
        try:
            yield trial
        finally:
            trial.kill()
            transport.close()


def _record_in(line: bytes) -> dict[str, Any]:
    """Return the object of a line of a launch; an empty one if the user's own code has printed it."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("rounds"), int):
            return record
    return {}
