"""Processes of tests as forks of one warm parent: hundreds of them need the same imports, of four seconds each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from idletrain.cluster import fork_server, forked_processes
from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT, ForkedProcess, WarmParent

# What heads, schedulers and workers import while they start.
MODULES = (
    "distributed.cli.dask_scheduler",
    "idletrain.cli.job_check",
    "idletrain.cli.plan_table",
    "idletrain.cloud.follow",
    "idletrain.cloud.launcher",
    "idletrain.cloud.sandbox.provider",
    "idletrain.autotune.choose",
    "idletrain.fabric.measuring.tasks",
    "idletrain.nn.models",
    "idletrain.observe.display",
    "idletrain.providers.table",
    "idletrain.run",
    "rich.live",
    "sklearn.datasets",
    "tensorboardX",
    "torch._dynamo",
)


def start(
    command: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start `python -m MODULE ...`, without input, in a session of its own; as a fork where that is the same."""
    return _fork(command, environment, output, folder) or execute(command, environment, output, folder)


def execute(
    command: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path
) -> subprocess.Popen[bytes]:
    """Start a command, without input, in a session of its own."""
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )


class NodeProcess(NamedTuple):
    """A fork on a testbed's node, as far as a `subprocess.Popen` with a pipe for its output is needed."""

    process: ForkedProcess
    stdout: IO[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self) -> int | None:
        return self.process.wait()


def start_on_node(
    command: Sequence[str], namespace: Path | None, environment: Mapping[str, str], folder: Path, errors: int
) -> NodeProcess | None:
    """Start `taskset -c CORE python -m MODULE ...` in a network namespace, None for this one, as a fork.

    Returns:
        The process, with a pipe for its output; None where a fork would not be the same.
    """
    match command:
        case ["taskset", "-c", core, sys.executable, "-m", *program] if (
            _imported(environment) == _parents_own() and _parent().can_start
        ):
            read, written = os.pipe()
            with Path(os.devnull).open("rb") as nothing:
                process = _parent().start(
                    [core, str(namespace or ""), *program],
                    Path(os.devnull),
                    environment,
                    module="on_node",
                    folder=folder,
                    path=[str(folder), *sys.path],
                    files=(nothing.fileno(), written, errors),
                    has_forks=not namespace,  # which a fork server of its own would not enter
                )
            os.close(written)
            return NodeProcess(process, os.fdopen(read, "rb"))
    return None


def run(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    given: str = "",
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` to its end with an input, like `subprocess.run`; as a fork where that is the same."""
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(given)
        stdin.seek(0)
        files = tuple(file.fileno() for file in (stdin, out, err))
        process = _fork(command, environment, Path(os.devnull), folder or Path.cwd(), files)
        if process is None:
            how = {"env": dict(environment), "cwd": folder, "timeout": timeout}
            return subprocess.run(command, input=given, capture_output=True, text=True, check=False, **how)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        assert code is not None
        return subprocess.CompletedProcess([*command], code, out.read(), err.read())


def _fork(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    folder: Path,
    files: Sequence[int] = (),
) -> ForkedProcess | None:
    """Start `python -m MODULE ...` as a fork; return None where that would not be the same."""
    match command:
        case [sys.executable, "-m", module, *arguments] if _imported(environment) == _parents_own():
            return _parent().start(
                arguments, output, environment, module=module, folder=folder, files=files, has_forks=True
            )
    return None


@cache
def _parent() -> WarmParent:
    _parents_own()
    return forked_processes.start_parent(os.environ, MODULES, lasting=True)


@cache
def _parents_own() -> tuple[str, ...]:
    """Return what decides how the parent imports modules, as it is when first asked for: before the parent starts."""
    return _imported(os.environ)


def _imported(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what decides how a process with this environment imports modules."""
    return environment.get("PYTHONPATH", ""), *fork_server.imported_under({**environment, **WORKER_ENVIRONMENT})
