"""Run instances as processes: each runs its real user data under a supervisor that cleans up everything it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, MutableMapping
from pathlib import Path
from typing import Any

from idletrain.cloud.sandbox import shims, supervisor
from idletrain.cloud.sandbox.metadata import Facts, MetadataServer
from idletrain.cloud.sandbox.signatures import Keys, machine_keys
from idletrain.cluster import forked_processes
from idletrain.cluster.forked_processes import WarmParent

IDLE = ("sleep", "infinity")  # an instance without user data just runs
END_SECONDS = 5.0
PRELOADED = ("idletrain.cloud.worker_node", "idletrain.cloud.head_run", "idletrain.cloud.aws.provider")  # of `node`


def warm_up() -> WarmParent:
    """Import meanwhile what machines will need: they are forks of one process.

    Raises:
        OSError: that process cannot be started.
    """
    return forked_processes.start_parent(_base_environment(), PRELOADED, lasting=True)


class MachineProcess:
    """A running machine.

    Args:
        instance: Its instance id.
        program: Its user data.
        metadata: Its metadata service, which is closed with it.
        endpoint: The cloud's endpoint.
        memory_bytes: RAM that it reports.
        log: File for its output.
        parent: What starts its supervisor.
    """

    def __init__(
        self,
        instance: str,
        program: bytes,
        metadata: MetadataServer,
        endpoint: str,
        memory_bytes: int,
        log: Path,
        parent: WarmParent,
    ) -> None:
        self.metadata = metadata
        self._directory = directory = Path(tempfile.mkdtemp(prefix=f"{instance}-"))  # mkdtemp's mode is 0700
        with contextlib.ExitStack() as undo:  # of a machine that does not start, for want of room on a disk say
            undo.callback(self.clear)
            (directory / "tmp").mkdir()
            (directory / "bin").mkdir()
            _shim(directory / "bin" / "shutdown", "shutdown")
            _shim(directory / "bin" / "install", "install", str(directory))
            _shim(directory / "bin" / "docker", "docker", str(directory), str(memory_bytes))
            (directory / "user-data").write_bytes(program)
            command = ("bash", "user-data") if program.startswith(b"#!") else IDLE
            self._process = parent.start(
                (str(directory), *command),
                log,
                _environment(directory, endpoint, self.metadata.endpoint),
                module=supervisor.__name__,
                folder=directory,
                at_parents_end=signal.SIGTERM,
            )
            undo.pop_all()

    def pids(self, family: dict[int, list[int]]) -> list[int]:
        """Return the machine's processes without its supervisor, given all processes' children by parent."""
        return supervisor.descendants(self._process.pid, family) if self._process.pid else []

    def ended(self) -> bool:
        """Return whether its program has ended, and all that it started."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it as a power cut would; it is gone a moment later."""
        self.metadata.close()
        self._process.send_signal(signal.SIGTERM)

    def clear(self) -> None:
        """Delete what it has left: a supervisor that was ended before it began deletes nothing."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def wait(self) -> None:
        """Wait until it is gone."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (*self.pids(supervisor.family()), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


class MachineProcesses:
    """The processes of all machines. One thread starts and ends them, others may read.

    Args:
        endpoint: The cloud's endpoint.
        memory_bytes: RAM that each machine reports.
        logs: Directory for their output.
        keys: The cloud's keys by their id; each machine's are among them while it runs.
        parent: What starts them.
    """

    def __init__(
        self, endpoint: str, memory_bytes: int, logs: Path, keys: MutableMapping[str, Keys], parent: WarmParent
    ) -> None:
        self._endpoint, self._memory_bytes, self._logs, self._keys = endpoint, memory_bytes, logs, keys
        self._running: dict[str, MachineProcess] = {}
        self._dying: dict[str, MachineProcess] = {}
        self._parent = parent

    def boot(
        self, instance: str, program: bytes, get_facts: Callable[[], Facts], shut_down: Callable[[float], None]
    ) -> None:
        """Start an instance's machine.

        Args:
            instance: Its id.
            program: Its user data.
            get_facts: Returns its metadata.
            shut_down: Called with the seconds after which the machine wants to end.
        """
        keys = machine_keys()
        metadata = MetadataServer(get_facts, keys, shut_down)
        log = self._logs / f"{instance}.log"
        try:
            machine = MachineProcess(instance, program, metadata, self._endpoint, self._memory_bytes, log, self._parent)
        except OSError:
            metadata.close()
            raise
        self._running[instance], self._keys[keys.id] = machine, keys

    def keep_only(self, instances: Collection[str]) -> None:
        """Kill the machines of all other instances."""
        for id_ in self._running.keys() - instances:
            self._dying[id_] = self._running[id_]  # first, so that `processes` always finds it
            machine = self._running.pop(id_)
            self._keys.pop(machine.metadata.keys.id, None)
            machine.kill()
        for id_ in [id_ for id_, machine in self._dying.items() if machine.ended()]:
            self._dying.pop(id_).clear()

    def running(self) -> frozenset[str]:
        """Return the instances whose machines were started and not killed."""
        return frozenset(self._running)

    def ended(self) -> frozenset[str]:
        """Return the instances whose machines ended by themselves."""
        return frozenset(id_ for id_, machine in self._running.items() if machine.ended())

    def processes(self) -> list[dict[str, Any]]:
        """List the processes that still run, dying machines included."""
        family = supervisor.family()
        machines = {id_: m for id_, m in {**self._dying, **self._running}.items() if not m.ended()}
        return [{"instance": id_, "pids": machine.pids(family)} for id_, machine in machines.items()]

    def close(self) -> None:
        """Kill all and wait until they are gone."""
        self.keep_only(())
        for machine in self._dying.values():
            machine.wait()
            machine.clear()


def _environment(directory: Path, endpoint: str, metadata: str) -> dict[str, str]:
    """Return a machine's environment; its credentials come from its metadata."""
    base = _base_environment()
    return {
        **base,
        "PATH": f"{directory / 'bin'}{os.pathsep}{base['PATH']}",
        "HOME": str(directory),
        "TMPDIR": str(directory / "tmp"),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata,
    }


def _base_environment() -> dict[str, str]:
    """Return what the environments of all machines have in common: of ours only PATH and PYTHONPATH."""
    inherited = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **inherited}


def _shim(path: Path, *arguments: str) -> None:
    command = shlex.join([sys.executable, "-I", "-S", shims.__file__, *arguments])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
