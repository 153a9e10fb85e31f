"""A run in a rehearsal cloud of its own, with random faults until it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from rehearsal import Sandbox

from idletrain.cloud.aws.account import Account
from idletrain.cloud.machines import RUNNING_STATES
from idletrain.cloud.worker_node import SCHEDULER_SECONDS
from idletrain.cluster import dask_scheduler, fork_server
from idletrain.job_file import parse_job
from idletrain.rounds.durable import s3_mirror

from . import leftovers
from .helpers import PATIENCE_SECONDS, check_log, tmpfs, until
from .spot_run import Launcher, job_tree
from .test_disk import fill

NAME, ROUNDS = "storm", 40
FAULTS, MOST_HEADS = 12, 2
MOST_SECONDS = 900.0
NOTICE_SECONDS = 3.0
DISK, IS_ROOT = "64m", os.geteuid() == 0
REFUSALS: tuple[dict[str, Any], ...] = (
    {"mode": "empty", "status": 503},
    {"mode": "html", "status": 500},
    {"mode": "drop-reply"},
    {"code": "RequestLimitExceeded", "status": 503},
    {"code": "ExpiredToken"},
)


def spot_tree() -> dict[str, Any]:
    """Return the job of every such run, as plain values."""
    return job_tree(NAME, rounds=ROUNDS)


class SpotStorm:
    """One disturbed run.

    Args:
        scratch: A directory of its own.
        dice: Chooses faults and moments.
        digests: What the parameters must be after each round.
    """

    def __init__(self, scratch: Path, dice: random.Random, digests: list[str]) -> None:
        self.faults: Counter[str] = Counter()
        self._scratch, self._dice, self._digests = scratch, dice, digests
        self._silent: list[socket.socket] = []
        self._context = contextlib.ExitStack()
        own = leftovers.own_temporary(scratch / "own", scratch)
        self._context.enter_context(mock.patch.dict(os.environ, own))
        # Of all machines; where no small one can be mounted, none is filled.
        self._disk = self._context.enter_context(tmpfs(scratch / "own" / "tmp", DISK)) if IS_ROOT else None
        with mock.patch.dict(os.environ, leftovers.STEADY):  # a cloud's own clock is right
            self._cloud = Sandbox(scratch / "machines")
        self._context.enter_context(mock.patch.dict(os.environ, self._cloud.environment))
        self._run = Launcher(self._cloud, Account(), spot_tree(), scratch)

    def end(self) -> None:
        """End the run and its cloud, whatever became of them."""
        self._run.end()
        self._hang_up()
        self._cloud.close()
        self._context.close()

    def weather(self) -> None:
        """Disturb the run until it has had its faults, then let it end, and check it."""
        began = time.monotonic()
        self._run.until("a round", lambda: self._run.events("round_committed"))
        kinds = self._kinds()
        while sum(self.faults.values()) < FAULTS and self._run.process.poll() is None:
            assert time.monotonic() - began < MOST_SECONDS, f"the run does not go on:\n{self._run.output()}"
            time.sleep(self._dice.uniform(0.2, 2.0))
            kind = self._dice.choice(sorted(kinds))
            if kinds[kind]():
                self.faults[kind] += 1
        self._check(self._run.process.wait(MOST_SECONDS))

    def _kinds(self) -> dict[str, Callable[[], bool]]:
        return {
            "spot node given notice": lambda: self._ask("notice", seconds=NOTICE_SECONDS),
            "spot node taken": lambda: self._ask("take"),
            "spot node at risk": lambda: self._ask("rebalance"),
            "spot node taken, its replacement refused": self._take_and_refuse,
            "spot node's worker killed": lambda: self._signal(signal.SIGKILL),
            "spot node's worker stopped and continued": self._pause,
            "head's machine ended": self._end_head,
            "head's scheduler killed": self._kill_scheduler,
            "clock jumped": self._set_clock,
            **({"disk full": self._fill_disk} if self._disk else {}),
            "half-open connections": self._say_nothing,
        }

    def _node(self) -> str | None:
        """Return one of the spot instances whose worker has joined, while another trains, else nothing."""
        spot = {i.id for i in self._run.account.instances(NAME, RUNNING_STATES) if i.pool.market == "spot"}
        there = sorted(spot & self._run.workers().keys())
        return self._dice.choice(there) if len(there) > 1 else None

    def _ask(self, what: str, **body: Any) -> bool:
        if (node := self._node()) is None:
            return False
        with contextlib.suppress(OSError):  # it may be gone since
            self._cloud.ask("POST", what, instance=node, **body)
            return True
        return False

    def _take_and_refuse(self) -> bool:
        if self._cloud.ask("GET", "faults") or self._node() is None:
            return False
        self._cloud.ask("POST", "fault", action="CreateFleet", **self._dice.choice(REFUSALS))
        return self._ask("take")

    def _workers_of(self, node: str) -> list[psutil.Process]:
        found = []
        for pid in self._cloud.pids(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found += [process] if process.name() == fork_server.title("idletrain", ["worker"]) else []
        return found

    def _signal(self, number: signal.Signals) -> bool:
        workers = self._workers_of(node) if (node := self._node()) else []
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(number)
        return bool(workers)

    def _pause(self) -> bool:
        workers = self._workers_of(node) if (node := self._node()) else []
        for number, seconds in ((signal.SIGSTOP, self._dice.uniform(0.5, 4.0)), (signal.SIGCONT, 0.0)):
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(number)
            time.sleep(seconds if workers else 0.0)
        return bool(workers)

    def _say_nothing(self) -> bool:
        """Open connections to every port of every machine, which stay open until the next time, and say nothing."""
        self._hang_up()
        running = [i.id for i in self._run.account.instances(NAME, RUNNING_STATES)]
        processes = []
        for pid in itertools.chain.from_iterable(map(self._cloud.pids, running)):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        self._silent = leftovers.half_open(processes)
        return len(self._silent) >= leftovers.HALF_OPEN

    def _hang_up(self) -> None:
        for connection in self._silent:
            connection.close()

    def _head(self) -> str | None:
        """Return the machine of the head, of which at most two are ended in a run."""
        heads = [i.id for i in self._run.account.instances(NAME, RUNNING_STATES) if i.role == "head"]
        ended = self.faults["head's machine ended"] + self.faults["head's scheduler killed"]
        return heads[0] if heads and ended < MOST_HEADS else None

    def _end_head(self) -> bool:
        """End the machine of the head, and go on from what it left."""
        if (head := self._head()) is None:
            return False
        self._run.account.terminate([head])
        self._go_on()
        return True

    def _kill_scheduler(self) -> bool:
        """Kill the scheduler's process on the head, after which the head gives up, and go on from what it left."""
        pids = self._cloud.pids(head) if (head := self._head()) else []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if dask_scheduler.__name__ in psutil.Process(pid).cmdline():
                    os.kill(pid, signal.SIGKILL)
                    self._go_on()
                    return True
        return False

    def _go_on(self) -> None:
        until("the launcher's end", lambda: self._run.process.poll() is not None)
        # A node that has just booted waits for its head to boot, too.
        seconds = SCHEDULER_SECONDS + PATIENCE_SECONDS
        until("the nodes' own end", lambda: not self._cloud.inventory()["processes"], seconds)
        self._run.end()
        starts = len(self._run.events("run_started"))
        self._run = Launcher(self._cloud, self._run.account, spot_tree(), self._scratch, "--resume")
        self._run.until("a round", lambda: self._run.events("run_started")[starts:])

    def _set_clock(self) -> bool:
        """Shift the wall clock of all machines, until the next time."""
        shift = leftovers.set_clock(self._scratch, self._dice)
        return self._seen(lambda: leftovers.has_jumped(self._run.events(), shift))

    def _fill_disk(self) -> bool:
        """Take all room of the machines while they train, until the head says that it waits for some."""
        if self._disk is None or self._node() is None:
            return False
        before = len(leftovers.NO_ROOM.findall(self._run.output()))
        ballast = fill(self._disk)
        try:
            return self._seen(lambda: len(leftovers.NO_ROOM.findall(self._run.output())) > before)
        finally:
            ballast.unlink()

    def _seen(self, condition: Callable[[], bool]) -> bool:
        """Return whether something happens before the launcher ends, or soon."""
        ends_at = time.monotonic() + leftovers.SEEN_SECONDS
        while self._run.process.poll() is None and time.monotonic() < ends_at:
            if condition():
                return True
            time.sleep(0.2)
        return condition()

    def _check(self, code: int) -> None:
        assert code == 0, f"after {dict(self.faults)}:\n{self._run.output()}"
        assert self._run.last()["params_sha256"] == self._digests[ROUNDS], f"other bits after {dict(self.faults)}"
        until("the end of every machine", lambda: not self._cloud.inventory()["processes"])
        assert not any(self._cloud.inventory().values()), self._cloud.inventory()
        assert not self._cloud.ec2.describe_volumes()["Volumes"]
        assert s3_mirror.restore(self._run.prefix, self._scratch / "copy")
        assert check_log(self._scratch / "copy" / "wal", parse_job(spot_tree()))["status"] == "completed"
        until("the machines' directories to go", lambda: not leftovers.temporary(self._scratch / "own"))
