"""A trial's launch is a fork that prints to its sweep, can be interrupted, and never outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.sweeps import trial_process
from idletrain.sweeps.trial_process import TrialProcess, launched

JOB: dict[str, Any] = {
    "name": "digits",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "subnets": 2, "local_steps": 5, "rounds": 3, "evaluate_every": 1},
    "nodes": {"count": 1, "memory": "1GiB"},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    trial_process.warm_up()
    return tmp_path


def tree(**training: Any) -> dict[str, Any]:
    return {**JOB, "training": {**JOB["training"], **training}}


def started(job: Job) -> AbstractAsyncContextManager[TrialProcess]:
    return launched(job, again=False, options=())


def processes() -> dict[str, list[psutil.Process]]:
    """The processes below this one, by the first letters of their names."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.setdefault(process.name()[:14], []).append(process)
    return found


async def first_round(process: TrialProcess) -> dict[str, Any]:
    async for record in process.records():
        if record.get("rounds"):
            return record
    raise AssertionError("it ended before its first round")


def test_it_prints_its_rounds_and_its_workers_are_forks_of_its_own_parent_which_end_with_it() -> None:
    async def run() -> tuple[list[psutil.Process], list[dict[str, Any]], str]:
        async with started(parse_job(tree())) as process:
            await first_round(process)
            there = processes()
            (launch,), workers = there["idletrain-laun"], there["idletrain-work"]
            assert {worker.parent().parent() for worker in workers} == {launch}
            return [launch, *workers], [record async for record in process.records()], await process.wait()

    began, records, why = asyncio.run(run())
    assert why == ""
    assert records[-1]["status"] == "completed"
    assert not psutil.wait_procs(began, timeout=20)[1]


def test_it_says_why_it_failed() -> None:
    Path("runs/digits").mkdir(parents=True)
    Path("runs/digits/wal").write_text("another's")

    async def run() -> str:
        async with started(parse_job(tree())) as process:
            return await process.wait()

    assert asyncio.run(run()).startswith("name: ")


def test_an_interrupt_ends_it_in_order() -> None:
    async def run() -> list[psutil.Process]:
        async with started(parse_job(tree(rounds=2000))) as process:
            await first_round(process)
            began = [*processes()["idletrain-laun"], *processes()["idletrain-work"]]
            process.interrupt()
            await process.wait()
            return began

    began = asyncio.run(run())
    assert not psutil.wait_procs(began, timeout=20)[1]
    ended = [json.loads(line) for line in Path("runs/digits/events.jsonl").read_text().splitlines()][-1]
    assert (ended["kind"], ended["status"]) == ("run_ended", "stopped")


@pytest.mark.parametrize("after_seconds", [0.0, 0.3])
def test_an_interrupt_is_not_lost_on_one_that_has_just_been_started(after_seconds: float) -> None:
    async def run() -> str:
        async with started(parse_job(tree(rounds=100_000))) as process:
            await asyncio.sleep(after_seconds)
            process.interrupt()
            return await asyncio.wait_for(process.wait(), timeout=60)

    assert asyncio.run(run())
    assert not any(name.startswith("idletrain-") for name in processes())


def test_it_is_killed_with_its_workers_where_the_sweep_gives_it_up() -> None:
    async def run() -> list[psutil.Process]:
        async with started(parse_job(tree(rounds=2000))) as process:
            await first_round(process)
            return [*processes()["idletrain-laun"], *processes()["idletrain-work"]]

    assert not psutil.wait_procs(asyncio.run(run()), timeout=20)[1]


SWEEP = """
import asyncio, pathlib
from idletrain.job_file import load_job
from idletrain.sweeps.trial_process import launched

async def run():
    async with launched(load_job(pathlib.Path("job.yaml")), again=False, options=()) as process:
        await anext(process.records())
        print("trains", flush=True)
        await process.wait()

asyncio.run(run())
"""


def test_nothing_outlives_a_sweep_that_is_killed() -> None:
    Path("job.yaml").write_text(yaml.safe_dump(tree(rounds=2000)))
    with subprocess.Popen([sys.executable, "-c", SWEEP], stdout=subprocess.PIPE) as sweep:
        assert sweep.stdout
        assert sweep.stdout.readline() == b"trains\n"
        began = psutil.Process(sweep.pid).children(recursive=True)
        assert [p for p in began if p.name().startswith("idletrain-laun")]
        sweep.kill()
    _, alive = psutil.wait_procs(began, timeout=30)
    assert not alive
