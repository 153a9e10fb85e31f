"""Commands about one run, wherever it is: down, cost, logs, interrupt, dashboard."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from idletrain.cli import local_runs
from idletrain.cli.arguments import FoundCloud, FoundRun, Region, run_dir_of
from idletrain.cli.cloud_records import (
    as_seen_from_here,
    bill_of,
    billed_events,
    named_prefix,
    read_events,
    refuse_trial,
    sweep_of,
    trained_now,
)
from idletrain.cli.places import events_of, find_run, seen_until
from idletrain.errors import DamageError, IdletrainError, RunError

app = typer.Typer()


@app.command(rich_help_panel="Cloud")
def down(name: FoundRun, cloud: FoundCloud = None, region: Region = None) -> None:
    """End a run and delete every machine and all else that it has created in a cloud; safe to repeat."""
    from idletrain.cloud.machines import TAG
    from idletrain.cloud.teardown import take_down
    from idletrain.storage import head_of

    run_dir = run_dir_of(name)
    if not (cloud or region) and (process := head_of(run_dir)):
        local_runs.stop_here(run_dir, process)
        typer.echo(f"{name}: stopped; what it has trained is in {run_dir}, and launch --resume goes on with it")
        return
    place = find_run(name, cloud, region, here="never")
    with place.account() as account:
        prefix, run = named_prefix(account, place.run), place.name
        tagged = [item.tags.get(TAG + "prefix") for item in (*account.instances(run), *account.remnants(run))]
        if not place.run.startswith("s3://") and (tagged_prefix := next(filter(None, tagged), None)):
            prefix = named_prefix(account, tagged_prefix)  # of a run with a prefix of its own
        if not ((home := _recorded_region(account, prefix)) or tagged):
            raise RunError(
                f"there is no run {run} in {account.region}; name its region with --region, or its s3:// prefix"
            )
        if home not in (None, account.region):  # S3 answers from everywhere, and only there machines are listed
            raise RunError(f"run {run} is in {home}, not in {account.region}; add --region {home}")
        if not tagged:  # a trial has no machines
            refuse_trial(prefix, run)
        take_down(account, run, prefix)
    kept = f"stay in {prefix.url}" if place.provider().outlives_command else "are in runs/ once its launch has ended"
    typer.echo(f"{place.name}: nothing of it is left; its records and snapshots {kept}")


@app.command(name="cost", rich_help_panel="Cloud")
def show_cost(
    name: FoundRun,
    cloud: FoundCloud = None,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show what a run has cost, what it would have cost on demand, and what preemption wasted."""
    place = find_run(name, cloud, region, here="otherwise")
    if place.cloud:
        with place.account() as account:
            refuse_trial(prefix := named_prefix(account, place.run), place.name)
            totals = bill_of(billed_events(account, prefix, read_events(prefix)), time.time())
    else:
        events = events_of(place)
        totals = bill_of(events, seen_until(place, events))
    from idletrain.observe.report import cost_line

    typer.echo(json.dumps(totals) if as_json else cost_line(totals))


@app.command(rich_help_panel="Cloud")
def logs(
    name: FoundRun,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print events as they happen, until the run ends.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="Print a machine's console instead of the run's events.")] = None,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Print what happened in a run."""
    from idletrain.cloud.follow import follow as follow_run
    from idletrain.observe.display import LineDisplay, folding
    from idletrain.observe.summary import Summary

    place, summary = find_run(name, cloud, region, here="otherwise"), Summary()
    sink = folding(summary, LineDisplay(sys.stdout, summary))
    if place.cloud is None:
        if node:
            raise RunError(f"run {place.run} is on this machine: --node is for runs in a cloud; see its logs/")
        events = events_of(place)
        if follow:
            local_runs.follow_here(Path(place.run), sink)
            return
        for event in events:
            sink(event)
        return
    with place.account() as account:
        if node:
            typer.echo(account.console(node))
            return
        prefix = named_prefix(account, place.run)
        show = as_seen_from_here(place.provider(), account, prefix.url, sink)
        if follow:
            follow_run(prefix, show, account)
            return
        for event in read_events(prefix):
            show(event)


@app.command(rich_help_panel="Cloud")
def interrupt(
    name: FoundRun,
    node: Annotated[str | None, typer.Option(help="The instance's id; the oldest node otherwise.")] = None,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Give a node notice as if the cloud took it back."""
    from idletrain.cloud.machines import TAG

    place = find_run(name, cloud, region, here="never")
    with place.account() as account:
        refuse_trial(named_prefix(account, place.run), place.name)
        nodes = [i for i in account.instances(place.name, ("running",)) if i.role == "worker"]
        chosen = [i.id for i in sorted(nodes, key=lambda i: (i.launched_at, i.id)) if node in (None, i.id)][:1]
        if not chosen:
            known = ", ".join(i.id for i in nodes) or "none"
            raise RunError(f"run {place.name} has no running node{f' {node}' if node else ''}; there are: {known}")
        account.tag(chosen, {TAG + "interrupt": "asked"})
    typer.echo(f"{chosen[0]}: asked to go; it uploads its partial steps first")


@app.command(rich_help_panel="Cloud")
def dashboard(name: FoundRun, cloud: FoundCloud = None, region: Region = None) -> None:
    """Open a tunnel to a run's Dask dashboard, which listens on its head's loopback alone."""
    place = find_run(name, cloud, region, here="never")
    with place.account() as account:
        prefix = named_prefix(account, place.run)
        fleet, events = sweep_of(prefix) or place.name, read_events(trained_now(prefix))
        pages = [event["dashboard"] for event in events if event["kind"] == "run_started"]
        heads = [i for i in account.instances(fleet, ("running",)) if i.role == "head"]
        if not pages or not heads:
            raise RunError(f"run {place.name} is not running; `idletrain status` shows how it ended")
        port = pages[-1].rsplit(":", 1)[1].split("/")[0]
        token = account.dashboard_token(fleet)
        page = f"http://127.0.0.1:{port}/idletrain?token={token}"  # whatever address the head has in its network
        command = place.provider().tunnel_command(account, heads[0].id, port)
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


def _recorded_region(account: Any, prefix: Any) -> str | None:
    """Return the region of the run whose record is below a prefix, as far as it can be read; None without a record."""
    from idletrain.cloud import record

    try:
        with account.explained():
            stored = prefix.get(record.RUN_RECORD_KEY)
        return record.RunRecord.from_json(stored.content).site.region if stored else None
    except DamageError:  # of another version: it is ended all the same
        return str(account.region)
    except IdletrainError:  # no such bucket, or not ours
        return None
