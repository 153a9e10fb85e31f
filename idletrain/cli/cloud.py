"""The command line's part for clouds: what is offered, what a run costs, ending it, looking at it from anywhere."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import psutil
import typer

from idletrain.errors import IdletrainError, JobError, RunError
from idletrain.job import Job, load_job, parse_bytes, parse_seconds
from idletrain.observe.records import Record, Sink

CACHE = Path("~/.cache/idletrain").expanduser()
SANDBOXES = CACHE / "sandboxes"  # a folder for each, named by its process: its address, while it is open, and its logs
DOCUMENT = "AWS-StartPortForwardingSession"
UNFINISHED_STATES = ("starting", "running")  # what the events say of a run whose head has not closed them
app = typer.Typer()


class CloudName(enum.StrEnum):
    """Where machines come from."""

    sandbox = "sandbox"
    aws = "aws"


CloudRunName = Annotated[str, typer.Argument(help="The run's name, or its s3:// prefix.", show_default=False)]
CloudOption = Annotated[CloudName, typer.Option(help="Which cloud.")]
Region = Annotated[str | None, typer.Option(help="The region; AWS' own configuration says otherwise.")]


@app.command()
def offers(
    job: Annotated[Path | None, typer.Argument(help="Rank for this job.")] = None,
    memory: Annotated[str, typer.Option(help="RAM of one slot, without a job.")] = "2GiB",
    cloud: CloudOption = CloudName.aws,
    region: Region = None,
) -> None:
    """Show what machines cost now, by the price of a usable subnet slot."""
    from rich.console import Console

    from idletrain.cli.offers import table
    from idletrain.cloud.aws import pricing
    from idletrain.cloud.aws.instance_types import NodeNeed
    from idletrain.cloud.launcher import node_need

    asked = load_job(job) if job else None
    need = node_need(asked) if asked else NodeNeed(memory_bytes=parse_bytes(memory), most_slots=1)
    kind: Any = "on-demand" if asked and asked.nodes.spot_policy == "on-demand" else "spot"
    with account_of(cloud, region) as account:
        found = pricing.fetch(account.ec2, account.client("pricing", pricing.PRICING_REGION), pricing.PriceCache(CACHE))
        Console().print(table(found.offers(need, kind, asked.nodes.max_price if asked else None), found.estimate))


@app.command()
def doctor(
    job: Annotated[Path | None, typer.Argument(help="A job whose cloud settings to check.")] = None,
    policy: Annotated[
        bool, typer.Option("--policy", help="Print the least that the launcher may do, as IAM JSON.")
    ] = False,
    cloud: CloudOption = CloudName.aws,
    region: Region = None,
) -> None:
    """Check an account: credentials, network, bucket, roles, quotas."""
    from idletrain.cloud.aws import doctor as checks
    from idletrain.cloud.aws import iam as policies
    from idletrain.job import CloudSettings

    asked = load_job(job) if job else None
    settings = asked.cloud if asked else CloudSettings()
    with account_of(cloud, region or settings.region) as account:
        if policy:
            scope = policies.Scope(account=account.number, region=account.region, bucket=account.bucket)
            typer.echo(json.dumps(policies.launcher_policy(scope), indent=2))
            return
        findings = checks.examine(account, settings, account.bucket, gpu=bool(asked and asked.nodes.gpu))
    for finding in findings:
        sign = {True: "ok", False: "MISSING", None: "unknown"}[finding.passed]
        typer.echo(f"{sign:8} {finding.what:18} {finding.text}")
    if any(finding.passed is False for finding in findings):
        raise typer.Exit(1)


@app.command()
def down(name: CloudRunName, cloud: CloudOption = CloudName.aws, region: Region = None) -> None:
    """End a run and everything it has made; safe to repeat."""
    from idletrain.cloud.aws.requests import TAG
    from idletrain.cloud.teardown import down as take_down

    with account_of(cloud, region) as account:
        prefix, run = prefix_of(account, name), _run_name(name)
        tagged = [item.tags.get(TAG + "prefix") for item in (*account.instances(run), *account.remnants(run))]
        if not name.startswith("s3://") and (elsewhere := next(filter(None, tagged), None)):
            prefix = prefix_of(account, elsewhere)  # of a run with a prefix of its own
        if not (_recorded(prefix) or tagged):
            raise RunError(
                f"there is no run {run} in {account.region}; name its region with --region, or its s3:// prefix"
            )
        take_down(account, run, prefix)
    typer.echo(f"{_run_name(name)}: nothing of it is left; its records and snapshots stay in {prefix.url}")


@app.command()
def reap(
    older_than: Annotated[str, typer.Option(help="Leave runs alone that began less than this ago.")] = "10m",
    yes: Annotated[bool, typer.Option("--yes", help="End them; otherwise they are only named.")] = False,
    cloud: CloudOption = CloudName.aws,
    region: Annotated[list[str] | None, typer.Option(help="Regions to look in; repeat for more.")] = None,
    all_regions: Annotated[bool, typer.Option("--all-regions", help="Look in all that the account has.")] = False,
) -> None:
    """Find by tag what outlived its record, its deadline or its head, and end it."""
    from idletrain.cloud import teardown
    from idletrain.storage import S3Prefix

    grace = float(parse_seconds(older_than)) if older_than not in ("0", "0s") else 0.0
    faults: list[str] = []
    places: list[str | None] = [*region] if region else [None]
    if all_regions:
        with account_of(cloud, None) as account:
            places = [*account.regions()]
    for place in places:
        with account_of(cloud, place) as account:
            machines, now = account.instances(), time.time()
            closed = teardown.over(account, machines, now)
            found = teardown.orphans(machines, account.remnants(), now, grace, closed)
            for orphan in found:
                typer.echo(f"{account.region}: {orphan.run}: {orphan.why}" + ("" if yes else "; add --yes to end it"))
                if yes:
                    try:
                        teardown.down(account, orphan.run, S3Prefix.at(orphan.prefix, account.s3))
                    except IdletrainError as error:  # the others end all the same
                        faults.append(str(error))
            if not found:
                typer.echo(f"{account.region}: nothing is left over")
    if faults:
        raise RunError("; ".join(faults))


@app.command(name="cost")
def show_cost(
    name: CloudRunName,
    cloud: CloudOption = CloudName.aws,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show what a run has cost, what it would have cost on demand, and what preemption wasted."""
    with account_of(cloud, region) as account:
        events = read_events(prefix_of(account, name))
    totals = bill_of(events)
    from idletrain.observe.report import cost_line

    typer.echo(json.dumps(totals) if as_json else cost_line(totals))


