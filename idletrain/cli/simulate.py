"""`idletrain simulate`: what a job would come to on a fleet of any size, in seconds and for nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idletrain.cli.arguments import JobFile, check_writable, read_job_file, seconds_option, write_output
from idletrain.cli.trust import import_from_here
from idletrain.errors import JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from idletrain.job import Job
    from idletrain.simulation.engine import Outcome, Policy, Work
    from idletrain.simulation.fleet import Fleet

app = typer.Typer()
HOUR, GIGABIT_BYTES = 3600.0, 125e6
MOST_HOURS = 1e6  # more than a century
MOST_EVENTS = 100_000  # of a policy's simulation: some ten seconds
POLICIES: tuple[Policy, ...] = ("reissue", "salvage", "rolling")


@app.command("simulate", rich_help_panel="Train")
def simulate_fleet(
    job: JobFile,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; the job's nodes.count otherwise.")] = None,
    hours: Annotated[float, typer.Option(min=0.001, max=MOST_HOURS, help="Simulated time.")] = 1.0,
    stay: Annotated[
        float | None,
        typer.Option(parser=seconds_option, metavar="6h", help="Mean time that a node stays (6h); for ever otherwise."),
    ] = None,
    back: Annotated[
        float,
        typer.Option(
            parser=seconds_option, metavar="2m", help="Mean time until its successor is at work.", show_default="2m"
        ),
    ] = "2m",  # type: ignore[assignment]
    notice: Annotated[
        float,
        typer.Option(parser=seconds_option, metavar="2m", help="Warning before a node goes.", show_default="none"),
    ] = "0s",  # type: ignore[assignment]
    shape: Annotated[float, typer.Option(min=0.1, help="Weibull shape of the time that nodes stay.")] = 1.0,
    spread: Annotated[float, typer.Option(min=0, help="Standard deviation of the log of nodes' pace.")] = 0.1,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace of nodes (lines `milliseconds,add|remove,node`).")
    ] = None,
    gigabits: Annotated[float, typer.Option(min=0.001, help="Each node's link, in Gbit/s.")] = 1.0,
    step: Annotated[
        float | None,
        typer.Option(parser=seconds_option, metavar="10ms", help="A subnet's step; measured here otherwise."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="USD an hour of a node.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write an HTML file: goodput by how often nodes are lost.", dir_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show what a job comes to on a fleet whose nodes come and go, by every policy that it allows. Nothing is started.

    Beside them stands data parallel training by simple models: one goes back to its last checkpoint of every ten
    minutes and pauses for a minute, one loses the step under way and pauses for two seconds.
    """
    import json

    from rich.console import Console

    from idletrain.simulation.engine import Simulation
    from idletrain.simulation.fleet import Fleet
    from idletrain.simulation.peers import PEERS, data_parallel

    written = read_job_file(job, nodes)
    if step is not None and step <= 0:
        raise JobError("--step: a step takes some time; name it, such as 10ms")
    if plot:
        check_writable(plot, "--plot")
    fleet = Fleet(
        nodes=written.nodes.count,
        stay_seconds=stay or math.inf,
        shape=shape,
        return_seconds=back,
        notice_seconds=notice,
        spread=spread,
        changes=_changes(trace) if trace else (),
        seed=seed,
    )
    import_from_here()
    typer.echo("idletrain: reading the model and the data", err=True)
    works = _works(written, gigabits, step)
    outcomes: dict[str, Outcome] = {}
    for policy, work in works.items():
        typer.echo(f"idletrain: simulating {policy}", err=True)
        outcomes[policy] = Simulation(work, fleet).run(hours * HOUR, MOST_EVENTS)
    step_seconds = max(work.step_seconds for work in works.values())
    outcomes |= {name: data_parallel(model(step_seconds), fleet, hours * HOUR) for name, model in PEERS.items()}
    if plot:
        _plot(plot, works, fleet, hours)
    if as_json:
        typer.echo(json.dumps({name: _figures(found, price) for name, found in outcomes.items()}))
        return
    Console().print(_table(outcomes, hours, price))
    if plot:
        typer.echo(f"{plot} shows goodput by how often nodes are lost")


def _figures(outcome: Outcome, price: float | None) -> dict[str, float]:
    """Return all figures of an outcome."""
    cost = {} if price is None else {"usd": outcome.alive_seconds / HOUR * price}
    return {**asdict(outcome), "goodput": outcome.goodput, **cost}


def _plot(path: Path, works: Mapping[Policy, Work], fleet: Fleet, hours: float) -> None:
    """Write the page of what each kind of training comes to at several rates of lost nodes.

    Raises:
        JobError: the file cannot be written.
    """
    from idletrain.observe import charts
    from idletrain.simulation.failure_rates import PARTS, goodput_by_rate

    def report(done: int, rates: int) -> None:
        typer.echo(f"idletrain: simulating rate {done} of {rates} for the page", err=True)

    lines = goodput_by_rate(works, fleet, hours * HOUR, MOST_EVENTS / len(PARTS), report)
    series = [charts.Series(name, points, number) for number, (name, points) in enumerate(lines.items())]
    page = charts.templates().get_template("simulation.html")
    text = page.render(
        title=f"{fleet.nodes} simulated nodes, {hours:g} hours",
        sentence=f"A node that is lost is replaced after {fleet.return_seconds:g} s on average.",
        chart=charts.chart("goodput", "losses of a node and hour", series, better="higher"),
        rows=[*lines.items()],
    )
    write_output(path, text, "--plot")


