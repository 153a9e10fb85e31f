"""Measure the cost of the dashboard's page with 100 workers.

The events of a churned run of 100 workers are fed to a head's summary at the pace of a real run, ten rounds a minute;
the head publishes them to a real scheduler in a process of its own, as `idletrain launch` does. Its CPU time is
measured while nobody views the page, and while three viewers load it, twice a second each; so is the head's.

    python -m benchmarks.page [--tiny] [--json FILE]

Targets: an update at least once a second, under 5 % of a core in the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from distributed import Client, Worker
from tornado.httpclient import AsyncHTTPClient, HTTPClientError

from benchmarks.report import Figure, at_least, at_most, report, with_preset
from idletrain.cluster import dask_scheduler, dask_settings
from idletrain.observe.dashboard_feed import publishing
from idletrain.observe.records import Record
from idletrain.observe.summary import Summary

PLAYED_ROUND_SECONDS = 6.0
VIEWERS = 3
LOOK_SECONDS = 0.5  # as page.js does
PAGE_SECONDS = 60  # until the scheduler has imported Dask's pages


@dataclass(frozen=True)
class Preset:
    """The run's size, and the length of each phase."""

    workers: int = 100
    phase_seconds: float = 30.0
    rounds_before: int = 600


TINY = Preset(workers=5, phase_seconds=2.0, rounds_before=5)


def first_events(workers: int) -> Iterator[Record]:
    """Yield the events of a run's start, up to its workers."""
    yield {
        "kind": "run_started", "s": 0.0, "run": "bench", "subnets": workers, "rounds": 100_000, "policy": "salvage",
        "method": "ist", "target": 0.9, "local_steps": 400, "parameters": 1, "resumed_at": 0, "run_dir": "runs/bench",
        "dashboard": "",
    }  # fmt: skip
    for n in range(workers):
        yield _joined(n, 0.0)


def round_events(workers: int, number: int) -> list[Record]:
    """Return a round's events, of which every 20th subnet's worker is killed and replaced; `s` is within the run."""
    start = number * PLAYED_ROUND_SECONDS
    events: list[Record] = []
    for k in range(workers):
        where = {"round": number, "subnet": k, "worker": _address(k)}
        attempt = number * 2 * workers + k
        events += [{"kind": "leased", "s": start + k / workers, **where, "attempt": attempt, "step": 0}]
        events += [{"kind": "progress_saved", "s": start + 2 + k / workers, **where, "attempt": attempt, "steps": 200}]
        if (k + number) % 20 == 0:
            s = start + 3
            events += [
                {"kind": "worker_left", "s": s, "worker": _address(k), "name": f"node-{k}", "cause": "kill"},
                {"kind": "lost", "s": s, **where, "attempt": attempt, "cause": "kill", "kept_steps": 200,
                 "lost_steps": 10, "kept_seconds": 2.0},
                {"kind": "worker_joining", "s": s, "worker": _address(k)},
                _joined(k, s + 0.5),
                {"kind": "leased", "s": s + 0.6, **where, "attempt": attempt + workers, "step": 200},
            ]  # fmt: skip
            attempt += workers
        events += [
            {"kind": "staged", "s": start + 5 + k / workers, **where, "attempt": attempt, "steps": 400,
             "train_seconds": 4.0},
            {"kind": "attempt_ended", "s": start + 5 + k / workers, **where, "attempt": attempt, "ended": "done",
             "steps": 400, "reply": "accepted", "pull_seconds": 0.1, "train_seconds": 4.0, "push_seconds": 0.1,
             "pull_bytes": 4_000_000, "push_bytes": 4_000_000},
        ]  # fmt: skip
    events.sort(key=lambda event: event["s"])
    end = start + PLAYED_ROUND_SECONDS
    moved = {"bytes_down": 4_000_000 * workers, "bytes_up": 4_000_000 * workers}
    commit = {"round": number, "steps": 400 * workers, "seconds": PLAYED_ROUND_SECONDS, "commit_seconds": 0.1, **moved}
    score = {"round": number + 1, "accuracy": 1 - 1 / (number + 2), "loss": 1 / (number + 2), "seconds": 0.1}
    return [*events, {"kind": "round_committed", "s": end, **commit}, {"kind": "evaluated", "s": end, **score}]


def _joined(n: int, seconds: float) -> Record:
    about = {"name": f"node-{n}", "memory_bytes": 2 << 30, "device": "cpu", "steps_per_second": 1.0, "pid": n}
    return {"kind": "worker_joined", "s": seconds, "worker": _address(n), "cohort": "bench", **about}


def _address(n: int) -> str:
    return f"tcp://10.0.{n // 250}.{n % 250}:40000"


