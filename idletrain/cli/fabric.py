"""`idletrain fabric`: reads arguments, measures or compares, prints, and writes files; and what a job gets of it."""

from __future__ import annotations

import asyncio
import enum
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idletrain.errors import JobError, RefusedError, RunError

if TYPE_CHECKING:  # what a command needs is imported by it: `idletrain --help` stays quick
    from distributed import Client

    from idletrain.autotune.forecast import AutotuneChoice, FleetFigures
    from idletrain.fabric.analysis.samples import Fabric
    from idletrain.job import Job

app = typer.Typer()
LOCAL_NODES = 4  # or as many as there are cores, but two
MAX_PROBED = 8  # local workers: of more, each gets so much less of the machine
FREE = {"rounds", "local_steps", "seed", "evaluate_every"}  # of a job's training: neither makes a step longer


class PresetName(enum.StrEnum):
    """How much is measured."""

    quick = "quick"
    full = "full"


@app.command()
def fabric(
    scheduler: Annotated[str | None, typer.Option(help="Measure this Dask cluster instead of local workers.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Worker processes on this machine.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The JSON with all samples, or fabric.json; the page goes beside it.")
    ] = None,
    preset: Annotated[PresetName, typer.Option(help="A minute, or as long as it takes.")] = PresetName.quick,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two such files: do the fabrics differ?", metavar="A.json B.json")
    ] = None,
) -> None:
    """Measure the network between nodes, and tell what it does to training."""
    if compare and (scheduler or nodes or preset is not PresetName.quick):
        raise JobError("--compare: measures nothing; leave out --scheduler, --nodes and --preset")
    if compare:
        _compare(*compare, out)
        return
    out = out or Path("fabric.json")
    if scheduler and nodes:
        raise JobError("--nodes: starts workers here, and --scheduler names a cluster that has its own; give one")
    if out.suffix != ".json":
        raise JobError(f"--out: {out} should end in .json; the page goes beside it, as .html")
    for file in (out, out.with_suffix(".html")):
        _check_writable(file)
    from rich.console import Console

    from idletrain.fabric.analysis import page, tables

    found = asyncio.run(_measure(scheduler, nodes, preset))
    Console().print(tables.terminal_text(found))
    _write(out, found.as_json())
    _write(out.with_suffix(".html"), page.fabric_page(found))
    typer.echo(f"{out}, {out.with_suffix('.html')}")


async def _measure(address: str | None, nodes: int | None, preset: PresetName) -> Fabric:
    from idletrain.fabric.measuring import cluster, presets
    from idletrain.fabric.measuring.measure import measure_fabric
    from idletrain.providers.scheduler import check_reachable

    if address:
        await check_reachable(address)
        reached = cluster.existing_cluster(address)
    else:
        reached = cluster.local_cluster(nodes or max(2, min(LOCAL_NODES, len(os.sched_getaffinity(0)))))
    async with reached as client:
        await _check_free(client, address or "")
        return await measure_fabric(
            client, presets.PRESETS[preset], lambda text: typer.echo(f"idletrain: {text}", err=True)
        )


def choose_settings(
    job: Job, scheduler: str | None, say: Callable[[str], None], *, always: bool = False
) -> tuple[Job, AutotuneChoice | None]:
    """The job with what it leaves open chosen for its fleet, and the choice; said, with its reasons.

    A fleet is looked at once a day for the same network and data, and for a launch only if there is something to
    choose: `always` says otherwise. One that is at work is left alone, and the job is taken as it is.
    """
    from idletrain.autotune import choose, probe
    from idletrain.nn.data.arrays import CACHE

    if not choose.has_forecast(job):
        return job, None
    folder, now, count = CACHE / "fabric", time.time(), min(job.nodes.count, MAX_PROBED)
    here = (platform.node(), len(os.sched_getaffinity(0)), job.nodes.count, job.nodes.memory)
    where = asyncio.run(_workers_of(scheduler)) if scheduler else here
    training = job.training.model_dump(exclude=FREE, exclude_unset=True)
    key = probe.fleet_key(*where, job.model, job.data, job.memory, training)
    fleet = probe.load_figures(folder, key, now)
    if fleet is None and (always or choose.leaves_open(job)):
        say("looking at the fleet for some seconds, to see what it can do")
        fleet, why = _probed(scheduler, count, job)
        if fleet is None:
            say(f"{why}: the job is taken as it is")
        else:
            probe.save_figures(folder, key, fleet, now)
    if fleet is None:
        return job, None
    job, choice = choose.choose_settings(
        job, fleet if scheduler else fleet.sharing_cores(_processes_per_node(job.nodes.count, count))
    )
    for line in choose.choice_lines(choice):
        say(line)
    return job, choice