@app.command()
def logs(
    name: CloudRunName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the run ends.")] = False,
    node: Annotated[str | None, typer.Option(help="A machine's console instead of the run's news.")] = None,
    cloud: CloudOption = CloudName.aws,
    region: Region = None,
) -> None:
    """Print what happened in a run."""
    from idletrain.cloud.launcher import follow as follow_run
    from idletrain.observe.display import LineDisplay, folding
    from idletrain.observe.summary import Summary

    with account_of(cloud, region) as account:
        if node:
            typer.echo(account.console(node))
            return
        prefix, summary = prefix_of(account, name), Summary()
        show = as_seen_from_here(cloud, folding(summary, LineDisplay(sys.stdout, summary)))
        if follow:
            follow_run(prefix, show, account)
            return
        for event in read_events(prefix):
            show(event)


@app.command()
def interrupt(
    name: CloudRunName,
    node: Annotated[str | None, typer.Option(help="The instance; the oldest node otherwise.")] = None,
    cloud: CloudOption = CloudName.aws,
    region: Region = None,
) -> None:
    """Ask a node to go as if the cloud wanted it back: a rehearsal of a spot interruption."""
    from idletrain.cloud.aws.requests import TAG

    with account_of(cloud, region) as account:
        nodes = [i for i in account.instances(_run_name(name), ("running",)) if i.role == "worker"]
        chosen = [i.id for i in sorted(nodes, key=lambda i: (i.launched_at, i.id)) if node in (None, i.id)][:1]
        if not chosen:
            known = ", ".join(i.id for i in nodes) or "none"
            raise RunError(f"run {_run_name(name)} has no running node{f' {node}' if node else ''}; there are: {known}")
        account.tag(chosen, {TAG + "interrupt": "asked"})
    typer.echo(f"{chosen[0]}: asked to go; its partial steps go home first")