async def live(preset: Preset, summary: Summary) -> None:
    """Tell the summary rounds at their pace, until cancelled."""
    for number in itertools.count(preset.rounds_before):
        for event in round_events(preset.workers, number):
            late = event["s"] - number * PLAYED_ROUND_SECONDS - (time.monotonic() % PLAYED_ROUND_SECONDS)
            if 0 < late < 1:  # in steps of a tenth of a second, or the bench's own timers are what is measured
                await asyncio.sleep(0.1)
            summary.add({**event, "t": time.time()})
        await asyncio.sleep(PLAYED_ROUND_SECONDS - time.monotonic() % PLAYED_ROUND_SECONDS)


async def poll_page(url: str, seen: list[tuple[float, str]]) -> None:
    """Ask for the page's content as a browser does, until cancelled."""
    http = AsyncHTTPClient(force_instance=True)
    while True:
        answer = await http.fetch(f"{url}/now")
        seen.append((time.monotonic(), answer.body.decode()))
        await asyncio.sleep(LOOK_SECONDS)


async def measure(preset: Preset, folder: Path) -> dict[str, Any]:
    """Return CPU shares of scheduler and head, with and without readers, and how often the page's content changed."""
    dask_settings.apply()
    summary = Summary()
    for event in itertools.chain(
        first_events(preset.workers), *(round_events(preset.workers, n) for n in range(preset.rounds_before))
    ):
        summary.add({**event, "t": time.time()})
    async with (
        dask_scheduler.started(folder) as address,
        Worker(address, nthreads=1, memory_limit=0, dashboard=False),  # the pages come with the first worker
        Client(address, asynchronous=True, set_as_default=False) as client,
    ):
        about = json.loads((folder / "cluster.json").read_text())
        url = about["dashboard"].replace("/status", "/idletrain")
        await _wait_for_page(url)
        process, me = psutil.Process(about["pid"]), psutil.Process()
        feeding = asyncio.ensure_future(live(preset, summary))
        shares = {"idle": await _share(process, preset.phase_seconds)}
        async with publishing(client, summary, allow_control=False):
            head = _cpu_seconds(me)
            shares["published"] = await _share(process, preset.phase_seconds)
            head_share = (_cpu_seconds(me) - head) / preset.phase_seconds
            seen: list[list[tuple[float, str]]] = [[] for _ in range(VIEWERS)]
            polls = [asyncio.ensure_future(poll_page(url, list_)) for list_ in seen]
            shares["viewed"] = await _share(process, preset.phase_seconds)
            for task in (*polls, feeding):
                task.cancel()
            await asyncio.gather(*polls, feeding, return_exceptions=True)
    return {"shares": shares, "head_share": head_share, "gaps": _gaps(seen[0]), "workers_shown": _rows(seen[0][-1][1])}


async def _wait_for_page(url: str) -> None:
    http = AsyncHTTPClient(force_instance=True)
    for _ in range(PAGE_SECONDS * 10):
        try:
            await http.fetch(url)
        except HTTPClientError:
            await asyncio.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{url} did not come")


async def _share(process: psutil.Process, seconds: float) -> float:
    before = _cpu_seconds(process)
    await asyncio.sleep(seconds)
    return (_cpu_seconds(process) - before) / seconds


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    used: float = times.user + times.system
    return used


def _gaps(seen: list[tuple[float, str]]) -> list[float]:
    """Return the seconds between two contents that differ."""
    changes = [seen[0], *(later for earlier, later in itertools.pairwise(seen) if later[1] != earlier[1])]
    return [later[0] - earlier[0] for earlier, later in itertools.pairwise(changes)]


def _rows(content: str) -> int:
    return len(re.findall(r'<tr class="(?:training|draining)"', content))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        measured = asyncio.run(measure(preset, Path(folder)))
    shares, gaps = measured["shares"], measured["gaps"]
    page = shares["viewed"] - shares["idle"]
    figures = [
        at_most(f"scheduler, {preset.workers} workers, {VIEWERS} viewers", 100 * page, "% of a core", 5.0),
        Figure("scheduler, no viewer", 100 * (shares["published"] - shares["idle"]), "% of a core"),
        Figure("scheduler without a run", 100 * shares["idle"], "% of a core"),
        Figure("head: summing up, publishing", 100 * measured["head_share"], "% of a core"),
        at_least("updates", len(gaps) / sum(gaps), "a second", 1.0, gaps),
        Figure("longest time without one", max(gaps), "s"),
    ]
    return report("page", options, figures, workers_shown=measured["workers_shown"])


if __name__ == "__main__":
    main()
