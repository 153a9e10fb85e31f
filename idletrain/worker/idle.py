"""Lending a machine only while its owner does not need it: a watcher process that starts a worker and takes it back.

The worker is a child of the watcher, so that a machine in use carries neither its CPU time nor its memory. Taking it
back is a notice (SIGTERM): the running subnet is pushed home first.
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from idletrain.cluster.shutdown import on_ending, when_parent_ends

logger = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0  # reading all processes takes some 15 ms: a hundredth of a core
LEAVE_SECONDS = 2.0  # any shorter, and a program that starts would send the worker away
QUIET_SECONDS = 10.0  # a pause in somebody's work is no reason to come: starting a worker takes seconds, too
KEPT_SAMPLES = 60  # more than any window holds
STOPPED_EXIT = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What share of all cores others used up to a moment, since the sample before."""

    at_seconds: float
    others: float


def parse_share(text: str) -> float:
    """Turn `20%` or `0.2` into a share.

    Raises:
        ValueError: it is not one between nothing and all.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ValueError("should be a share of the machine such as 20%")
    return share


def should_lend(samples: Sequence[Sample], share: float, *, lending: bool, join_seconds: float = QUIET_SECONDS) -> bool:
    """Whether the machine should be lent now.

    It is taken back once others used more than `share` over the last LEAVE_SECONDS, and lent again once they used less
    over the last `join_seconds`; too few samples change nothing.
    """
    window_seconds = LEAVE_SECONDS if lending else join_seconds
    if not samples or samples[-1].at_seconds - samples[0].at_seconds < window_seconds:
        return lending
    since = samples[-1].at_seconds - window_seconds
    recent = [s.others for s in samples if s.at_seconds > since]
    mean = sum(recent) / len(recent)
    return mean <= share if lending else mean < share


def others_share() -> Iterator[float]:
    """The share of all cores that processes other than this one and its children used since the value before."""
    own = psutil.Process()
    cores = psutil.cpu_count() or 1
    then, busy_then, ours_then = time.monotonic(), _busy_seconds(), _tree_seconds(own)
    while True:
        now, busy, ours = time.monotonic(), _busy_seconds(), _tree_seconds(own)
        available = cores * max(now - then, 1e-3)
        yield min(max((busy - busy_then - (ours - ours_then)) / available, 0.0), 1.0)
        then, busy_then, ours_then = now, busy, ours


def lend_while_idle(worker: Sequence[str], share: float) -> int:
    """Lend this machine as `watch` does, until SIGTERM or Ctrl-C; returns the exit code."""
    stop = threading.Event()
    others = others_share()
    next(others)  # counts from here on
    logger.info("waiting until others use less than %.0f%% of this machine", 100 * share)
    with on_ending(stop.set):
        return watch(worker, share, stop, others, logger.info)


def watch(
    worker: Sequence[str],
    share: float,
    stop: threading.Event,
    others: Iterator[float],
    say: Callable[[str], None],
    *,
    join_seconds: float = QUIET_SECONDS,
) -> int:
    """Lend this machine whenever others leave it alone, until told to stop or until the worker ends by itself.

    Args:
        worker: The arguments of `idletrain` that start the worker.
        share: How much of all cores others may use meanwhile, from 0 to 1.
        stop: Set from outside to end.
        others: What they use, one value a sample.
        say: Told of every change.
        join_seconds: How long others must leave the machine alone before it is lent.

    Returns:
        The worker's exit code if it ended by itself.
    """
    samples: list[Sample] = []
    process: subprocess.Popen[bytes] | None = None
    try:
        while not stop.wait(SAMPLE_SECONDS):
            samples.append(Sample(time.monotonic(), next(others)))
            samples = samples[-KEPT_SAMPLES:]
            if process and process.poll() is not None:
                return process.returncode
            wanted = should_lend(samples, share, lending=process is not None, join_seconds=join_seconds)
            if wanted and process is None:
                say(f"others use {samples[-1].others:.0%} of this machine: lending it")
                process = _start(worker)
            elif process and not wanted:
                say(f"others use {samples[-1].others:.0%} of this machine: taking it back")
                _take_back(process)
                process = None
                samples.clear()
    finally:
        if process:
            _take_back(process)
    return STOPPED_EXIT


def _start(worker: Sequence[str]) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C is the watcher's to handle, and a second signal would cost the drain.
    return subprocess.Popen([sys.executable, "-m", __name__, *worker], stdin=subprocess.PIPE, start_new_session=True)


def _take_back(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait()
    if process.stdin:
        process.stdin.close()


def _busy_seconds() -> float:
    """CPU time that this machine has spent on anything; what a hypervisor took from it is not its owner's."""
    spent = psutil.cpu_times()
    return sum(getattr(spent, kind, 0.0) for kind in ("user", "system", "nice", "irq", "softirq"))


def _tree_seconds(root: psutil.Process) -> float:
    """CPU time of a process and all below it; that of those who ended is kept by whoever started them."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += spent.user + spent.system + getattr(spent, "children_user", 0) + getattr(spent, "children_system", 0)
    return total


if __name__ == "__main__":  # the child: a worker that takes the end of its watcher, however it comes, as a notice
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    runpy.run_module("idletrain", run_name="__main__", alter_sys=True)