def _changes(path: Path) -> tuple[tuple[float, str, bool], ...]:
    """Read a trace.

    Raises:
        JobError: it cannot be read, or is none.
    """
    from idletrain.simulation.trace import check_trace, read_trace

    try:
        changes = read_trace(path.read_text())
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror}); name a recorded trace") from None
    except UnicodeDecodeError:
        raise JobError(f"{path}: is no text; name a recorded trace") from None
    check_trace(changes)
    return tuple(((c.at_ms - changes[0].at_ms) / 1000, c.node, c.present) for c in changes)


def _subnets(job: Job, policy: Policy) -> int:
    """Return the job's subnets; where it leaves them open, one for each node, and a quarter more without a barrier."""
    if "subnets" in job.training.model_fields_set:
        return job.training.subnets
    return job.nodes.count + (-(-job.nodes.count // 4) if policy == "rolling" else 0)


def _works(job: Job, gigabits: float, step: float | None) -> dict[Policy, Work]:
    """Return what nodes do for a job under each policy that it goes with, and print why the others are left out.

    Raises:
        JobError: it goes with none.
    """
    works: dict[Policy, Work] = {}
    refused: dict[Policy, JobError] = {}
    for policy in POLICIES:
        try:
            works[policy] = work_of(job, policy, _subnets(job, policy), gigabits, step)
        except JobError as error:
            refused[policy] = error
    if not works:
        raise refused[POLICIES[0]]
    for policy, why in refused.items():
        typer.echo(f"idletrain: {policy} is left out: {why}", err=True)
    return works


def work_of(job: Job, policy: Policy, subnets: int, gigabits: float, step: float | None) -> Work:
    """Return what nodes do for a job under a policy.

    Args:
        job: The job.
        policy: How it deals with lost nodes.
        subnets: The subnets of a round.
        gigabits: Each node's link, in Gbit/s.
        step: Seconds of a subnet's step; None to measure it here.

    Raises:
        JobError: the job's network cannot be split so, or its settings do not go with the policy.
    """
    from idletrain.autotune.step_time import step_seconds, typical
    from idletrain.contradictions import contradictions
    from idletrain.nn.prepare import prepare_job
    from idletrain.nn.rolling import check_rolling, equal_specs
    from idletrain.nn.threads import one_thread
    from idletrain.simulation.engine import Work
    from idletrain.worker.encoding import nbytes

    preemption = job.preemption.model_copy(update={"policy": policy})
    for _, why in contradictions(job.model_copy(update={"preemption": preemption})):
        raise JobError(why)
    training, rolling = job.training, policy == "rolling"
    settled = training.model_copy(update={"subnets": subnets})
    prepared = prepare_job(job.model_copy(update={"training": settled}))
    program = prepared.program
    if rolling:
        check_rolling(program)
    subnet = program.subnets(0, equal_specs(program))[0] if rolling else typical(program)
    if step is None:
        with one_thread():
            step = step_seconds(prepared, subnet, 0)
    rate = gigabits * GIGABIT_BYTES
    return Work(
        policy=policy,
        subnets=subnets,
        local_steps=training.local_steps,
        step_seconds=step,
        pull_seconds=nbytes(program, subnet, "pull") / rate,
        push_seconds=nbytes(program, subnet, "push") / rate,
        pull_bytes=nbytes(program, subnet, "pull"),
        push_bytes=nbytes(program, subnet, "push"),
        progress_seconds=job.preemption.progress_every,
        slack=training.slack,
    )


def _table(outcomes: Mapping[str, Outcome], hours: float, price: float | None) -> RenderableType:
    """Return a table of what each kind of training came to."""
    from rich import box
    from rich.table import Table

    cut = any(outcome.seconds < hours * HOUR for outcome in outcomes.values())
    note = f": of {hours:g} hours, those that take {MOST_EVENTS:,} events" if cut else ""
    table = Table(title=f"a simulated fleet{note}", title_justify="left", box=box.SIMPLE, pad_edge=False)
    time = ("hours",) if cut else ()
    cost = () if price is None else ("USD", "steps a USD")
    table.add_column("training", no_wrap=True)
    for column in (*time, "goodput", "steps a neuron", "GB moved", "lost", *cost):
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    for name, outcome in outcomes.items():
        row = [name, *(f"{outcome.seconds / HOUR:.3g}" for _ in time), f"{outcome.goodput:.1%}"]
        own = (f"{outcome.steps_a_neuron:,.0f}", f"{outcome.moved_bytes / 1e9:,.3g}") if name in POLICIES else ("", "")
        row += [*own, f"{outcome.lost:,}"]
        if price is not None:
            usd = outcome.alive_seconds / HOUR * price
            row += [f"{usd:,.2f}", f"{outcome.steps_a_neuron / usd:,.0f}" if usd else "-"]
        table.add_row(*row)
    return table
