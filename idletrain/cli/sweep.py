"""Run one job with several settings: `idletrain sweep`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from idletrain.cli.arguments import RUNS, JobFile
from idletrain.cli.cloud_records import bill_of
from idletrain.cli.places import events_of, find_run, seen_until
from idletrain.cli.printing import tell
from idletrain.cli.trust import import_from_here
from idletrain.errors import JobError, RunError
from idletrain.providers.protocol import CloudProvider, LaunchRequest, Provider
from idletrain.providers.table import provider_named

if TYPE_CHECKING:
    from rich.console import RenderableType

    from idletrain.job import Job
    from idletrain.sweeps.grid import SweepTrial
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
    from idletrain.sweeps.running import Sweep, SweepSettings
    from idletrain.sweeps.trial_results import ResultsFile

    tree = read_tree(job) | ({"name": name} if name else {})
    found = trials(tree, [parse_varied(text) for text in varied])
    first = found[0].job
    provider = provider_named(cloud or ("scheduler" if scheduler else "local"), LaunchRequest(scheduler=scheduler))
    budget_usd = parse_usd(budget) if budget else None
    costs, faults = cost_and_faults(provider, first, budget_usd)
    if faults:
        raise JobError(faults)
    watched, better = _watched(first)
    settings = SweepSettings(
        options=[*(("--scheduler", scheduler) if scheduler else ()), *(("--cloud", cloud, "--yes") if cloud else ())],
        parallel=parallel,
        watched=watched,
        better=better,
        prune=prune,
        budget_usd=budget_usd,
        cost_of=cost_of,
        report=tell,
    )
    under_way = Sweep(found, ResultsFile(RUNS / f"{tree['name']}.sweep.json"), settings)
    if costs and not yes:
        typer.confirm(f"{len(found)} trials, for ${budget_usd:.2f} at most. Start?", abort=True)
    try:
        asyncio.run(under_way.run())
    except KeyboardInterrupt:
        tell("stopped; the same command goes on where it was")
        raise
    results = under_way.results
    if as_json:
        typer.echo(json.dumps([{**asdict(results[t.job.name]), "name": t.job.name, "set": t.values} for t in found]))
    else:
        from rich.console import Console

        Console().print(_table(found, results, watched, better))
        for name_, result in results.items():
            for warning in result.record.get("warnings", ()):
                typer.echo(f"warning: {name_}: {warning}", err=True)
    if left := [name for name, result in results.items() if not result.ended]:
        raise RunError(f"{len(left)} of {len(found)} trials did not end: the same command goes on with them")


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
        trials(job.model_dump(exclude_unset=True), [parse_varied(text) for text in varied])
        return cost_and_faults(provider, job, parse_usd(budget) if budget else None)[1]
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
    return name, (own and own.better) or ("lower" if name == "loss" else "higher")


def _table(
    found: Sequence[SweepTrial], results: Mapping[str, SweepResult], watched: str, better: Literal["higher", "lower"]
) -> RenderableType:
    """Return a table of the trials, the best first."""
    from rich import box
    from rich.table import Table

    from idletrain.observe import charts
    from idletrain.sweeps.grid import as_written

    def rank(trial: SweepTrial) -> tuple[bool, float]:
        value = results[trial.job.name].value
        known = value is not None and math.isfinite(value)
        return not known, (-value if better == "higher" else value) if known and value is not None else 0.0

    table = Table(box=box.SIMPLE, pad_edge=False)
    paths = list(found[0].values)
    priced = any(result.usd for result in results.values())
    classes = watched != "accuracy" and any(result.record.get("accuracy") is not None for result in results.values())
    scores = (watched, *(("accuracy",) if classes else ()))
    settings = (path.rpartition(".")[2] for path in paths)
    for column in (*settings, "state", "rounds", *scores, "time", *(("cost",) if priced else ())):
        table.add_column(column, justify="left" if column == "state" else "right")
    table.add_column("run")
    for trial in sorted(found, key=rank):
        result = results[trial.job.name]
        table.add_row(
            *(as_written(trial.values[path]) for path in paths),
            result.state,
            str(result.values[-1][0] if result.values else "-"),
            charts.fixed(result.value),
            *((charts.fixed(result.record.get("accuracy")),) if classes else ()),
            charts.duration(result.record["seconds"]) if result.record else "-",
            *((charts.usd(result.usd),) if priced else ()),
            trial.job.name,
        )
    return table
