"""Run a sweep in a cloud: all trials train in turn on the machines of one run, which their head keeps."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from idletrain.cli import kept_rehearsal, spot
from idletrain.cli.arguments import RUNS
from idletrain.cli.cloud_records import named_prefix, run_prefix, stored_results
from idletrain.cli.job_check import check_jobs, checking
from idletrain.cli.offers import show_quote
from idletrain.cli.places import Place, note_launch
from idletrain.cli.printing import tell
from idletrain.cli.sweep_request import SweepRequest
from idletrain.errors import IdletrainError, JobError
from idletrain.held_interrupts import notice_if_slow
from idletrain.providers.protocol import CloudProvider

if TYPE_CHECKING:
    from idletrain.cloud.record import RunRecord
    from idletrain.observe.records import Record
    from idletrain.storage import S3Prefix
    from idletrain.sweeps.trial_results import ResultsFile, SweepResult

SHOWN = ("paused", "resumed", "stopping", "trial", "waiting", "worker_refused", "worker_sick")


@dataclass(frozen=True)
class SweepPlace:
    """Where a sweep runs.

    Attributes:
        provider: The cloud.
        cloud: Its name.
        account: The account that pays.
        prefix: The sweep's prefix; those of its trials are beside it.
        file: Where its results are kept on this machine.
    """

    provider: CloudProvider
    cloud: str
    account: Any
    prefix: S3Prefix
    file: ResultsFile


def sweep_in_cloud(request: SweepRequest, provider: CloudProvider, cloud: str, *, ask: bool) -> dict[str, SweepResult]:
    """Run a sweep's trials, or follow those that run already; return what they have come to.

    Args:
        request: The sweep.
        provider: The cloud.
        cloud: Its name.
        ask: Whether to ask before anything costs money.

    Raises:
        JobError: it cannot run there; nothing was made.
        RunError: it cannot continue.
    """
    from idletrain.sweeps.trial_results import ResultsFile

    file = ResultsFile(RUNS / f"{request.name}.sweep.json")
    known = file.read(request.names)
    if not provider.outlives_command and all(result.ended for result in known.values()):  # else its bucket knows
        tell(f"all trials of {request.name} have ended before; give the sweep another --name to train them again")
        return known
    job = request.job(1)
    spot.end_in_order()
    with provider.opened(), provider.account(provider.launch_region(job)) as account:
        place = SweepPlace(provider, cloud, account, run_prefix(account, job), file)
        run = _under_way(request, place)
        if run is None:
            left = _left(request, place)
            if not left:
                return _taken_home(request, place)
            run = _begun(request, place, left, ask=ask)
        _note(request, place)
        try:
            _follow(place)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                tell(_interrupted_text(run.run, provider))
            with _told(), account.explained():
                _taken_home(request, place)
            raise
        return _taken_home(request, place)


def _interrupted_text(name: str, provider: CloudProvider) -> str:
    if provider.outlives_command:
        return f"{name} goes on by itself: the same command follows it, idletrain down {name} ends it"
    return "stopped; the same command goes on with the trials that have not ended"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tell an error, as another one is what the user is to see at the end."""
    try:
        yield
    except (OSError, IdletrainError) as error:
        tell(f"the results are not kept here ({error})")


def _under_way(request: SweepRequest, place: SweepPlace) -> RunRecord | None:
    """Return the record of the sweep if it runs already.

    Raises:
        JobError: a run has its name, or it runs with other trials or settings.
    """
    from idletrain.cloud import record
    from idletrain.cloud.follow import head_is_lost

    if not place.prefix.names(record.RUN_RECORD_KEY):
        return None
    run = record.read(place.prefix)
    if run.sweep is None:
        raise JobError(f"name: {place.prefix.url} holds a run, which is no sweep; name the sweep with --name")
    if run.state == "ended" or head_is_lost(place.account, run):
        return None
    if (run.sweep, run.job["nodes"]["budget_usd"]) != (request.order, request.job(1).nodes.budget_usd):
        raise JobError(
            f"name: sweep {run.run} runs with other trials or settings; wait for its end, end it with "
            f"`idletrain down {run.run}`, or name this one with --name"
        )
    tell(f"sweep {run.run} runs already")
    return run


