"""Compare the core-seconds of whole runs with those of a bare torch loop of the same steps.

The job of `idletrain demo`, as `idletrain launch` runs it on this machine: without churn, and with a worker taken every
15 s. Before and after each run two processes make as many steps on subnets of the same width in a plain loop
(`local_steps.bare`), one thread each. Core-seconds are those that Linux counts, imports included, by role: the head,
its scheduler, the parent of its workers, and of the workers the main thread and the others, one of which trains.

    python -m benchmarks.efficiency [--tiny] [--json FILE]

Targets: a bare loop's core-seconds over a run's of at least 0.80 without churn, and 0.70 with; evaluations, with what
they estimate first, of at most 2 % of the core-seconds (their wall seconds, in which they wait for cores as well).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from benchmarks.local_steps import bare
from benchmarks.report import Figure, at_least, at_most, report, with_preset
from benchmarks.runs import of_kind
from idletrain.cli.start import TEMPLATES
from idletrain.job_file import parse_job
from idletrain.nn.network import Network
from idletrain.nn.prepare import from_settings
from idletrain.nn.rolling import equal_specs
from idletrain.observe.records import read_records

SAMPLE_SECONDS = 0.2
EVALUATIONS = 2.0  # % of the core-seconds
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ROLES = ("head", "scheduler", "parent of the workers", "workers' main threads", "workers' other threads")


@dataclass(frozen=True)
class Preset:
    """A job, and the intervals at which a worker is taken; 0 for never."""

    job: Mapping[str, Any]
    workers: tuple[int, ...]
    churn: tuple[tuple[int, float], ...]  # seconds, and the target
    loops: int = 2  # processes of the bare loop


DEMO = TEMPLATES / "demo.yaml"
TINY_JOB = {
    "name": "tiny",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 10]}},
    "data": {"name": "digits"},
    "training": {
        "method": "ist",
        "subnets": 4,
        "local_steps": 20,
        "rounds": 3,
        "optimizer": {"name": "sgd", "lr": 0.1},
    },
    "preemption": {"policy": "rolling"},
}
FULL = Preset(yaml.safe_load(DEMO.read_text()), (2, 4), ((0, 0.80), (15, 0.70)))
TINY = Preset(TINY_JOB, (2,), ((0, 0.80),), loops=1)


class Roles:
    """The core-seconds of a run's processes, by role, as they were last seen."""

    def __init__(self, head: int) -> None:
        self._head = head
        self._seconds: dict[tuple[str, int, int], float] = {}  # by role, process and thread

    def look(self) -> None:
        """Read what the processes have used so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            head = psutil.Process(self._head)
            for process in (head, *head.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    name = process.name()
                    for thread in process.threads():
                        main = thread.id == process.pid
                        used = thread.user_time + thread.system_time
                        self._seconds[self._role(name, process.pid, main=main), process.pid, thread.id] = used

    def _role(self, name: str, pid: int, *, main: bool) -> str:
        if pid == self._head:
            return ROLES[0]
        if name.startswith("idletrain-work"):
            return ROLES[3] if main else ROLES[4]
        return ROLES[1] if name.startswith("idletrain-dask") else ROLES[2]

    def total(self) -> dict[str, float]:
        """Return the core-seconds of each role."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for (role, _, _), used in self._seconds.items():
            seconds[role] += used
        return {role: seconds[role] for role in ROLES}


