"""Read what a run has written below its prefix in a cloud."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from idletrain.errors import JobError, reading
from idletrain.observe.records import Record, Sink
from idletrain.providers.protocol import CloudProvider

if TYPE_CHECKING:
    from idletrain.cloud.record import SweepOrder
    from idletrain.job import Job
    from idletrain.storage import S3Prefix
    from idletrain.sweeps.trial_results import SweepResult

UNFINISHED_STATES = ("starting", "running")  # states of a run whose head has not recorded its end


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


def sweep_at(prefix: Any) -> SweepOrder | None:
    """Return the sweep that a prefix holds; None if it holds a run.

    Raises:
        RunError: it holds neither.
    """
    from idletrain.cloud import record

    return record.read(prefix).sweep


def sweep_of(prefix: Any) -> str:
    """Return the sweep on whose machines a run trains as a trial, or "" if it has its own."""
    from idletrain.cloud import record

    return record.read(prefix).of_sweep if prefix.names(record.RUN_RECORD_KEY) else ""


def trained_now(prefix: Any) -> Any:
    """Return the prefix of the trial that a sweep trains now; of a run, its own."""
    if (sweep := sweep_at(prefix)) is None:
        return prefix
    results = stored_results(prefix, trial_names(prefix, sweep))
    return next((prefix.beside(name) for name, result in results.items() if result.state == "running"), prefix)


def refuse_trial(prefix: Any, name: str) -> None:
    """Raise JobError for a trial, whose machines are its sweep's."""
    if sweep := sweep_of(prefix):
        raise JobError(f"{name} is a trial of the sweep {sweep} and trains on its machines; name {sweep}")


def stored_results(prefix: S3Prefix, names: Sequence[str]) -> dict[str, SweepResult]:
    """Return what the trials of a sweep, named so, have come to, as its head has stored it.

    Raises:
        DamageError: it is something else.
    """
    from idletrain.rounds.durable.s3_mirror import SWEEP_RESULTS
    from idletrain.sweeps.trial_results import parse_results

    stored = prefix.get(SWEEP_RESULTS)
    with reading(f"{prefix.url}{SWEEP_RESULTS}", "take that object away"):
        return parse_results(stored.content if stored else b"{}", names)


def run_status(account: Any, name: str) -> tuple[Any, str, list[dict[str, Any]]]:
    """Return a run's summary, what its last event does not say (its head is gone, or what is left), and its events."""
    from idletrain.cloud import record
    from idletrain.cloud.follow import last_events
    from idletrain.cloud.machines import ALIVE_STATES, ENDED_STATES
    from idletrain.cloud.teardown import lost_head
    from idletrain.observe.summary import summary_of

    prefix = named_prefix(account, name)
    events, written = read_events(prefix), record.read(prefix)
    summary = summary_of(events)
    if written.sweep:
        _count_trials(summary, prefix, written.sweep)
    summary.run, summary.run_dir, why = written.run, prefix.url, written.leftover
    if last_events(prefix) <= written.events_after:  # all are from before this session
        summary.status = "starting"
    if summary.status in UNFINISHED_STATES:
        if written.failure:
            summary.status, why = "failed", written.failure
        elif written.state == "ended":
            summary.status = "taken down"
        elif written.site.region == account.region:  # only there its machines are listed
            machines = account.instances(written.fleet, (*ALIVE_STATES, *ENDED_STATES))
            if lost := lost_head(machines, written, time.time()):
                summary.status, why = "interrupted", lost
    return summary, why, events


def trial_names(prefix: Any, sweep: SweepOrder) -> list[str]:
    """Return the names of a sweep's trials.

    Raises:
        DamageError: its record names none.
    """
    with reading(f"{prefix.url}record.json", "look at it with the idletrain that wrote it"):
        return [str(trial["job"]["name"]) for trial in sweep.trials]


def _count_trials(summary: Any, prefix: Any, sweep: SweepOrder) -> None:
    """Have the summary of a sweep count trials as that of a run does rounds."""
    results = stored_results(prefix, trial_names(prefix, sweep))
    summary.rounds, summary.total_rounds = sum(result.ended for result in results.values()), len(results)


def billed_events(account: Any, prefix: Any, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's events so far, and an end for each machine that is gone and whose end no head recorded."""
    from idletrain.cloud import machine_log, record

    ends = machine_log.closing_records(events, (), time.time())
    if not ends or (written := record.read(prefix)).site.region != account.region:
        return events
    alive = {machine.id for machine in account.instances(written.fleet)}
    return [*events, *(end for end in ends if end["instance"] not in alive)]


def bill_of(events: list[dict[str, Any]], now: float) -> dict[str, float | None]:
    """Return what a run has cost until `now` and will cost, in USD, and the share saved against on-demand prices."""
    from idletrain.observe import cost

    bill = cost.accrued(events, now)
    return {
        "spent_usd": bill.spent_usd,
        "usd_per_hour": bill.usd_per_hour,
        "on_demand_usd": bill.on_demand_usd,
        "saving": bill.saving,
        "wasted_usd": cost.wasted_usd(events, now),
        "forecast_usd": cost.forecast_usd(events, now),
    }


def as_seen_from_here(provider: CloudProvider, account: Any, run_dir: str, sink: Sink) -> Sink:
    """Return a sink that gets a run's events as this machine sees it: its dashboard's link, and where its files are.

    Args:
        provider: The run's cloud.
        account: Its account.
        run_dir: Where the run's files are: the head's own directory ends with its machine.
        sink: Gets the events.
    """

    def take(event: Record) -> None:
        where = {"run_dir": run_dir} if "run_dir" in event else {}
        sink({**provider.seen_from_here(event, account), **where})

    return take
