"""Measure the network between nodes: `idletrain fabric`; and choose a job's open settings by such measurements."""

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

from idletrain import storage
from idletrain.cli.arguments import check_writable, write_output
from idletrain.cli.printing import tell
from idletrain.errors import JobError, RefusedError, RunError, user_code

if TYPE_CHECKING:  # each command imports what it needs, so that `idletrain --help` stays quick
    from distributed import Client

    from idletrain.autotune.choose import Prepare
    from idletrain.autotune.forecast import AutotuneChoice, FleetFigures
    from idletrain.fabric.analysis.samples import Fabric
    from idletrain.job import Job

app = typer.Typer()
LOCAL_NODES = 4  # at most the number of cores, at least two
UNTIMED = {
    "rounds",
    "epochs",
    "local_steps",
    "seed",
    "evaluate_every",
    "metrics",
}  # settings of `training` that change no step's time


class PresetName(enum.StrEnum):
    """Sizes of measurement, by name."""

    quick = "quick"
    full = "full"


@app.command(rich_help_panel="Cluster")
def fabric(
    scheduler: Annotated[str | None, typer.Option(help="Measure this Dask cluster instead of local workers.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Worker processes on this machine.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The JSON file of all samples; fabric.json otherwise. An HTML page is written beside it."),
    ] = None,
    preset: Annotated[
        PresetName, typer.Option(help="quick takes a minute, full as long as it needs.")
    ] = PresetName.quick,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Compare two such files: do the networks differ?", metavar="A.json B.json"),
    ] = None,
) -> None:
    """Measure the network between nodes, and print what it does to training."""
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
        check_writable(file, "--out")
    from rich.console import Console

    from idletrain.fabric.analysis import page, tables

    measured = asyncio.run(_measure(scheduler, nodes, preset))
    Console().print(tables.terminal_text(measured))
    write_output(out, measured.as_json(), "--out")
    write_output(out.with_suffix(".html"), page.fabric_page(measured), "--out")
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
        return await measure_fabric(client, presets.PRESETS[preset], tell)


def confirm_settings(
    job: Job, scheduler: str | None, report: Callable[[str], None], prepare: Prepare, *, always: bool = False
) -> tuple[Job, AutotuneChoice | None]:
    """Choose the settings that the job leaves open for its fleet; report them with the reasons.

    A fleet is measured once a day for the same network and data, and only if there is something to choose or `always`
    is given; workers on this machine are not started for that. A cluster that is busy is not disturbed: then the job
    keeps its default settings. What methods teach is tried for a run, and not with `always`, for a plan.
    """
    from idletrain.autotune import choose, probe

    if not choose.has_forecast(job):
        return job, None
    folder, now = storage.cache_folder() / "fabric", time.time()
    here = (platform.node(), len(os.sched_getaffinity(0)), job.nodes.count, job.nodes.memory)
    fleet_id = asyncio.run(_workers_of(scheduler)) if scheduler else here
    training = job.training.model_dump(exclude=UNTIMED, exclude_unset=True)
    key = probe.fleet_key(*fleet_id, job.model, job.data, job.memory, training)
    fleet = probe.load_figures(folder, key, now)
    if fleet is None and (always or choose.leaves_open(job)):
        if scheduler:
            report("measuring the fleet for some seconds")
            fleet, why = _try_probe(scheduler, job, prepare)
            if fleet is None:
                report(f"{why}: the job runs with its default settings")
        else:
            report("timing the job's steps on this machine for some seconds")
            fleet = _here(job, prepare)
        if fleet:
            probe.save_figures(folder, key, fleet, now)
    if fleet is None:
        return job, None
    job, choice = choose.choose_settings(job, fleet, None if always else report, prepare)
    for line in choose.choice_lines(choice):
        report(line)
    return job, choice


def _here(job: Job, prepare: Prepare) -> FleetFigures:
    """Return the figures of workers on this machine."""
    from idletrain.autotune.local_fleet import local_figures
    from idletrain.nn.data.seeding import seeded
    from idletrain.providers.local import worker_bytes

    with user_code("model or data: a step of training fails (", ")"), seeded(job.training.seed):
        return local_figures(job, worker_bytes(job), prepare)


async def _workers_of(scheduler: str) -> list[str]:
    """Return a scheduler's address and its workers' hosts, which identify the cluster as it is now."""
    from idletrain.providers.scheduler import check_reachable

    identity = await check_reachable(scheduler)
    return [scheduler, *sorted(str(worker["host"]) for worker in identity["workers"].values())]


def _try_probe(scheduler: str, job: Job, prepare: Prepare) -> tuple[FleetFigures | None, str]:
    """Measure a cluster; return None and the reason if that fails: the launch handles missing workers itself."""
    try:
        return asyncio.run(_probe(scheduler, job, prepare)), "the fleet is busy"
    except (RunError, RefusedError) as error:
        return None, f"the fleet cannot be measured ({error})"


async def _probe(address: str, job: Job, prepare: Prepare) -> FleetFigures | None:
    from idletrain.autotune.probe import probe_fleet
    from idletrain.fabric.measuring import cluster
    from idletrain.fabric.measuring.nodes import occupied
    from idletrain.providers.scheduler import check_reachable

    await check_reachable(address)
    async with cluster.existing_cluster(address) as client:
        return None if await occupied(client) else await probe_fleet(client, job, prepare=prepare)


async def _check_free(client: Client, address: str) -> None:
    """Refuse to measure a busy cluster unless the user confirms it.

    Raises:
        RunError: it is busy.
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

    fabrics = []
    for path in (first, second):
        try:
            fabrics.append(from_json(path.read_bytes(), str(path)))
        except OSError as error:
            raise JobError(f"--compare: {path} cannot be read ({error.strerror}); name two files of --out") from None
    differences = compare.compare(fabrics[0], fabrics[1])
    Console().print(tables.comparison_text(differences))
    if to:
        html = to.with_suffix(".html")
        write_output(html, page.comparison_page([first.stem, second.stem], differences), "--out")
        typer.echo(str(html))