def _processes_per_node(nodes: int, surveyed: int) -> float:
    """How much longer a step of so many local nodes takes than when fewer shared this machine: a GPU is shared by all,
    cores by as many more as there are.
    """
    import torch

    cores = 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
    return max(nodes, cores) / max(surveyed, cores)


async def _workers_of(scheduler: str) -> list[str]:
    """A cluster by what it is made of now."""
    from idletrain.providers.scheduler import check_reachable

    told = await check_reachable(scheduler)
    return [scheduler, *sorted(str(worker["host"]) for worker in told["workers"].values())]


def _probed(scheduler: str | None, count: int, job: Job) -> tuple[FleetFigures | None, str]:
    """A fleet, or why it is not looked at: a launch has its own ways to wait for workers and to turn them away."""
    try:
        return asyncio.run(_probe(scheduler, count, job)), "the fleet is at work"
    except (RunError, RefusedError) as error:
        return None, f"the fleet cannot be looked at ({error})"


async def _probe(address: str | None, count: int, job: Job) -> FleetFigures | None:
    from idletrain.autotune.probe import probe_fleet
    from idletrain.fabric.measuring import cluster
    from idletrain.fabric.measuring.nodes import occupied
    from idletrain.providers.local import worker_bytes
    from idletrain.providers.scheduler import check_reachable

    if address:
        await check_reachable(address)
    async with (
        cluster.existing_cluster(address) if address else cluster.local_cluster(count, worker_bytes(job)) as client
    ):
        return None if await occupied(client) else await probe_fleet(client, job, None if address else job.nodes.count)


async def _check_free(client: Client, address: str) -> None:
    """Leave a cluster alone that works, unless a person says otherwise.

    Raises:
        RunError: it works.
    """
    from idletrain.fabric.measuring.nodes import occupied

    busy = await occupied(client)
    if not busy:
        return
    if sys.stdin.isatty() and typer.confirm(f"{busy}: measuring would disturb that, and be disturbed; go on?"):
        return
    raise RunError(f"{busy} at {address}: measuring would disturb that; wait until it is done")


def _compare(first: Path, second: Path, to: Path | None) -> None:
    if to and to.suffix not in (".json", ".html"):
        raise JobError(f"--out: {to} should end in .html, for the page of both")
    from rich.console import Console

    from idletrain.fabric.analysis import compare, page, tables
    from idletrain.fabric.analysis.samples import from_json

    read = []
    for path in (first, second):
        try:
            read.append(from_json(path.read_bytes(), str(path)))
        except OSError as error:
            raise JobError(f"--compare: {path} cannot be read ({error.strerror}); name two files of --out") from None
    differences = compare.compare(read[0], read[1])
    Console().print(tables.comparison_text(differences))
    if to:
        html = to.with_suffix(".html")
        _write(html, page.comparison_page([first.stem, second.stem], differences))
        typer.echo(str(html))


def _check_writable(out: Path) -> None:
    """Find out before a minute of measuring and not behind it."""
    new = not out.exists()
    _write(out, None)
    if new:
        out.unlink()


def _write(path: Path, content: str | None) -> None:
    try:
        with path.open("a" if content is None else "w") as file:
            file.write(content or "")
    except OSError as error:
        raise JobError(f"--out: {path} cannot be written ({error.strerror}); name another") from None
