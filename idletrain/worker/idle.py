"""Lend a machine only while its owner does not need it: a watcher process starts a worker and stops it again.

The worker is a child of the watcher, so that a machine in use carries neither its CPU time nor its memory. It is
stopped by a notice (SIGTERM): the running subnet is pushed to the store first.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from idletrain.cluster import owned_process
from idletrain.cluster.shutdown import on_ending

logger = logging.getLogger(__name__)
SAMPLE_SECONDS = 1.0  # reading all processes takes some 15 ms: a hundredth of a core
LEAVE_SECONDS = 2.0  # any shorter, and the start of a program would stop the worker
JOIN_SECONDS = 10.0  # longer than a pause in somebody's work: starting a worker takes seconds, too
MAX_SAMPLES = 60  # more than any window holds
STOPPED_EXIT = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The share of all cores that others used since the previous sample."""

    at_seconds: float
    others: float


def parse_share(text: str) -> float:
    """Parse `20%` or `0.2` as a share.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ValueError("should be a share of the machine such as 20%")
    return share


def should_lend(samples: Sequence[Sample], share: float, *, lending: bool, join_seconds: float = JOIN_SECONDS) -> bool:
    """Return whether the machine should be lent now.

    It is taken back once others used more than `share` on average over the last LEAVE_SECONDS, and lent again once they
    used less over the last `join_seconds`; with too few samples the state stays as it is.
    """
    window_seconds = LEAVE_SECONDS if lending else join_seconds
    if not samples or samples[-1].at_seconds - samples[0].at_seconds < window_seconds:
        return lending
    since = samples[-1].at_seconds - window_seconds
    recent = [s.others for s in samples if s.at_seconds > since]
    mean = sum(recent) / len(recent)
    return mean <= share if lending else mean < share


def others_share() -> Iterator[float]:
    """Yield the share of all cores that processes other than this one and its children used since the last value."""
    own = psutil.Process()
    cores = psutil.cpu_count() or 1
    then, busy_then, own_then = time.monotonic(), _busy_seconds(), _tree_seconds(own)
    while True:
        now, busy, own_now = time.monotonic(), _busy_seconds(), _tree_seconds(own)
        available = cores * max(now - then, 1e-3)
        yield min(max((busy - busy_then - (own_now - own_then)) / available, 0.0), 1.0)
        then, busy_then, own_then = now, busy, own_now


def lend_while_idle(worker: Sequence[str], share: float) -> int:
    """Lend this machine as `watch` does, until SIGTERM or Ctrl-C; return the exit code."""
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
    join_seconds: float = JOIN_SECONDS,
) -> int:
    """Lend this machine whenever others leave it idle, until `stop` is set or the worker ends by itself.

    Args:
        worker: The arguments of `idletrain` that start the worker.
        share: The share of all cores that others may use meanwhile, from 0 to 1.
        stop: Set by the caller to end.
        others: Yields the share that others used, one value a sample.
        say: Called with a sentence at every change.
        join_seconds: How long the machine must be idle before it is lent.

    Returns:
        The worker's exit code if it ended by itself, else STOPPED_EXIT.
    """
    samples: list[Sample] = []
    process: subprocess.Popen[bytes] | None = None
    try:
        while not stop.wait(SAMPLE_SECONDS):
            samples.append(Sample(time.monotonic(), next(others)))
            samples = samples[-MAX_SAMPLES:]
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
    # In a session of its own: the watcher handles Ctrl-C, and a second signal would cut the drain short.
    # The watcher's own end, by whatever cause, is a notice.
    command = owned_process.command("idletrain", *worker, number=signal.SIGTERM)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _take_back(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait()


def _busy_seconds() -> float:
    """Return the CPU seconds that this machine has spent, without those that a hypervisor took from it."""
    spent = psutil.cpu_times()
    return sum(getattr(spent, kind, 0.0) for kind in ("user", "system", "nice", "irq", "softirq"))


def _tree_seconds(root: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants; a parent holds those of its children that ended."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += spent.user + spent.system + getattr(spent, "children_user", 0) + getattr(spent, "children_system", 0)
    return total
