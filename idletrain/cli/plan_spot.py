"""Plan a run on spot machines: what they cost, how often they go, and which settings train most for a dollar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from idletrain import storage
from idletrain.cli.offers import show_quote
from idletrain.cli.simulate import HOUR, POLICIES, work_of
from idletrain.errors import JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from idletrain.cloud.launcher import SpotPlan
    from idletrain.job import Job
    from idletrain.providers.protocol import CloudProvider
    from idletrain.simulation.engine import Policy, Work
    from idletrain.simulation.fleet import Fleet

MONTH_SECONDS = 30 * 86400.0
UNKNOWN_SHARE = 0.2  # of such machines that are taken back in a month: where AWS' highest range begins
MOST_EVENTS = 10_000  # of one simulation: about a second
RETURN_SECONDS, NOTICE_SECONDS = 120.0, 120.0  # a machine and its image; AWS' notice
NODE_GIGABITS = 1.0  # what small machines have all the time
COUNTS = (1.0, 1.25, 1.5, 2.0)  # subnets for each node, where the job leaves them open


class SpotChoice(NamedTuple):
    """A policy and a number of subnets, with its simulated result."""

    policy: Policy
    subnets: int
    goodput: float
    steps_a_usd: float
    """Local steps of each neuron for a dollar."""


def show_spot_plan(job: Job, provider: CloudProvider, region: str | None) -> None:
    """Print what a run on a cloud's machines costs, and which settings train most for a dollar.

    Raises:
        JobError: no machine fits, or the job's network cannot be split.
    """
    from rich.console import Console

    from idletrain.cloud import launcher
    from idletrain.simulation.fleet import Fleet

    with provider.opened(), provider.account(region or provider.launch_region(job)) as account:
        plan = launcher.make_spot_plan(job, account, storage.cache_folder())
        shares = account.interruptions(storage.cache_folder())
    show_quote(plan.quote, plan.estimate)
    share, known = share_of(plan, shares)
    about = "the share that AWS took last month" if known else "assumed, as nothing is known of these types"
    typer.echo(f"{'taken back':<10} {share:.0%} of such machines a month: {about}")
    fleet = Fleet(
        nodes=job.nodes.count,
        stay_seconds=stay_seconds(share),
        return_seconds=RETURN_SECONDS,
        notice_seconds=NOTICE_SECONDS,
    )
    typer.echo("idletrain: timing steps of subnets here", err=True)
    seconds = plan.quote.deadline_seconds
    found = candidates(works_of(job), fleet, seconds, plan.quote.usd_per_hour * seconds / HOUR)
    best = found[0]
    Console().print(_table(found))
    typer.echo(f"{'best':<10} preemption.policy: {best.policy}, training.subnets: {best.subnets}")


def share_of(plan: SpotPlan, shares: Mapping[str, float]) -> tuple[float, bool]:
    """Return the share of a plan's spot machines that is taken back in a month, and whether that is known."""
    known = [shares[type_] for type_ in plan.quote.preferred.types if type_ in shares]
    if all(offer.market == "on-demand" for offer in plan.quote.preferred.offers):
        return 0.0, True
    return (statistics.mean(known), True) if known else (UNKNOWN_SHARE, False)


def stay_seconds(share: float) -> float:
    """Return how long a machine stays on average, if this share of them ends in a month; infinite for none."""
    return MONTH_SECONDS / -math.log1p(-share) if share else math.inf


def works_of(job: Job) -> list[Work]:
    """Return what nodes can do for a job: under each policy, with each number of subnets that the job allows.

    Raises:
        JobError: its network cannot be split so.
    """
    fixed = "subnets" in job.training.model_fields_set
    counts = [job.training.subnets] if fixed else sorted({math.ceil(part * job.nodes.count) for part in COUNTS})
    works: list[Work] = []
    refused: JobError | None = None
    for count in counts:
        step: float | None = None
        for policy in POLICIES:
            try:
                works.append(work_of(job, policy, count, NODE_GIGABITS, None if policy == "rolling" else step))
            except JobError as error:  # a network of few blocks, or one that `rolling` does not train
                refused = error
                continue
            step = works[-1].step_seconds
    if not works and refused:
        raise refused
    return works


def candidates(works: Sequence[Work], fleet: Fleet, seconds: float, usd: float) -> list[SpotChoice]:
    """Return what each way comes to, the most steps of a neuron for a dollar first."""
    from idletrain.simulation.engine import Simulation

    found = []
    for work in works:
        typer.echo(f"idletrain: simulating {work.policy} with {work.subnets} subnets", err=True)
        outcome = Simulation(work, fleet).run(seconds, MOST_EVENTS)
        paid = usd * outcome.seconds / seconds
        found.append(SpotChoice(work.policy, work.subnets, outcome.goodput, outcome.steps_a_neuron / paid))
    return sorted(found, key=lambda candidate: -candidate.steps_a_usd)


def _table(found: Sequence[SpotChoice]) -> RenderableType:
    from rich import box
    from rich.table import Table

    title = f"what a dollar trains: simulated, with links of {NODE_GIGABITS:g} Gbit/s and steps as fast as here"
    table = Table(caption=title, caption_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("policy")
    for column in ("subnets", "goodput", "steps a neuron"):
        table.add_column(column, justify="right")
    for candidate in found:
        table.add_row(
            candidate.policy, str(candidate.subnets), f"{candidate.goodput:.1%}", f"{candidate.steps_a_usd:,.0f}"
        )
    return table
