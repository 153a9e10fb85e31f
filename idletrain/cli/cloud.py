"""Commands about a cloud and the runs in it: offers, doctor, down, reap, cost, logs, interrupt, dashboard, node."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idletrain import storage
from idletrain.errors import IdletrainError, RunError
from idletrain.observe.records import Record, Sink
from idletrain.providers.protocol import CloudProvider
from idletrain.providers.table import cloud_named
from idletrain.quantities import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from idletrain.job import Job

UNFINISHED_STATES = ("starting", "running")  # states of a run whose head has not recorded its end
app = typer.Typer()


CloudRunName = Annotated[
    str, typer.Argument(help="The run's name, or its s3:// prefix.", metavar="RUN", show_default=False)
]
CloudOption = Annotated[str, typer.Option(help="The cloud: aws, sandbox, or an installed provider's name.")]
Region = Annotated[str | None, typer.Option(help="The region; the one in AWS' own configuration otherwise.")]


@app.command(rich_help_panel="Cloud")
def offers(
    job: Annotated[Path | None, typer.Argument(help="Rank the offers for this job.")] = None,
    memory: Annotated[str, typer.Option(help="RAM of one slot, if no job is given.", metavar="2GiB")] = "2GiB",
    cloud: CloudOption = "aws",
    region: Region = None,
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
    with cloud_named(cloud).account(region) as account:
        prices = account.market(storage.cache_folder())
        max_price = settings.nodes.max_price if settings else None
        Console().print(table(prices.offers(need, market, max_price), prices.estimate))


@app.command(rich_help_panel="Cloud")
def doctor(
    job: Annotated[Path | None, typer.Argument(help="A job whose cloud settings to check.")] = None,
    policy: Annotated[
        bool, typer.Option("--policy", help="Print the least rights that a launch needs, as IAM JSON.")
    ] = False,
    cloud: CloudOption = "aws",
    region: Region = None,
) -> None:
    """Check an account: credentials, network, bucket, roles, quotas."""
    from idletrain.job_file import load_job
    from idletrain.machine_settings import CloudSettings

    loaded = load_job(job) if job else None
    settings = loaded.cloud if loaded else CloudSettings()
    provider = cloud_named(cloud)
    with provider.account(region or settings.region) as account:
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
def down(name: CloudRunName, cloud: CloudOption = "aws", region: Region = None) -> None:
    """End a run and delete everything it has created; safe to repeat."""
    from idletrain.cloud.machines import TAG
    from idletrain.cloud.teardown import take_down

    with cloud_named(cloud).account(region) as account:
        prefix, run = named_prefix(account, name), _run_name(name)
        tagged = [item.tags.get(TAG + "prefix") for item in (*account.instances(run), *account.remnants(run))]
        if not name.startswith("s3://") and (tagged_prefix := next(filter(None, tagged), None)):
            prefix = named_prefix(account, tagged_prefix)  # of a run with a prefix of its own
        if not (_recorded(account, prefix) or tagged):
            raise RunError(
                f"there is no run {run} in {account.region}; name its region with --region, or its s3:// prefix"
            )
        take_down(account, run, prefix)
    typer.echo(f"{_run_name(name)}: nothing of it is left; its records and snapshots stay in {prefix.url}")


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
    from idletrain.cloud import teardown
    from idletrain.storage import S3Prefix

    grace = float(parse_seconds(older_than)) if older_than not in ("0", "0s") else 0.0
    faults: list[str] = []
    regions: list[str | None] = [*region] if region else [None]
    if all_regions:
        with cloud_named(cloud).account(None) as account:
            regions = [*account.regions()]
    for searched in regions:
        with cloud_named(cloud).account(searched) as account:
            machines, now = account.instances(), time.time()
            closed = teardown.over(account, machines, now)
            orphans = teardown.orphans(machines, account.remnants(), now, grace, closed)
            for orphan in orphans:
                typer.echo(f"{account.region}: {orphan.run}: {orphan.why}" + ("" if yes else "; add --yes to end it"))
                if yes:
                    try:
                        teardown.take_down(account, orphan.run, S3Prefix.at(orphan.prefix, account.s3))
                    except IdletrainError as error:  # the others are ended nevertheless
                        faults.append(str(error))
            if not orphans:
                typer.echo(f"{account.region}: nothing is left over")
    if faults:
        raise RunError("; ".join(faults))


@app.command(name="cost", rich_help_panel="Cloud")
def show_cost(
    name: CloudRunName,
    cloud: CloudOption = "aws",
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show what a run has cost, what it would have cost on demand, and what preemption wasted."""
    with cloud_named(cloud).account(region) as account:
        events = read_events(named_prefix(account, name))
    totals = bill_of(events)
    from idletrain.observe.report import cost_line

    typer.echo(json.dumps(totals) if as_json else cost_line(totals))


@app.command(rich_help_panel="Cloud")
def logs(
    name: CloudRunName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print events as they happen, until the run ends.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="Print a machine's console instead of the run's events.")] = None,
    cloud: CloudOption = "aws",
    region: Region = None,
) -> None:
    """Print what happened in a run."""
    from idletrain.cloud.follow import follow as follow_run
    from idletrain.observe.display import LineDisplay, folding
    from idletrain.observe.summary import Summary

    provider = cloud_named(cloud)
    with provider.account(region) as account:
        if node:
            typer.echo(account.console(node))
            return
        prefix, summary = named_prefix(account, name), Summary()
        show = as_seen_from_here(provider, account, folding(summary, LineDisplay(sys.stdout, summary)))
        if follow:
            follow_run(prefix, show, account)
            return
        for event in read_events(prefix):
            show(event)


