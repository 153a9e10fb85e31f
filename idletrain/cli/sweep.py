"""Run one job with several settings: `idletrain sweep`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from idletrain.cli.arguments import RUNS, JobFile
from idletrain.cli.cloud_records import bill_of
from idletrain.cli.job_check import check_jobs
from idletrain.cli.places import events_of, find_run, seen_until
from idletrain.cli.printing import tell
from idletrain.cli.sweep_request import SweepRequest
from idletrain.cli.sweep_table import print_results
from idletrain.cli.trust import import_from_here
from idletrain.end_signals import ended_by_signals
from idletrain.errors import JobError, RunError
from idletrain.held_interrupts import notice_if_slow
from idletrain.providers.protocol import CloudProvider, LaunchRequest, Provider
from idletrain.providers.table import provider_named

if TYPE_CHECKING:
    from idletrain.job import Job
    from idletrain.observe.records import Record
    from idletrain.sweeps import trial_process
    from idletrain.sweeps.running import Sweep
    from idletrain.sweeps.trial_results import SweepResult

app = typer.Typer()


@app.command(rich_help_panel="Train")
def sweep(
    job: JobFile,
    varied: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="A setting and its values (training.optimizer.lr=0.05,0.1); repeat for more.",
            metavar="PATH=A,B",
            show_default=False,
        ),
    ],
    parallel: Annotated[int, typer.Option(min=1, help="Trials that run at a time.")] = 1,
    prune: Annotated[
        bool, typer.Option("--prune", help="Stop trials that others are far ahead of (Optuna's successive halving).")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="USD that all trials together may cost.", metavar="5usd", show_default=False)
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="Use this Dask cluster instead of local workers.")] = None,
    cloud: Annotated[str | None, typer.Option(help="Where machines come from: aws, sandbox, ...")] = None,
    name: Annotated[
        str | None, typer.Option(help="The sweep's name, of which its runs' begin; the job's if none.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Start machines that cost money without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a job with each combination of settings. The same command goes on where it was stopped."""
    import_from_here()
    from idletrain.job_file import read_tree
    from idletrain.sweeps.grid import parse_varied, trials

    tree = read_tree(job) | ({"name": name} if name else {})
    found = trials(tree, [parse_varied(text) for text in varied])
    provider = provider_named(cloud or ("scheduler" if scheduler else "local"), LaunchRequest(scheduler=scheduler))
    budget_usd = parse_usd(budget) if budget else None
    costs, faults = cost_and_faults(provider, found[0].job, budget_usd)
    if faults:
        raise JobError(faults)
    watched, better = _watched(found[0].job)
    request = SweepRequest(
        name=tree["name"], trials=found, watched=watched, better=better, prune=prune, budget_usd=budget_usd
    )
    if isinstance(provider, CloudProvider):
        from idletrain.cli.cloud_sweep import sweep_in_cloud
        from idletrain.sweeps.running import refuse_changed
        from idletrain.sweeps.trial_results import ResultsFile

        refuse_changed(found, ResultsFile(_results_path(request.name)).read(request.names))
        if faults := request.cloud_faults(parallel):
            raise JobError(faults)
        results: Mapping[str, SweepResult] = sweep_in_cloud(request, provider, cloud or "", ask=costs and not yes)
    else:
        results = _on_workers(request, scheduler, parallel)
    print_results(found, results, watched, better, as_json=as_json)
    if left := [name for name, result in results.items() if not result.ended]:
        raise RunError(f"{len(left)} of {len(found)} trials did not end: the same command goes on with them")


def _on_workers(request: SweepRequest, scheduler: str | None, parallel: int) -> Mapping[str, SweepResult]:
    """Run the trials in processes of their own, on this machine's workers or those of a scheduler."""
    from idletrain.rounds.durable.history import holds_run
    from idletrain.sweeps import trial_process
    from idletrain.sweeps.running import Sweep, SweepSettings
    from idletrain.sweeps.trial_results import ResultsFile

    options = ("--scheduler", scheduler) if scheduler else ()

    def start(job: Job) -> AbstractAsyncContextManager[trial_process.TrialProcess]:
        return trial_process.launched(job, again=holds_run(job.run_dir), options=options)

    settings = SweepSettings(
        start=start,
        events_of=_events_here,
        parallel=parallel,
        watched=request.watched,
        better=request.better,
        prune=request.prune,
        budget_usd=request.budget_usd,
        cost_of=cost_of,
        report=tell,
    )
    under_way = Sweep(request.trials, ResultsFile(_results_path(request.name)), settings)
    left = [job for job in request.to_check() if not under_way.results[job.name].ended]
    if not all(result.ended for result in under_way.results.values()):
        trial_process.warm_up()
        with notice_if_slow("reading the model and the data"):
            check_jobs(left)
    try:
        asyncio.run(_to_its_end(under_way))
    except KeyboardInterrupt:
        tell("stopped; the same command goes on where it was")
        raise
    return under_way.results


def _results_path(name: str) -> Path:
    return RUNS / f"{name}.sweep.json"


async def _to_its_end(under_way: Sweep) -> None:
    with ended_by_signals():
        await under_way.run()


def _events_here(job: Job) -> list[Record]:
    from idletrain.observe.records import read_records

    file = job.run_dir / "events.jsonl"
    return list(read_records(file)) if file.exists() else []


def parse_usd(text: str) -> float:
    """Parse an amount such as 5usd, $5 or 5.

    Raises:
        JobError: it is none.
    """
    try:
        amount = float(text.lower().strip().removeprefix("$").removesuffix("usd"))
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise JobError(f"--budget: {text!r} should be an amount such as 5usd")
    return amount


def cost_of(record: Mapping[str, Any]) -> float:
    """Return what a run has cost, in USD; nothing on this machine."""
    place = find_run(str(record["run_dir"]).removesuffix("/"))
    events = events_of(place)
    return bill_of(events, seen_until(place, events))["spent_usd"] or 0.0


def sweep_faults(provider: Provider, job: Job, varied: Sequence[str], budget: str) -> list[str]:
    """Return what is wrong with a sweep of a job by a provider's nodes."""
    from idletrain.sweeps.grid import parse_varied, trials

    try:
        found = trials(job.model_dump(exclude_unset=True), [parse_varied(text) for text in varied])
        budget_usd = parse_usd(budget) if budget else None
        faults = cost_and_faults(provider, job, budget_usd)[1]
        request = SweepRequest(name=job.name, trials=found, watched="loss", better="lower")  # of no matter to a cloud
        return faults + (request.cloud_faults(parallel=1) if isinstance(provider, CloudProvider) else [])
    except JobError as error:
        return list(error.faults)


def cost_and_faults(provider: Provider, job: Job, budget_usd: float | None) -> tuple[bool, list[str]]:
    """Return whether trials cost money, and what the provider refuses, or that a budget is missing."""
    costs = isinstance(provider, CloudProvider) and provider.costs_money
    faults = list(provider.faults(job))
    if costs and budget_usd is None:
        faults.append("--budget: is missing; say what all trials together may cost, such as 5usd")
    return costs, faults


def _watched(job: Job) -> tuple[str, Literal["higher", "lower"]]:
    """Return what tells a good trial, and which value of it is better: what the job watches, else the test loss."""
    name = job.stop.watched or "loss"
    own = job.training.metrics.get(name)
    if own is None:
        return name, "lower" if name == "loss" else "higher"
    if own.better:
        return name, own.better
    from idletrain.nn.faults import resolve
    from idletrain.nn.metric_checks import named_metrics

    (metric,) = named_metrics({name: own}, {}, resolve)
    return name, metric.better