@app.command()
def dashboard(name: CloudRunName, cloud: CloudOption = CloudName.aws, region: Region = None) -> None:
    """Open a tunnel to a run's Dask dashboard, which listens on its head's loopback alone."""
    with account_of(cloud, region) as account:
        events = read_events(prefix_of(account, name))
        pages = [event["dashboard"] for event in events if event["kind"] == "run_started"]
        heads = [i for i in account.instances(_run_name(name), ("running",)) if i.role == "head"]
        if not pages or not heads:
            raise RunError(f"run {_run_name(name)} is not going on; `idletrain status` shows how it ended")
        port = pages[-1].rsplit(":", 1)[1].split("/")[0]
        page = f"http://127.0.0.1:{port}/idletrain"  # whatever address the head has in its network
        if cloud is CloudName.sandbox:
            typer.echo(page)
            return
        typer.echo(f"{page} while this command runs")
        asked = json.dumps({"portNumber": [port], "localPortNumber": [port]})
        command = ["aws", "ssm", "start-session", "--region", account.region, "--target", heads[0].id]
        try:
            subprocess.run([*command, "--document-name", DOCUMENT, "--parameters", asked], check=True)
        except FileNotFoundError:
            raise RunError("the tunnel needs the AWS CLI and its session-manager-plugin; install both") from None
        except subprocess.CalledProcessError as error:
            raise RunError(f"the tunnel ended with exit code {error.returncode}; see above") from None


@app.command()
def node(
    memory: Annotated[str | None, typer.Option(help="RAM to use (2GiB); all but the system's otherwise.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Worker processes; as many as fit otherwise.")] = None,
) -> None:
    """Be what this cloud machine's tags say: a run's head, one of its nodes, or what starts a scheduled run."""
    from idletrain.cloud.aws.metadata import Metadata
    from idletrain.cloud.aws.requests import TAG

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    metadata = Metadata()
    role = metadata.tags().get(TAG + "role")
    if role == "head":
        from idletrain.cloud import head_node

        asyncio.run(head_node.serve_head(metadata))
    elif role == "starter":
        from idletrain.schedules import starter_node

        starter_node.start_run(metadata, Path.cwd())
    else:
        from idletrain.cloud import worker_node as worker

        asyncio.run(worker.serve(metadata, parse_bytes(memory) if memory else None, slots))


# --- what launch needs, too -----------------------------------------------------------------------------------------


@contextmanager
def account_of(cloud: CloudName, region: str | None) -> Iterator[Any]:
    """The account that a command is about; the sandbox's is the newest that a `launch --cloud sandbox` has open."""
    if cloud is CloudName.sandbox and not in_sandbox():
        enter_sandbox(json.loads(_newest_sandbox().read_text()))
        region = None
    from idletrain.cloud.aws.account import Account, explained

    with explained():
        yield Account(region)


def in_sandbox() -> bool:
    """Whether a sandbox is this process' cloud already."""
    return "AWS_ENDPOINT_URL" in os.environ


def _newest_sandbox() -> Path:
    open_ = [path for path in SANDBOXES.glob("[0-9]*/address.json") if psutil.pid_exists(int(path.parent.name))]
    if not open_:
        raise RunError("no sandbox is open; `idletrain launch JOB --spot --cloud sandbox` opens one while it runs")
    return max(open_, key=lambda path: path.stat().st_mtime)


