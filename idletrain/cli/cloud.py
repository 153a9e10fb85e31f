"""Commands about a cloud account: offers, doctor, reap, node."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idletrain import storage
from idletrain.cli.arguments import LaunchRegion
from idletrain.errors import IdletrainError, RunError
from idletrain.providers.protocol import CloudProvider
from idletrain.providers.table import cloud_named
from idletrain.quantities import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from idletrain.cloud.teardown import Orphan
    from idletrain.job import Job

CloudOption = Annotated[str, typer.Option(help="The cloud: aws, sandbox, or an installed provider's name.")]
app = typer.Typer()


@app.command(rich_help_panel="Cloud")
def offers(
    job: Annotated[Path | None, typer.Argument(help="Rank the offers for this job.")] = None,
    memory: Annotated[str, typer.Option(help="RAM of one slot, if no job is given.", metavar="2GiB")] = "2GiB",
    cloud: CloudOption = "aws",
    region: LaunchRegion = None,
) -> None:
    """Show what machines cost now, ranked by the price of a slot that can train a subnet."""
    from rich.console import Console

    from idletrain.cli.offers import table
    from idletrain.cloud.instance_types import NodeNeed
    from idletrain.cloud.launcher import node_need
    from idletrain.job_file import load_job

    settings = load_job(job) if job else None
    need = node_need(settings) if settings else NodeNeed(memory_bytes=parse_bytes(memory), most_slots=1)
    market: Any = "on-demand" if settings and settings.nodes.spot_policy == "on-demand" else "spot"
    provider = cloud_named(cloud)
    with provider.account(region or _launch_region(provider, settings)) as account:
        prices = account.market(storage.cache_folder())
        max_price = settings.nodes.max_price if settings else None
        Console().print(table(prices.offers(need, market, max_price), prices.estimate))


def _launch_region(provider: CloudProvider, job: Job | None) -> str | None:
    """Return the region in which a launch of a job would start machines; None for the configured one."""
    return provider.launch_region(job) if job else None


@app.command(rich_help_panel="Cloud")
def doctor(
    job: Annotated[Path | None, typer.Argument(help="A job whose cloud settings to check.")] = None,
    policy: Annotated[
        bool, typer.Option("--policy", help="Print the least rights that a launch needs, as IAM JSON.")
    ] = False,
    cloud: CloudOption = "aws",
    region: LaunchRegion = None,
) -> None:
    """Check an account: credentials, network, bucket, roles, quotas."""
    from idletrain.job_file import load_job
    from idletrain.machine_settings import CloudSettings

    loaded = load_job(job) if job else None
    settings = loaded.cloud if loaded else CloudSettings()
    provider = cloud_named(cloud)
    with provider.account(region or _launch_region(provider, loaded)) as account:
        if policy:
            typer.echo(json.dumps(provider.launcher_policy(account), indent=2))
            return
        findings = provider.examine(account, settings, gpu=bool(loaded and loaded.nodes.gpu))
    for finding in findings:
        sign = {True: "ok", False: "MISSING", None: "unknown"}[finding.passed]
        typer.echo(f"{sign:8} {finding.what:18} {finding.text}")
    if any(finding.passed is False for finding in findings):
        raise typer.Exit(1)


@app.command(rich_help_panel="Cloud")
def reap(
    older_than: Annotated[
        str, typer.Option(help="Leave out runs that began less than this ago.", metavar="10m")
    ] = "10m",
    yes: Annotated[bool, typer.Option("--yes", help="End them; they are only listed otherwise.")] = False,
    cloud: CloudOption = "aws",
    region: Annotated[list[str] | None, typer.Option(help="Regions to look in; repeat for more.")] = None,
    all_regions: Annotated[bool, typer.Option("--all-regions", help="Look in all regions of the account.")] = False,
) -> None:
    """Find runs whose machines outlived their record, deadline or head, by tag, and end them."""
    grace = float(parse_seconds(older_than)) if older_than not in ("0", "0s") else 0.0
    faults: list[str] = []
    regions: list[str | None] = [*region] if region else [None]
    if all_regions:
        with cloud_named(cloud).account(None) as account:
            regions = [*account.regions()]
    for searched in regions:
        try:
            with cloud_named(cloud).account(searched) as account:
                faults += _reap(account, grace, yes)
        except RunError as error:  # one that the account may not look in hides nothing in the others
            faults.append(f"{searched}: {error}" if searched else str(error))
    if faults:
        raise RunError("; ".join(faults))


def _reap(account: Any, grace_seconds: float, yes: bool) -> list[str]:
    """List a region's orphans, and with `yes` end them; return why some could not be ended."""
    from idletrain.cloud import teardown
    from idletrain.storage import S3Prefix

    faults: list[str] = []
    orphans = _orphans(account, grace_seconds)
    for orphan in orphans:
        typer.echo(f"{account.region}: {orphan.run}: {orphan.why}" + ("" if yes else "; add --yes to end it"))
        if not yes:
            continue
        try:
            if orphan != orphans[0] and orphan not in _orphans(
                account, grace_seconds
            ):  # ending the others took minutes
                typer.echo(f"{account.region}: {orphan.run}: goes on again, and is left alone")
                continue
            teardown.take_down(account, orphan.run, S3Prefix.at(orphan.prefix, account.s3))
        except IdletrainError as error:  # the others are ended nevertheless
            faults.append(str(error))
    if not orphans:
        typer.echo(f"{account.region}: nothing is left over")
    return faults


def _orphans(account: Any, grace_seconds: float) -> list[Orphan]:
    """Return a region's runs that nobody leads any more."""
    from idletrain.cloud import teardown

    machines, now = account.instances(), time.time()
    closed = teardown.over(account, machines, now)
    return teardown.orphans(machines, account.remnants(), now, grace_seconds, closed)


@app.command(hidden=True)
def node(
    memory: Annotated[
        str | None, typer.Option(help="RAM to use (2GiB); all but what the system needs otherwise.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Number of worker processes; as many as fit otherwise.")
    ] = None,
    cloud: CloudOption = "aws",
) -> None:
    """Act as this cloud machine's tags say: as a run's head, as a node, or as the starter of a scheduled run."""
    from idletrain.cloud.machines import TAG

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    provider = cloud_named(cloud)
    machine = provider.machine()
    role = machine.tags().get(TAG + "role")
    if role == "head":
        from idletrain.cloud import head_node

        asyncio.run(head_node.serve_head(machine))
    elif role == "starter":
        schedules = provider.schedules()
        assert schedules is not None
        schedules.start_run(machine, Path.cwd())
    else:
        from idletrain.cloud import worker_node as worker

        asyncio.run(worker.serve(machine, parse_bytes(memory) if memory else None, slots))