def _left(request: SweepRequest, place: SweepPlace) -> int:
    """Return how many trials have not ended; upload what is known of those that a rehearsal before has trained."""
    from idletrain.rounds.durable.s3_mirror import SWEEP_RESULTS

    if not place.provider.outlives_command and place.file.path.exists() and not place.prefix.names(SWEEP_RESULTS):
        place.prefix.put(SWEEP_RESULTS, place.file.path.read_bytes())
    return sum(not result.ended for result in stored_results(place.prefix, request.names).values())


def _begun(request: SweepRequest, place: SweepPlace, left: int, *, ask: bool) -> RunRecord:
    """Check the jobs, show the plan, ask, and start the machines."""
    from idletrain.cloud import launcher, record
    from idletrain.cloud.workdir import unsent
    from idletrain.observe.provenance import command_line

    provider, account, job = place.provider, place.account, request.job(left)
    if faults := [*provider.faults(job), *unsent(job)]:
        raise JobError(faults)
    again = bool(place.prefix.names(record.RUN_RECORD_KEY))
    tell("reading the model and the data")
    first, *others = request.to_check()
    with checking(first) as check:
        plan = spot.plan_machines(job, provider, account, check, resumed=again)
    check_jobs(others)
    if ask:
        show_quote(plan.quote, plan.estimate)
        typer.confirm(f"{left} trials, for ${request.budget_usd:.2f} at most. Start?", abort=True)
    run = launcher.start(
        replace(plan, sweep=request.order),
        account,
        place.prefix,
        image=provider.pinned_image(account, provider.image(job)),
        resume=again,
        command=command_line(sys.argv),
        report=tell,
    )
    tell(f"waiting {provider.boot_reason}")
    return run


def _note(request: SweepRequest, place: SweepPlace) -> None:
    """Note where the sweep and its trials are, so that their names are enough for other commands."""
    account, process = place.account, None if place.provider.outlives_command else os.getpid()
    for name in (request.name, *request.names):
        url = place.prefix.beside(name).url
        own = url if url != named_prefix(account, name).url else name
        note_launch(Place(own, place.cloud, None if process else account.region, process))


def _follow(place: SweepPlace) -> None:
    """Print what happens until the sweep and its machines have ended."""
    from idletrain.cloud.follow import follow, leftover_after
    from idletrain.observe.display import describe_event

    ending = contextlib.ExitStack()

    def show(event: Record) -> None:
        if event["kind"] in SHOWN:
            tell(describe_event(event) or "")
        if event["kind"] == "run_ended":
            ending.enter_context(notice_if_slow("ending the sweep's machines"))

    with ending:
        ended = follow(place.prefix, show, place.account)
        left = leftover_after(place.account, ended)
    if left:
        tell(left)


def _taken_home(request: SweepRequest, place: SweepPlace) -> dict[str, SweepResult]:
    """Keep the results on this machine, and of a rehearsal the ended runs as well, whose bucket ends with it."""
    from idletrain.sweeps.trial_results import SweepResult

    results = stored_results(place.prefix, request.names)
    known = [name for name, result in place.file.read(request.names).items() if result.ended]  # kept before
    if not place.provider.outlives_command:
        for name, result in results.items():
            if not result.ended:
                results[name] = SweepResult(result.state, result.reason)  # it begins again
            elif name not in known:
                _keep(place, name)
    place.file.write(results)
    return results


def _keep(place: SweepPlace, name: str) -> None:
    """Keep a rehearsed trial's run."""
    directory = kept_rehearsal.free_directory(name)
    if kept_rehearsal.keep(place.account, place.prefix.beside(name), directory) and directory.name != name:
        tell(f"runs/ has a run {name}; this one is {directory}")
