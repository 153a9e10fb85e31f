"""Run one machine's user data and containers, and clean up everything that they started, as a fork of a warm parent:

python -m idletrain.cloud.sandbox.supervisor DIRECTORY [COMMAND...]

A container is a fork of this process, which has imported what it needs; `docker` asks for it at a socket in the
machine's directory. The machine ends when the command ends or on SIGTERM, which comes also when the sandbox is killed.
Its processes are killed even outside its process group, and its directory is deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from idletrain.cloud.sandbox.shims import DOOR
from idletrain.cluster import fork_server

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>: orphans below us become our children
WAKES = 4096
REAP_SECONDS = 0.002  # about as long as a killed process takes to end


def family() -> dict[int, list[int]]:
    """Return the ids of all processes of this computer by parent, zombies included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def descendants(root: int, children: dict[int, list[int]]) -> list[int]:
    """Return the ids of all direct and indirect children of a process."""
    pids = list(children.get(root, ()))
    for pid in pids:  # grows while it is walked
        pids.extend(children.get(pid, ()))
    return pids


def kill_all() -> None:
    """Kill every descendant, including those that are started meanwhile."""
    while pids := descendants(os.getpid(), family()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(REAP_SECONDS)


def main(directory: str, *command: str) -> None:
    """Run the command until it ends or a SIGTERM arrives; in a container, run that instead."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own, machine = os.getpid(), Machine(directory, command)
    if request := machine.run():
        _contain(request, own)
        return
    kill_all()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


class Machine:
    """A machine at work.

    Args:
        directory: Its directory.
        command: Its user data's command.
    """

    def __init__(self, directory: str, command: Sequence[str]) -> None:
        self._ended = False  # before a SIGTERM may say otherwise
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._end())
        self._door = socket.socket(socket.AF_UNIX)
        os.chdir(directory)  # a socket's path has at most 107 letters
        self._door.bind(DOOR)
        self._door.listen()
        self._containers: dict[int, socket.socket] = {}  # the client of each, by its process id
        # Kept whole: one that is dropped would bury a program that has ended already, and the machine never know.
        self._program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def run(self) -> fork_server.Request | None:
        """Start and reap processes until the machine's end; return None, or in a container what it is to run."""
        while not self._ended:
            ready, _, _ = select.select([self._wake, self._door.fileno()], [], [])
            if self._wake in ready:
                os.read(self._wake, WAKES)
            if self._door.fileno() in ready and (request := self._start_container()):
                return request
            self._reap()
        return None

    def _end(self) -> None:
        self._ended = True

    def _start_container(self) -> fork_server.Request | None:
        """Fork a container for the next client; return None, or in the container its request."""
        client, _ = self._door.accept()
        requests = fork_server.Requests(client)
        while (received := requests.read()) == []:
            pass
        if not received:
            client.close()
            return None
        if not (pid := os.fork()):
            for descriptor in (self._wake, self._woken):
                os.close(descriptor)
            for connection in (self._door, client, *self._containers.values()):
                connection.close()
            return received[0]
        for descriptor in received[0]["files"]:
            os.close(descriptor)
        self._containers[pid] = client
        return None

    def _reap(self) -> None:
        """Bury the processes that have ended, orphans included; tell of containers."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                self._ended |= pid == self._program.pid
                if client := self._containers.pop(pid, None):
                    with client, contextlib.suppress(OSError):  # it has ended, too
                        client.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _contain(request: fork_server.Request, parent: int) -> None:
    """Run a container: `idletrain` with the variables that it is given and no others."""
    environment, arguments = request["environment"], request["arguments"]
    if _fits(environment):
        how = {"module": "idletrain", "folder": str(Path.cwd()), "path": None}
        fork_server.run({**request, **how, "at_parents_end": int(signal.SIGKILL), "has_forks": True}, parent)
        return
    for to, descriptor in enumerate(request["files"]):
        os.dup2(descriptor, to)
    os.execve(sys.executable, [sys.executable, "-m", "idletrain", *arguments], environment)  # noqa: S606


def _fits(environment: Mapping[str, str]) -> bool:
    """Whether this process has imported what a process with these variables would import."""
    places = set(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    same = fork_server.imported_under(environment) == fork_server.imported_under(os.environ)
    return same and places <= set(sys.path)


if __name__ == "__main__":
    main(*sys.argv[1:])
