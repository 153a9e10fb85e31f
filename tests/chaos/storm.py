"""A long storm: run after run, with random faults of every kind at once, until the time is over.

    PYTHONPATH=tests python -m tests.chaos.storm [--minutes 60] [--seed N] [--json FILE]

Runs are of three kinds: on processes that the head starts, on a Dask scheduler with workers of its own, and in a
rehearsal cloud. Each is disturbed until it ends; its parameters must have the bits of the undisturbed run, its log
must verify, and no process, temporary file, lock, socket or cloud resource of it may be left. The first run that breaks
one of these ends the storm.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import psutil

from benchmarks.report import Figure, at_least, at_most, report
from idletrain.job_file import parse_job

from . import leftovers, steered
from .helpers import Cluster, Control, Process, Run, destroy_all, job_tree, runs, tmpfs, train_alone, until
from .spot_storm import SpotStorm, spot_tree
from .test_disk import fill

ROUNDS, SUBNETS, WORKERS = 40, 3, 3
STEP_SECONDS = 0.03  # so that faults hit subnets in the middle
FAULTS_A_RUN = 16
MOST_RUN_SECONDS = 240.0
MINUTES, FAULTS_WANTED = 60.0, 300
DISK, IS_ROOT = "16m", os.geteuid() == 0
A_BUG, DAMAGED = "a bug, not your fault", "head killed, file damaged"


class Storm:
    """One disturbed run.

    Args:
        scratch: A directory of its own.
        dice: Chooses faults and moments.
        digests: What the parameters must be after each round.
        own_cluster: Whether it runs on a scheduler of its own.
    """

    def __init__(self, scratch: Path, dice: random.Random, digests: list[str], *, own_cluster: bool) -> None:
        self.started: list[Process] = []
        self.faults: Counter[str] = Counter()
        self._dice, self._digests, self._scratch = dice, digests, scratch
        self._control = Control(scratch / "control")
        self._context = contextlib.ExitStack()
        own = leftovers.own_temporary(scratch / "own", self._control.path)
        self._context.enter_context(mock.patch.dict(os.environ, own))
        self._disk = self._context.enter_context(tmpfs(scratch / "runs", DISK)) if IS_ROOT else None
        self._silent: list[socket.socket] = []
        training = {"loss": f"{steered.__name__}:faulty_loss"}
        tree = job_tree(
            scratch / "runs",
            rounds=ROUNDS,
            subnets=SUBNETS,
            nodes=WORKERS,
            training=training,
            preemption={"progress_every": "50ms", "lease": "3s"},
            checkpoint={"every": "1s", "keep": 2},
        )
        self._run = Run(tree, self._control, scratch, self.started)
        self._cluster = Cluster(self._control, scratch, self.started) if own_cluster else None
        self._workers: list[Process] = []
        self._numbers = itertools.count()
        self._refill()
        (self._control.path / "slow-all").write_text(str(STEP_SECONDS))

    def end(self) -> None:
        """End every process of the run."""
        destroy_all(self.started)
        self._hang_up()
        self._context.close()

    def weather(self) -> None:
        """Disturb the run until it has had its faults, then let it end, and check it."""
        head = self._run.launch(*self._arguments())
        began = time.monotonic()
        kinds = self._kinds()
        while sum(self.faults.values()) < FAULTS_A_RUN and time.monotonic() - began < MOST_RUN_SECONDS / 2:
            time.sleep(self._dice.uniform(0.1, 1.5))
            if not head.running:
                if self._is_over():
                    break
                head = self._resume()
                continue
            kind = self._dice.choice(sorted(kinds))
            if kinds[kind](head):
                self.faults[kind] += 1
        self._calm()
        while not self._is_over():
            if not head.running:
                head = self._resume()
            assert time.monotonic() - began < MOST_RUN_SECONDS, f"the run does not end:\n{head.text}"
            time.sleep(0.2)
        until("the head's end", lambda: not head.running)
        self._check(head)

    def _kinds(self) -> dict[str, Callable[[Process], bool]]:
        return {
            "worker killed": lambda _: self._signal(signal.SIGKILL),
            "worker warned": lambda _: self._signal(signal.SIGTERM),
            "worker stopped and continued": lambda _: self._pause(),
            "worker computes NaN": lambda _: self._make_sick("nan"),
            "worker fails": lambda _: self._make_sick("raise"),
            "worker is slow": lambda _: self._make_sick("slow", "1.0"),
            "worker hangs": lambda _: self._make_sick("hang"),
            "head killed": self._kill_head,
            DAMAGED: self._kill_head_and_damage,
            "scheduler killed": self._kill_scheduler,
            "half-open connections": self._say_nothing,
            "clock jumped": self._set_clock,
            **({"disk full": self._fill_disk} if self._disk else {}),
        }

    def _victims(self) -> list[psutil.Process]:
        return [process for process in self._run.workers().values() if runs(process)]

    def _signal(self, number: signal.Signals) -> bool:
        if not (victims := self._victims()):
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self._dice.choice(victims).send_signal(number)
        self._refill()
        return True

    def _pause(self) -> bool:
        if not (victims := self._victims()):
            return False
        victim = self._dice.choice(victims)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
            time.sleep(self._dice.uniform(0.5, 4.0))
            victim.resume()
        return True

    def _make_sick(self, how: str, content: str = "") -> bool:
        """Make one worker sick for a while; never all of them, or it would be the job's fault."""
        joined = [e["name"] for e in self._run.events("worker_joined")][-WORKERS:]
        ill = list(self._control.path.glob(f"{how}-*"))
        if not joined or [path for path in ill if path.name != "slow-all"]:
            return False
        (self._control.path / f"{how}-{self._dice.choice(joined)}").write_text(content)
        return True

    def _kill_head(self, head: Process) -> bool:
        head.send(signal.SIGKILL)
        head.exit_code()
        return True

    def _kill_head_and_damage(self, head: Process) -> bool:
        """Damage the log, an update or a snapshot that is not the only one."""
        self._kill_head(head)
        until("the head's workers' end", lambda: not (self._cluster is None and head.survivors()))
        snapshots = sorted(self._run.dir.glob("snapshots/*/network"))
        files = [self._run.dir / "wal", *self._run.dir.glob("updates/*"), *snapshots[1:]]
        victim = self._dice.choice([path for path in files if path.exists() and path.stat().st_size] or [None])
        if victim is None:
            return False
        content = bytearray(victim.read_bytes())
        content[self._dice.randrange(len(content))] ^= 1 << self._dice.randrange(8)
        victim.write_bytes(content)
        return True

    def _kill_scheduler(self, head: Process) -> bool:
        """Kill the run's own scheduler or the user's, after which the head gives up and all workers end."""
        if self._cluster:
            scheduler = self._cluster.scheduler.pid
        else:
            try:
                scheduler = json.loads((self._run.dir / "cluster.json").read_bytes())["pid"]
            except (FileNotFoundError, ValueError):
                return False
        head.look()
        with contextlib.suppress(ProcessLookupError):
            os.kill(scheduler, signal.SIGKILL)
        until("the end of a head without a scheduler", lambda: not head.running)
        if self._cluster:
            until("the end of workers without a scheduler", lambda: not any(w.running for w in self._workers))
            self._cluster = Cluster(self._control, self._scratch, self.started)
        return not self._is_over()

    def _say_nothing(self, head: Process) -> bool:
        """Open connections to every port of the run, which stay open until the next time, and say nothing."""
        self._hang_up()
        head.look()
        processes = [*head.family.values(), *(psutil.Process(w.pid) for w in self._workers if w.running)]
        processes += [psutil.Process(self._cluster.scheduler.pid)] if self._cluster else []
        self._silent = leftovers.half_open(processes)
        return len(self._silent) >= leftovers.HALF_OPEN

    def _hang_up(self) -> None:
        for connection in self._silent:
            connection.close()

    def _set_clock(self, head: Process) -> bool:
        """Shift the wall clock of all processes of the run, until the next time."""
        shift = leftovers.set_clock(self._control.path, self._dice)
        return self._seen(head, lambda: leftovers.has_jumped(self._run.events(), shift))

    def _fill_disk(self, head: Process) -> bool:
        """Take all room while workers train, until the head says that it waits for some."""
        if not (self._disk and self._victims()):
            return False
        told = len(leftovers.NO_ROOM.findall(head.text))
        ballast = fill(self._disk)
        try:
            return self._seen(head, lambda: len(leftovers.NO_ROOM.findall(head.text)) > told)
        finally:
            ballast.unlink()

    def _seen(self, head: Process, condition: Callable[[], bool]) -> bool:
        """Return whether something happens before the head ends, or soon."""
        ends_at = time.monotonic() + leftovers.SEEN_SECONDS
        while head.running and time.monotonic() < ends_at:
            if condition():
                return True
            time.sleep(0.1)
        return condition()

    def _refill(self) -> None:
        if self._cluster:
            alive = [worker for worker in self._workers if worker.running]
            names = [f"w{next(self._numbers)}" for _ in range(WORKERS - len(alive))]
            more = [self._cluster.idletrain_worker("--name", name) for name in names]
            self._workers = [*alive, *more]

    def _calm(self) -> None:
        for file in self._control.path.glob("*-*"):
            file.unlink()
        self._refill()

    def _arguments(self) -> tuple[str, ...]:
        return ("--scheduler", self._cluster.address) if self._cluster else ()

    def _resume(self) -> Process:
        self._refill()
        resume = ("--resume",) if (self._run.dir / "job.json").exists() and self._has_state() else ()
        return self._run.launch(*resume, *self._arguments())

    def _has_state(self) -> bool:
        return (self._run.dir / "wal").exists() or any(self._run.dir.glob("snapshots/*/manifest.json"))

    def _is_over(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            records = self._run.records()
            return bool(records) and records[-1]["kind"] == "end" and records[-1]["status"] == "completed"
        return False

    def _check(self, head: Process) -> None:
        end = self._run.check(None, damaged=self.faults[DAMAGED] > 0)
        assert end["params_sha256"] == self._digests[ROUNDS], f"other bits after {dict(self.faults)}:\n{head.text}"
        until("the end of the head's processes", lambda: not head.survivors(), 10)
        assert leftovers.of_run(self._run.dir) == []
        assert leftovers.temporary(self._scratch / "own") == []
        assert not [process.text for process in self.started if A_BUG in process.text]


def main(argv: list[str] | None = None) -> None:
    """Storm until the time is over, then write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    dice, ends_at = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    digests = train_alone(parse_job(job_tree(Path(), rounds=ROUNDS, subnets=SUBNETS)))
    spot_digests = train_alone(parse_job(spot_tree()))
    places: dict[str, Callable[[Path], Storm | SpotStorm]] = {
        "on local workers": lambda scratch: Storm(scratch, dice, digests, own_cluster=False),
        "on a scheduler": lambda scratch: Storm(scratch, dice, digests, own_cluster=True),
        "in a rehearsal cloud": lambda scratch: SpotStorm(scratch, dice, spot_digests),
    }
    faults: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    print(f"seed {options.seed}")
    for place in itertools.cycle(places):
        if time.monotonic() >= ends_at:
            break
        scratch = Path(tempfile.mkdtemp(prefix="idletrain-storm-"))
        storm = places[place](scratch)
        try:
            storm.weather()
        finally:
            storm.end()
        shutil.rmtree(scratch)
        faults += storm.faults
        ran[place] += 1
        print(f"{sum(ran.values())} runs, {sum(faults.values())} faults: the same bits, nothing left", flush=True)
    figures = [
        at_least(f"faults in {options.minutes:.0f} minutes", sum(faults.values()), "", FAULTS_WANTED),
        *(Figure(f"runs {place}", count, "") for place, count in ran.items()),
        at_most("runs that ended in other bits, or did not end", 0, "", 0),
        at_most("processes that were left", 0, "", 0),
        *(Figure(f"of them: {kind}", count, "") for kind, count in faults.most_common()),
    ]
    options.tiny = options.minutes < MINUTES
    report("storm", options, figures, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
