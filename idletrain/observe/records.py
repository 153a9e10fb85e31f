"""The records of a run: one JSON line for each event. All displays, reports and metrics are made from these alone.

Every line has `v` (the schema's version), `t` (seconds since the Unix epoch), `s` (seconds since this head started)
and `kind`. The kinds and their fields:

    run_started      run, version, subnets, rounds, phases (their number), policy, target, method, local_steps,
                     parameters, groups, resumed_at, samples (of the training data; null if unknown), samples_a_step,
                     run_dir, dashboard, dashboard_note, command, job, versions, hardware, exchange, better (`higher` or
                     `lower` by metric), code (digests of the user's own classes and functions by name), data_files
                     (digests of the data's files by path), and with a forecast expected (a round's seconds: pull,
                     compute, push, commit) and why; of sparse rows data (rows, features, labels, without_labels,
                     repaired_rows)
    phase_started    round, phase, subnets, copies, local_steps (where training.phases are several; the first one's are
                     those of run_started)
    worker_joining   worker
    joining_failed   worker
    worker_joined    worker, name, memory_bytes, device, steps_per_second, cohort, pid
    worker_refused   worker, reason
    worker_at_risk   worker
    worker_notice    worker
    worker_left      worker, name, cause (notice, kill, hang or end)
    worker_sick      worker, name, cause (hang, faults or frozen), reason
    leased           round, subnet, attempt, worker, step, backup (beside a slow worker that has the subnet, too)
    progress_saved   round, subnet, attempt, steps
    lost             round, subnet, attempt, worker, cause, kept_steps, lost_steps, kept_seconds, norm_fraction (if
                     above 0, the kept part is that share of an update's squared norm)
    staged           round, subnet, attempt, worker, steps, train_seconds, norm_fraction (share of the update's squared
                     norm that arrived), missing_rows (share of its rows that did not)
    late_rows_added  round, subnet, attempt, bytes (of rows missing from an earlier update, added at the next commit)
    refused          round, subnet, attempt, reply, where (the first tensor that is not finite)
    attempt_ended    round, subnet, attempt, worker, ended, and the worker's report, if it lives: steps, reply,
                     pull_seconds, wait_seconds (until it could train), train_seconds, push_seconds, pull_bytes,
                     push_bytes, pull_wait_seconds and push_wait_seconds (while the worker moves another subnet),
                     transport, unsent_bytes (left out of its push), late_bytes (of earlier pushes, sent now)
                     and dropped_bytes (no longer accepted); of a very wide output sampler_draws and
                     sampler_fallbacks (batches for which nothing was retrieved); in lockstep peer_bytes; out of core
                     plan, streamed, swapped_bytes, saved_peak_bytes and compiled (the part of the activations' memory
                     that compiled steps took; null for a plan)
    round_committed  round, steps, seconds, commit_seconds, bytes_down, bytes_up, shares, measured (seconds: pull,
                     compute, push, commit), loss (mean training loss of the subnets' last steps), lr (learning rate of
                     the last step), under preemption.policy: rolling least_trained (the least steps of a neuron, over
                     the mean's), and with a forecast expected (likewise)
    evaluated        round, accuracy, loss, calibration_error, temperature, constant_loss (of the best prediction that
                     is the same for all samples), metrics (by name; null where one is no number), samples (of the
                     test data, if not all were used), seconds
    best             round, metric, value (the best network so far; its snapshot is kept)
    warning          round, reason (the assembled network is much worse than its subnets)
    snapshot         round, seconds
    paused, resumed  reason
    stopping         reason
    trial            text (what a trial of a sweep that has its own machines has come to)
    instance_launched  instance, role, type, zone, market, usd_per_hour, on_demand_usd_per_hour
    instance_ended   instance, reason
    spot_price       type, zone, usd_per_hour
    waiting          reason
    run_ended        status, rounds, accuracy, loss, calibration_error, temperature, constant_loss, metrics, best_round,
                     params_sha256, run_dir, reason (where it failed or stopped early); the last event of a head

Under preemption.policy: rolling the `round` of a subnet's kinds (leased to attempt_ended) is how many subnets its lane
had before; that of all others is the clock's, as a neuron has had on average.

A reader ignores kinds and fields that it does not know. `v` increases when a known one changes its meaning; a reader
refuses records of any other schema.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from idletrain.errors import RunError
from idletrain.observe.record_fields import is_sound
from idletrain.storage import owner_only

logger = logging.getLogger(__name__)
SCHEMA = 2
DONE_STATUSES = ("completed", "reached", "stopped-early")  # of runs that came to their end
Record = dict[str, Any]
Sink = Callable[[Record], None]


class Recorder:
    """Write events to a file and pass them to sinks (displays, callbacks).

    Args:
        path: The run's `events.jsonl`; lines are appended.
        sinks: Called with every event, in order.
        complete: Called with every event first, to add fields.
    """

    def __init__(self, path: Path, sinks: Iterable[Sink] = (), complete: Sink = lambda _event: None) -> None:
        self._file: TextIO | None = None
        try:
            cut = _ends_within_a_line(path)
            self._file = open(path, "a", buffering=1, opener=owner_only)  # noqa: SIM115 (closed by `close`)
            if cut:
                self._file.write("\n")
        except OSError as error:  # records never block a run
            logger.warning("%s cannot be written (%s): the run goes on without its records", path, error.strerror)
        self._sinks, self._complete = tuple(sinks), complete
        self._started, self._ended = time.monotonic(), False

    def __call__(self, kind: str, **fields: Any) -> None:
        """Record an event, unless the run's end has been recorded: what workers still send then changes nothing.

        A full disk loses lines here but never the run, which needs only the write-ahead log.
        """
        if self._ended:
            return
        self._ended = kind == "run_ended"
        event = {"v": SCHEMA, "t": time.time(), "s": time.monotonic() - self._started, "kind": kind, **fields}
        self._complete(event)
        if self._file:
            with contextlib.suppress(OSError):
                self._file.write(json.dumps(event) + "\n")
        for sink in self._sinks:
            sink(event)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            with contextlib.suppress(OSError):
                self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Return whether the last line is incomplete, as a head was killed while it wrote it."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """Yield the events of a run's file, which may still grow.

    Raises:
        OSError: There is no such file.
        RunError: An idletrain of another schema wrote it.
    """
    with path.open(errors="replace") as file:
        yield from parse(file)


def parse(lines: Iterable[str | bytes]) -> Iterator[Record]:
    """Yield the events in lines, without those that are incomplete or damaged (see `record_fields`).

    Raises:
        RunError: An idletrain of another schema wrote all of them; a single one is damaged.
    """
    any_sound, other = False, SCHEMA
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict) or "kind" not in event:
            continue
        if event.get("v", SCHEMA) != SCHEMA:
            other = event["v"] if type(event["v"]) is int else other
        elif is_sound(event):
            any_sound = True
            yield event
    if other != SCHEMA and not any_sound:
        which = "a newer" if other > SCHEMA else "the older"
        raise RunError(f"these records are of schema {other} and this idletrain reads {SCHEMA}; use {which} version")
