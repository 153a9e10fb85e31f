"""What happened in a run: one JSON line an event. Everything shown to a person is drawn from these alone.

Every line has `v` (the schema's version), `t` (seconds since the Unix epoch), `s` (seconds since this head started)
and `kind`; the kinds and their fields:

    run_started      run, version, subnets, rounds, policy, target, method, local_steps, parameters, groups, resumed_at,
                     run_dir, dashboard, dashboard_note, command, job, versions, hardware, exchange, and with a
                     forecast expected (a round's seconds: pull, compute, push, commit) and why; of sparse rows data
                     (rows, features, labels, without_labels, mended)
    worker_joining   worker
    joining_failed   worker
    worker_joined    worker, name, memory_bytes, device, steps_per_second, cohort, pid
    worker_refused   worker, reason
    worker_at_risk   worker
    worker_notice    worker
    worker_left      worker, name, cause (notice, kill or end)
    leased           round, subnet, attempt, worker, step
    progress_saved   round, subnet, attempt, steps
    lost             round, subnet, attempt, worker, cause, kept_steps, lost_steps, kept_seconds, norm_fraction (if
                     above 0, what is kept is that share of an update's squared norm)
    staged           round, subnet, attempt, worker, steps, train_seconds, norm_fraction (of its squared norm),
                     missing_rows (share of its rows)
    late_rows_added  round, subnet, attempt, bytes (of rows that an update lacked, to be added at the next commit)
    refused          round, subnet, attempt, reply, where (the first tensor that is not finite)
    attempt_ended    round, subnet, attempt, worker, ended, and what the worker tells of it, if it lives: steps, reply,
                     pull_seconds, wait_seconds (for its turn to train), train_seconds, push_seconds, pull_bytes,
                     push_bytes, pull_wait_seconds and push_wait_seconds (while another of its worker moves),
                     transport, late_bytes (that its push left out), repaid_bytes (of earlier ones, sent now)
                     and given_up_bytes (that nobody takes any more); of a very wide output sampler_draws and
                     sampler_fallbacks (batches for which nothing was retrieved); in lockstep peer_bytes
    round_committed  round, steps, seconds, commit_seconds, bytes_down, bytes_up, shares, measured (seconds: pull,
                     compute, push, commit), loss (mean training loss of the subnets' last steps), and with a
                     forecast expected (likewise)
    evaluated        round, accuracy, loss, calibration_error, temperature, seconds
    warning          round, reason (the assembled network is much worse than its subnets)
    snapshot         round, seconds
    paused, resumed  reason
    stopping         reason
    instance_launched  instance, role, type, zone, market, usd_per_hour, on_demand_usd_per_hour
    instance_ended   instance, reason
    spot_price       type, zone, usd_per_hour
    waiting          reason
    run_ended        status, rounds, accuracy, loss, calibration_error, temperature, params_sha256,
                     run_dir, reason (where it failed)

A reader passes over kinds and fields that it does not know. `v` rises when a known one changes its meaning; a reader
refuses what is newer or older than itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from idletrain.errors import RunError

SCHEMA = 2
Record = dict[str, Any]
Sink = Callable[[Record], None]


class Recorder:
    """Writes events to a file and hands them to sinks (displays, callbacks).

    Args:
        path: The run's `events.jsonl`; lines are added.
        sinks: Called with every event, in order.
        complete: Adds to an event, before anyone gets it.
    """

    def __init__(self, path: Path, sinks: Iterable[Sink] = (), complete: Sink = lambda _event: None) -> None:
        cut = _ends_in_a_line(path)
        self._file = path.open("a", buffering=1)
        if cut:
            with contextlib.suppress(OSError):
                self._file.write("\n")
        self._sinks, self._complete = tuple(sinks), complete
        self._started = time.monotonic()

    def __call__(self, kind: str, **fields: Any) -> None:
        """Record an event. A full disk loses lines here, never the run: the ledger is what counts."""
        event = {"v": SCHEMA, "t": time.time(), "s": time.monotonic() - self._started, "kind": kind, **fields}
        self._complete(event)
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(event) + "\n")
        for sink in self._sinks:
            sink(event)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def _ends_in_a_line(path: Path) -> bool:
    """Whether a head was killed while it wrote one."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read(path: Path) -> Iterator[Record]:
    """The events of a run, also while it is going on.

    Raises:
        OSError: there is no such file.
        RunError: a newer idletrain wrote it.
    """
    with path.open(errors="replace") as file:
        yield from parse(file)


def parse(lines: Iterable[str | bytes]) -> Iterator[Record]:
    """The events in lines; what is no whole line (the last may be half written, a full disk cuts others) is left out.

    Raises:
        RunError: an idletrain of another schema wrote them.
    """
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or "kind" not in event:
            continue
        if event.get("v", SCHEMA) != SCHEMA:
            which = "a newer" if event["v"] > SCHEMA else "the older"
            raise RunError(
                f"these records are of schema {event['v']} and this idletrain reads {SCHEMA}; use {which} version"
            )
        yield event