def launched(tree: Mapping[str, Any], workers: int, churn: int) -> dict[str, Any]:
    """Run a job to its end by the command line; return its core-seconds, wall seconds and summary."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        job = {**tree, "nodes": {"count": workers}, "checkpoint": {"to": folder}}
        (Path(folder) / "job.yaml").write_text(yaml.safe_dump(job))
        options = ["--churn", f"{churn}s"] if churn else []
        command = [sys.executable, "-m", "idletrain", "launch", f"{folder}/job.yaml", "--json", *options]
        started = time.perf_counter()
        environment = {**os.environ, **ONE_THREAD}  # or evaluations would use more cores than their seconds tell
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env=environment
        ) as process:
            assert process.stdout is not None
            roles = Roles(process.pid)
            with background(process.stdout) as lines:
                while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                    roles.look()
                    time.sleep(SAMPLE_SECONDS)
            process.returncode = os.waitstatus_to_exitcode(ended[1])
        seconds, used = time.perf_counter() - started, ended[2].ru_utime + ended[2].ru_stime
        assert process.returncode == 0, lines
        events = read_records(Path(folder) / tree["name"] / "events.jsonl")
        evaluations = sum(event["seconds"] for event in of_kind(list(events), "evaluated"))
        measured = {"core_seconds": used, "seconds": seconds, "evaluation_seconds": evaluations}
        return {**measured, "roles": roles.total(), "summary": json.loads(lines[-1])}


@contextlib.contextmanager
def background(stream: Any) -> Iterator[list[str]]:
    """Read a stream's lines meanwhile."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(line.decode() for line in stream))
    reader.start()
    yield lines
    reader.join()


def loop(tree: Mapping[str, Any], steps: int) -> None:
    """Make steps of a subnet in a plain loop, in this process."""
    torch.set_num_threads(1)
    job = parse_job({**tree, "checkpoint": {"to": "."}})
    prepared = from_settings(job.model, job.data, job.training)
    subnet = prepared.program.subnets(0, equal_specs(prepared.program))[0]
    step = bare(prepared, subnet, Network.of(prepared.program, prepared.network).pull(subnet))
    for number in range(steps):
        step(number)


def bare_loops(tree: Mapping[str, Any], steps: int, processes: int) -> dict[str, float]:
    """Run a plain loop of so many steps, divided among processes; return its core-seconds and wall seconds."""
    code = f"from benchmarks.efficiency import loop; loop({dict(tree)!r}, {steps // processes})"
    environment = {**os.environ, **ONE_THREAD}
    started = time.perf_counter()
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(processes)]
    used = 0.0
    for process in running:
        _, status, resources = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        used += resources.ru_utime + resources.ru_stime
    return {"core_seconds": used, "seconds": time.perf_counter() - started}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report; the bare loop runs before and after each run, whose pace the machine's changes."""
    options, preset = with_preset(__doc__, argv, FULL, TINY)
    training = parse_job({**preset.job, "checkpoint": {"to": "."}}).training
    steps = round(training.subnets * (1 + training.slack)) * training.local_steps * training.rounds
    runs, plain = [], [bare_loops(preset.job, steps, preset.loops)]
    for workers in preset.workers:
        for churn, target in preset.churn:
            runs.append({"workers": workers, "churn": churn, "target": target, **launched(preset.job, workers, churn)})
            plain.append(bare_loops(preset.job, steps, preset.loops))
    used = [loops["core_seconds"] for loops in plain]
    figures = [Figure(f"bare loop: core-seconds of {steps:,} steps", statistics.median(used), "s", samples=used)]
    for run, before, after in zip(runs, plain, plain[1:], strict=False):
        figures += figures_of(run, {name: (before[name] + after[name]) / 2 for name in before})
    return report("efficiency", options, figures, bare=plain, runs=runs)


def figures_of(run: Mapping[str, Any], plain: Mapping[str, float]) -> list[Figure]:
    """Return the figures of a run beside those of the bare loops around it."""
    name = f"{run['workers']} workers" + (f", one taken every {run['churn']} s" if run["churn"] else "")
    return [
        Figure(f"{name}: core-seconds", run["core_seconds"], "s"),
        Figure(f"{name}: wall seconds / bare loop's", run["seconds"] / plain["seconds"], ""),
        Figure(f"{name}: goodput", 100 * run["summary"]["goodput"], "%"),
        *(Figure(f"{name}: {role}", seconds, "s") for role, seconds in run["roles"].items()),
        at_most(f"{name}: evaluations", 100 * run["evaluation_seconds"] / run["core_seconds"], "%", EVALUATIONS),
        at_least(
            f"{name}: bare loop's core-seconds / run's", plain["core_seconds"] / run["core_seconds"], "", run["target"]
        ),
    ]


if __name__ == "__main__":
    main()
