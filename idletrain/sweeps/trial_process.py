"""A trial's `idletrain launch` in a process of its own: a fork of one that has imported what it needs.

The imports of a launch and its workers take some seconds of two cores, which each trial would spend again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from idletrain.cluster import forked_processes
from idletrain.cluster.forked_processes import ForkedProcess

LONGEST_LINE = 1 << 20  # of a round's JSON
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
    """A launch under way.

    Args:
        process: Its process, which ends in order when this one does.
        output: The lines that it prints.
    """

    def __init__(self, process: ForkedProcess | subprocess.Popen[bytes], output: asyncio.StreamReader) -> None:
        self._process, self.output = process, output

    def interrupt(self) -> None:
        """Stop it as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    async def wait(self) -> int:
        """Wait for its end, whatever it still prints; return its exit code."""
        while await self.output.read(LONGEST_LINE):
            pass
        code = await asyncio.to_thread(self._process.wait)
        assert code is not None
        return code

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()


@contextlib.asynccontextmanager
async def launched(arguments: Sequence[str], errors: Path) -> AsyncIterator[TrialProcess]:
    """Run `idletrain launch` with these arguments; kill it if it outlives the context.

    Args:
        arguments: Its arguments.
        errors: A file for its errors.
    """
    output, (ours, theirs) = asyncio.StreamReader(limit=LONGEST_LINE), os.pipe()
    with os.fdopen(theirs, "wb") as printed:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", 0)
        )
        process = forked_processes.start(
            ("launch", *arguments),
            errors,
            os.environ,
            output=printed.fileno(),
            at_parents_end=signal.SIGTERM,
            has_forks=True,
        )
    trial = TrialProcess(process, output)
    try:
        yield trial
    finally:
        trial.kill()
        transport.close()
