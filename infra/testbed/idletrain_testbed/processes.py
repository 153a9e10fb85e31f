"""Start processes in an instance, and end all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from idletrain_testbed import cgroups
from idletrain_testbed.instance import SWITCH, Instance
from idletrain_testbed.settings import TestbedError

SYSCTL = Path("/proc/sys/net")  # of the calling thread's namespace
CLONE_NEWNET = 0x40000000  # linux/sched.h
ENDING_SECONDS = 10.0  # a process that does not die of SIGKILL for so long hangs in the kernel
# Becomes the program in place, so that its process keeps the number: first into the cgroups named before --.
ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 126; shift; done; shift; exec "$@"'


def into(instance: Instance, node: str) -> list[str]:
    """Return the prefix of a command that runs on a node, in the process that starts it."""
    mounted = cgroups.hierarchies(cgroups.MOUNTS.read_text())
    files = [str(file) for file in cgroups.entrances(mounted, instance.name, node)]
    join = ["/bin/sh", "-c", ENTER, "sh", *files, "--"] if files else []
    return [*join, *nsenter(instance, node)]


def nsenter(instance: Instance, node: str) -> list[str]:
    """Return the prefix of a command that runs in a node's namespace without the node's limits."""
    return [shutil.which("nsenter") or "nsenter", f"--net={instance.namespace_path(node)}", "--"]


def enter(namespace: Path) -> None:
    """Move the calling thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12
    with namespace.open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))


def write_settings(namespace: Path, settings: Mapping[str, str]) -> None:
    """Write a namespace's network settings, those that its kernel has."""
    faults: list[OSError] = []

    def write() -> None:  # in a thread of its own, which takes the namespace with it when it ends
        try:
            enter(namespace)
            for name, text in settings.items():
                if (SYSCTL / name).exists():
                    (SYSCTL / name).write_text(text)
        except OSError as fault:
            faults.append(fault)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]


def start_delayer(instance: Instance, delay_seconds: float) -> None:
    """Start the process that delays packets; it runs in the switch's namespace and ends with it."""
    spaces = [str(instance.namespace_path(node)) for node in instance.nodes]
    argv = [sys.executable, "-m", "idletrain_testbed.delayer", str(delay_seconds), *spaces]
    started = subprocess.run([*nsenter(instance, SWITCH), *argv], capture_output=True, text=True, check=False)
    if started.returncode:
        raise TestbedError(f"Packets cannot be delayed here ({started.stderr.strip()}): do without --delay.")


def end(instance: Instance) -> None:
    """Kill every process in the instance, and wait until all are gone.

    Raises:
        TestbedError: some do not end.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while pids := _inside(instance):
        _kill(instance, pids)
        if time.monotonic() > deadline:
            raise TestbedError(f"Processes {sorted(pids)} do not end: they hang in the kernel; run `down` again later.")
        time.sleep(0.005)


def _kill(instance: Instance, pids: set[int]) -> None:
    with contextlib.ExitStack() as closing:
        handles = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handles[pid] = os.pidfd_open(pid)
                closing.callback(os.close, handles[pid])
        for pid in _inside(instance) & handles.keys():  # once more: a number may be another process' by now
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handles[pid], signal.SIGKILL)


def _inside(instance: Instance) -> set[int]:
    """Return the processes in the instance's namespaces, or only in its cgroups: just starting, or moved by hand."""
    spaces = {_identity(instance.namespace_path(node)) for node in instance.namespaces()} - {None}
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    in_namespaces = {pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) in spaces}
    return in_namespaces | cgroups.inhabitants(cgroups.hierarchies(cgroups.MOUNTS.read_text()), instance.name)


def _identity(namespace: Path) -> tuple[int, int] | None:
    try:
        status = namespace.stat()
    except OSError:  # ended, or a zombie
        return None
    return status.st_dev, status.st_ino
