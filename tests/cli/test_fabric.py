"""`idletrain fabric`: what is refused, what is compared, and one real measurement of two workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from distributed import Client

from idletrain.autotune.choose import Prepare
from idletrain.autotune.forecast import FleetFigures
from idletrain.cli import fabric
from idletrain.cli import main as cli
from idletrain.cluster import dask_scheduler
from idletrain.cluster.local import LocalFleet
from idletrain.errors import JobError, RunError
from idletrain.fabric.analysis.samples import Fabric, Point
from idletrain.fabric.measuring import cluster
from idletrain.fabric.measuring.nodes import occupied
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.prepare import from_settings, prepare_job
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler
from idletrain.run import RunOptions, launch


def main(*arguments: str) -> object:
    """The exit code of the command line, in this process."""
    before, sys.argv = sys.argv, ["idletrain", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    return ended.value.code


def written(path: Path, rate: float, **about: str) -> str:
    nodes = [{"name": f"n{k}", "host": f"h{k}", "mtu": 1500, "cores": 2, "threads": 1} for k in range(2)]
    points = [Point("one way", "socket", a, 1 - a, (rate, rate * 1.001, rate, rate * 0.999)) for a in (0, 1)]
    path.write_text(Fabric({"preset": "quick", "version": "1", **about}, nodes, points).as_json())
    return str(path)


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = written(tmp_path / "a.json", 12e6), written(tmp_path / "b.json", 10.8e6)
    assert main("fabric", "--compare", first, second, "--out", str(tmp_path / "c.json")) is None
    assert "worse" in capsys.readouterr().out
    assert "a against b" in (tmp_path / "c.html").read_text()
    assert main("fabric", "--compare", first, first) is None
    assert "No significant effect" in capsys.readouterr().out


def test_unlike_runs_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = written(tmp_path / "a.json", 1e6), written(tmp_path / "b.json", 1e6, preset="full")
    assert main("fabric", "--compare", first, second) == 2
    assert (
        "idletrain: --compare: these cannot be compared, as preset (quick and full) differ" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compare", "none.json", "none.json"), "none.json cannot be read (No such file or directory)"),
        (("--scheduler", "tcp://127.0.0.1:1", "--nodes", "2"), "--nodes: starts workers here, and --scheduler names"),
        (("--compare", "a.json", "b.json", "--out", "."), "--out: . should end in .html"),
        (("--scheduler", "tcp://10.1.2.3:8786"), "tcp://10.1.2.3:8786 is on another machine without TLS"),
        (("--out", "fabric.txt"), "--out: fabric.txt should end in .json"),
        (("--out", "nowhere/fabric.json"), "--out: nowhere/fabric.json cannot be written (No such file or directory)"),
        (("--nodes", "0"), "should be greater than or equal to 1"),
        (("--preset", "slow"), "'slow' is not one of 'quick', 'full'"),
        (("--compare", "a.json", "b.json", "--preset", "full"), "--compare: measures nothing; leave out --scheduler"),
    ],
)
def test_bad_arguments_are_sentences(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main("fabric", *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"\x89PNG\r\n\x1a\n", b"[1]"])
def test_a_file_that_is_no_fabric_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert main("fabric", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")) == 2
    assert "a.json is not a file of idletrain fabric" in capsys.readouterr().err


def test_two_workers_on_this_machine_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    assert main("fabric", "--nodes", "2", "--out", str(out)) is None
    report = json.loads(out.read_text())
    assert report["faults"] == []
    assert len(report["nodes"]) == 2
    assert report["about"]["seconds"] < 120
    shown = capsys.readouterr().out
    assert "break-even" in shown
    assert "Between these 2 nodes" in shown
    assert "Pairs: one way" in out.with_suffix(".html").read_text()


def job(**training: object) -> Job:
    model = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}}
    return parse_job({"name": "t", "model": model, "data": {"name": "digits"}, "training": training})


FLEET = FleetFigures(4, 1e9, 1e9, 1e9, 1e9, 0.01, 1e9, 1 << 30)


def test_a_launch_times_steps_only_if_there_is_something_to_choose_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def look(job: Job, _prepare: Prepare) -> FleetFigures:
        calls.append(job.nodes.count)
        return FLEET

    monkeypatch.setattr(fabric, "_here", look)
    lines: list[str] = []
    stated = job(method="ist", subnets=2, local_steps=3)
    assert fabric.confirm_settings(stated, None, lines.append, prepare_job) == (stated, None)
    lockstep = job(mode="lockstep", subnets=2)
    assert fabric.confirm_settings(lockstep, None, lines.append, prepare_job, always=True) == (lockstep, None)
    assert (calls, lines) == ([], [])
    open_, choice = fabric.confirm_settings(job(), None, lines.append, prepare_job)
    assert choice is not None
    assert open_.training.subnets == choice.option.subnets
    assert calls == [4]
    longer, choice = fabric.confirm_settings(job(rounds=9), None, lines.append, prepare_job)
    assert choice is not None
    assert choice.expected.round > 0
    assert longer.training.rounds == 9
    assert calls == [4]
    fabric.confirm_settings(job(batch_size=16), None, lines.append, prepare_job)
    assert calls == [4, 4]
    assert fabric.confirm_settings(stated, None, lines.append, prepare_job, always=True)[0] == stated
    assert calls == [4, 4, 4]
    small = job().model_copy(update={"nodes": job().nodes.model_copy(update={"memory": 1 << 30})})
    fabric.confirm_settings(small, None, lines.append, prepare_job)
    assert calls == [4, 4, 4, 4]
    again, choice = fabric.confirm_settings(stated, None, lines.append, prepare_job)
    assert again == stated
    assert choice is not None
    assert choice.expected.round > 0
    assert calls == [4, 4, 4, 4]


def test_workers_on_this_machine_are_chosen_for_without_starting_one_and_have_the_job_s_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stated = job(method="ist", subnets=2, local_steps=3)
    stated = stated.model_copy(update={"nodes": stated.nodes.model_copy(update={"memory": 600 << 20})})
    monkeypatch.setattr("subprocess.Popen", mock.Mock(side_effect=AssertionError("a process is started")))
    drawn = torch.get_rng_state()
    fleet = fabric._here(stated, prepare_job)
    assert 0 < fleet.memory_bytes < 600 << 20
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_loss_that_fails_is_named_before_anything_starts() -> None:
    with pytest.raises(JobError, match=r"^training\.loss: .*failing_loss does not fit .*: nothing here$"):
        fabric._here(job(subnets=2, local_steps=3, loss=f"{__name__}:failing_loss"), prepare_job)


def failing_loss(_outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    raise ValueError("nothing here")


@contextlib.asynccontextmanager
async def open_cluster(folder: Path) -> AsyncIterator[tuple[str, Client]]:
    """A cluster of one worker that a person runs without TLS: its address, and a client."""
    folder.mkdir()
    async with dask_scheduler.started(folder) as address, cluster.existing_cluster(address) as client:
        fleet = LocalFleet(address, 1 << 30, folder / "logs")
        fleet.start(1)
        try:
            await client.wait_for_workers(1)
            yield address, client
        finally:
            await fleet.close()


@pytest.mark.parametrize(("answer", "goes_on"), [(None, False), (False, False), (True, True)])
def test_a_cluster_that_a_run_uses_is_measured_only_if_a_person_says_so(
    answer: bool | None, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None)
    monkeypatch.setattr("typer.confirm", lambda text: questions.append(text) or answer)
    settings = job(method="ist", subnets=1, local_steps=10, rounds=100_000)
    settings = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"to": str(tmp_path)})})

    async def go() -> None:
        async with open_cluster(tmp_path / "cluster") as (address, client):
            started = asyncio.Event()
            stops: list[Callable[[], None]] = []

            def took(stop: Callable[[], None], _record: object) -> None:
                stops.append(stop)
                started.set()

            prepared = from_settings(settings.model, settings.data, settings.training, settings.memory)
            running = asyncio.ensure_future(
                launch(
                    settings,
                    prepared,
                    RunOptions(provider=ExistingScheduler(LaunchRequest(scheduler=address)), on_start=took),
                )
            )
            await asyncio.wait([running, asyncio.ensure_future(started.wait())], return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), running.exception()
            while not await occupied(client):
                await asyncio.sleep(0.05)
            allowed = contextlib.nullcontext()
            with (
                allowed if goes_on else pytest.raises(RunError, match=r"^a run of idletrain .*; wait until it is done")
            ):
                await fabric._check_free(client, address)
            stops[0]()
            assert (await running).status == "stopped"
            await fabric._check_free(client, address)

    asyncio.run(go())
    assert len(questions) == (answer is not None)


def test_a_fleet_that_works_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(_client: Client) -> str:
        return "a run"

    lines: list[str] = []
    _choose_on(tmp_path, lines, lambda: monkeypatch.setattr("idletrain.fabric.measuring.nodes.occupied", busy))
    assert lines[-1] == "the fleet is busy: the job runs with its default settings"


def test_a_fleet_that_cannot_be_looked_at_does_not_stop_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def empty(_address: str, _job: Job, _prepare: Prepare) -> None:
        raise RunError("the cluster has no worker")

    lines: list[str] = []
    _choose_on(tmp_path, lines, lambda: monkeypatch.setattr(fabric, "_probe", empty))
    assert (
        lines[-1] == "the fleet cannot be measured (the cluster has no worker): the job runs with its default settings"
    )


def _choose_on(folder: Path, lines: list[str], disturb: Callable[[], None]) -> None:
    """Choose settings for an open cluster that is disturbed, in vain."""

    async def go() -> None:
        async with open_cluster(folder / "cluster") as (address, _client):
            disturb()
            chosen = await asyncio.to_thread(fabric.confirm_settings, job(), address, lines.append, prepare_job)
            assert chosen == (job(), None)

    asyncio.run(go())