@app.command(rich_help_panel="Cloud")
def interrupt(
    name: CloudRunName,
    node: Annotated[str | None, typer.Option(help="The instance's id; the oldest node otherwise.")] = None,
    cloud: CloudOption = "aws",
    region: Region = None,
) -> None:
    """Give a node notice as if the cloud reclaimed it: a rehearsal of a spot interruption."""
    from idletrain.cloud.machines import TAG

    with cloud_named(cloud).account(region) as account:
        nodes = [i for i in account.instances(_run_name(name), ("running",)) if i.role == "worker"]
        chosen = [i.id for i in sorted(nodes, key=lambda i: (i.launched_at, i.id)) if node in (None, i.id)][:1]
        if not chosen:
            known = ", ".join(i.id for i in nodes) or "none"
            raise RunError(f"run {_run_name(name)} has no running node{f' {node}' if node else ''}; there are: {known}")
        account.tag(chosen, {TAG + "interrupt": "asked"})
    typer.echo(f"{chosen[0]}: asked to go; it uploads its partial steps first")


@app.command(rich_help_panel="Cloud")
def dashboard(name: CloudRunName, cloud: CloudOption = "aws", region: Region = None) -> None:
    """Open a tunnel to a run's Dask dashboard, which listens on its head's loopback alone."""
    provider = cloud_named(cloud)
    with provider.account(region) as account:
        events = read_events(named_prefix(account, name))
        pages = [event["dashboard"] for event in events if event["kind"] == "run_started"]
        heads = [i for i in account.instances(_run_name(name), ("running",)) if i.role == "head"]
        if not pages or not heads:
            raise RunError(f"run {_run_name(name)} is not running; `idletrain status` shows how it ended")
        port = pages[-1].rsplit(":", 1)[1].split("/")[0]
        token = account.dashboard_token(_run_name(name))
        page = f"http://127.0.0.1:{port}/idletrain?token={token}"  # whatever address the head has in its network
        command = provider.tunnel_command(account, heads[0].id, port)
        if command is None:
            typer.echo(page)
            return
        typer.echo(f"{page} while this command runs")
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise RunError("the tunnel needs the AWS CLI and its session-manager-plugin; install both") from None
        except subprocess.CalledProcessError as error:
            raise RunError(f"the tunnel ended with exit code {error.returncode}; see above") from None


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


def as_seen_from_here(provider: CloudProvider, account: Any, sink: Sink) -> Sink:
    """Return a sink that gets a run's events with the dashboard's link as this machine opens it."""

    def take(event: Record) -> None:
        sink(provider.seen_from_here(event, account))

    return take


def named_prefix(account: Any, name: str) -> Any:
    """Return a run's prefix: below the account's own bucket, unless the name is a whole prefix."""
    from idletrain.storage import S3Prefix

    return S3Prefix.at(name if name.startswith("s3://") else f"s3://{account.bucket}/runs/{name}", account.s3)


def run_prefix(account: Any, job: Job) -> Any:
    """Return the prefix of a job's run: below `checkpoint.to` if that is in S3, else below the account's own bucket."""
    to = job.checkpoint.to
    return named_prefix(account, f"{to.rstrip('/')}/{job.name}" if to.startswith("s3://") else job.name)


def read_events(prefix: Any) -> list[dict[str, Any]]:
    """Return all events of a run so far."""
    from idletrain.cloud import record
    from idletrain.rounds.durable import s3_mirror

    record.read(prefix)
    return s3_mirror.events(prefix)


def run_status(account: Any, name: str) -> tuple[Any, str, list[dict[str, Any]]]:
    """Return a run's summary, what its last event does not say (its head is gone, or what is left), and its events."""
    from idletrain.cloud import record
    from idletrain.cloud.machines import ALIVE_STATES, ENDED_STATES
    from idletrain.cloud.teardown import lost_head
    from idletrain.observe.summary import summary_of

    prefix = named_prefix(account, name)
    events, written = read_events(prefix), record.read(prefix)
    summary = summary_of(events)
    summary.run, summary.run_dir, why = written.run, prefix.url, written.leftover
    if summary.updated < written.created:  # all events are from before the resumption
        summary.status = "starting"
    if summary.status in UNFINISHED_STATES:
        if written.failure:
            summary.status, why = "failed", written.failure
        elif written.state == "ended":
            summary.status = "taken down"
        elif lost := lost_head(account.instances(written.run, (*ALIVE_STATES, *ENDED_STATES)), written, time.time()):
            summary.status, why = "interrupted", lost
    return summary, why, events


def bill_of(events: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return what a run has cost and will cost, in USD, and the share saved against on-demand prices."""
    from idletrain.observe import cost

    bill, now = cost.accrued(events, time.time()), time.time()
    return {
        "spent_usd": bill.spent_usd,
        "usd_per_hour": bill.usd_per_hour,
        "on_demand_usd": bill.on_demand_usd,
        "saving": bill.saving,
        "wasted_usd": cost.wasted_usd(events, now),
        "forecast_usd": cost.forecast_usd(events, now),
    }


def _recorded(account: Any, prefix: Any) -> bool:
    """Return True if a run's record is below a prefix."""
    from idletrain.cloud import record

    try:
        with account.explained():
            return prefix.get(record.RUN_RECORD_KEY) is not None
    except IdletrainError:  # no such bucket, or not ours
        return False


def _run_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]