@contextmanager
def sandbox(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A rehearsal cloud of this process' own, while the context lasts; `opened` waits until it answers.

    Nothing is left of it but, after a failure, what its machines said, until the next one opens.
    """
    logs = SANDBOXES / str(os.getpid())
    for old in SANDBOXES.glob("[0-9]*"):
        if old == logs or not psutil.pid_exists(int(old.name)):
            shutil.rmtree(old, ignore_errors=True)
    logs.mkdir(parents=True)
    failed = False
    try:
        with (logs / "sandbox.log").open("w") as log, _sandbox_process(logs, arguments, log) as process:
            yield process
    except Exception as error:
        failed = not isinstance(error, JobError)  # a job that is refused has seen no machine
        raise
    finally:
        if failed:
            (logs / "address.json").unlink(missing_ok=True)
            typer.echo(f"idletrain: what the machines said is in {logs}, until the next sandbox opens", err=True)
        else:
            shutil.rmtree(logs)


@contextmanager
def _sandbox_process(logs: Path, arguments: list[str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "idletrain.cloud.sandbox", "--logs", str(logs), *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()  # which leaving the context does not after a Ctrl-C


def sandbox_address(process: subprocess.Popen[str]) -> None:
    """Wait for a sandbox and make it this process' cloud.

    Raises:
        RunError: it does not start.
    """
    assert process.stdout is not None
    line, own = process.stdout.readline(), SANDBOXES / str(os.getpid())
    if not line:
        raise RunError(f"the sandbox did not start; see {own / 'sandbox.log'}, and install idletrain[sandbox]")
    (own / "address.json").write_text(line)
    enter_sandbox(json.loads(line))


def enter_sandbox(address: dict[str, str]) -> None:
    """Point AWS' own configuration at a sandbox; its keys are not secret, as they open nothing else."""
    os.environ |= {
        "AWS_ENDPOINT_URL": address["endpoint"],
        "AWS_DEFAULT_REGION": address["region"],
        "AWS_ACCESS_KEY_ID": "sandbox",
        "AWS_SECRET_ACCESS_KEY": "sandbox",
    }
    for leaking in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        os.environ.pop(leaking, None)


def as_seen_from_here(cloud: CloudName, sink: Sink) -> Sink:
    """A sink that is told how to reach a run's page: from outside of AWS through a tunnel alone."""

    def take(event: Record) -> None:
        if cloud is CloudName.aws and event["kind"] == "run_started":
            event = {**event, "dashboard": f"`idletrain dashboard {event['run']}`", "dashboard_note": ""}
        sink(event)

    return take


def prefix_of(account: Any, name: str) -> Any:
    """A run's prefix: below the account's own bucket, unless it is given whole."""
    from idletrain.storage import S3Prefix

    return S3Prefix.at(name if name.startswith("s3://") else f"s3://{account.bucket}/runs/{name}", account.s3)


def run_prefix(account: Any, job: Job) -> Any:
    """Where a job's run goes: below `checkpoint.to` if that is in S3, else below the account's own bucket."""
    to = job.checkpoint.to
    return prefix_of(account, f"{to.rstrip('/')}/{job.name}" if to.startswith("s3://") else job.name)


def read_events(prefix: Any) -> list[dict[str, Any]]:
    """All events of a run so far."""
    from idletrain.cloud import record
    from idletrain.rounds.durable import s3_mirror

    record.read(prefix)
    return s3_mirror.events(prefix)


def run_status(account: Any, name: str) -> tuple[Any, str]:
    """The summary of a run as it stands, and a sentence where that is not what its last event says: who wrote its
    events may be gone.
    """
    from idletrain.cloud import record
    from idletrain.cloud.aws.account import ALIVE_STATES
    from idletrain.cloud.machine_log import ENDED
    from idletrain.cloud.teardown import lost_head
    from idletrain.observe.summary import summary_of

    prefix = prefix_of(account, name)
    summary, kept = summary_of(read_events(prefix)), record.read(prefix)
    summary.run, summary.run_dir, why = kept.run, prefix.url, ""
    if summary.updated < kept.created:  # all that is told is of a sitting before
        summary.status = "starting"
    if summary.status in UNFINISHED_STATES:
        if kept.failure:
            summary.status, why = "failed", kept.failure
        elif kept.state == "ended":
            summary.status = "taken down"
        elif why := lost_head(account.instances(kept.run, (*ALIVE_STATES, *ENDED)), kept, time.time()):
            summary.status = "interrupted"
    return summary, why


def bill_of(events: list[dict[str, Any]]) -> dict[str, float | None]:
    """What a run has cost, in USD."""
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


def _recorded(prefix: Any) -> bool:
    from idletrain.cloud import record
    from idletrain.cloud.aws.account import explained

    try:
        with explained():
            return prefix.get(record.RUN_RECORD_KEY) is not None
    except IdletrainError:  # no such bucket, or not ours
        return False


def _run_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]
