"""Store a run's record below its S3 prefix, before any other resource is created, so that none can be forgotten.

The record is created by a conditional write, which also locks the run's name.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from idletrain.cloud.machines import TAG, LaunchSite, Pool
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.errors import DamageError, JobError, RunError
from idletrain.storage import ConflictError, S3Prefix

RUN_RECORD_KEY = "record.json"
SUMMARY_KEY = "summary.json"  # written when a run's head node has finished it
MODEL_KEY = "model.safetensors"
REPORT_KEY = "report.html"


@dataclass(frozen=True, kw_only=True)
class SweepOrder:
    """A sweep that trains its trials in turn on the machines of one run.

    Attributes:
        trials: They as plain values (`sweeps.grid.as_plain`).
        watched: What tells a good trial: `loss`, `accuracy` or a metric's name.
        better: Which of two values of it is the better one.
        prune: Whether trials that others are far ahead of are stopped.
    """

    trials: list[dict[str, dict[str, Any]]]
    watched: str
    better: Literal["higher", "lower"]
    prune: bool


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run in a cloud, or a sweep.

    Attributes:
        job: The job, as plain values.
        tags: Tags of all resources of the run.
        deadline: When its machines end, whatever happens; Unix seconds.
        heads: Pools that the head node may come from, the best first.
        prices: USD an hour by pool.
        on_demand: On-demand USD an hour by instance type.
        spent_usd: Cost of the sessions before this one.
        generation: Number of head nodes that were started before this one.
        events_after: Key of the last events from before this session, or empty. Times do not tell which events are
            older: the clocks of machines differ.
        need_bytes: RAM of one slot of a node.
        most_slots: Largest number of slots used on one node.
        state: `running`, `ending` or `ended`.
        failure: Why the head node gave up, in a sentence, or empty.
        leftover: What could not be ended or written and what to do about it, in a sentence, or empty.
        command: Command line that started the run.
        allow_control: Whether the dashboard may drain and kill workers.
        sweep: The trials of a sweep; None of a run.
        of_sweep: The sweep on whose machines this run trains as a trial, or empty.
    """

    run: str
    job: dict[str, Any]
    tags: dict[str, str]
    created: float
    deadline: float
    site: LaunchSite
    wanted: DesiredFleet
    heads: tuple[Pool, ...]
    prices: dict[Pool, float]
    on_demand: dict[str, float]
    need_bytes: int
    most_slots: int
    spent_usd: float = 0.0
    generation: int = 0
    events_after: str = ""
    state: str = "running"
    failure: str = ""
    leftover: str = ""
    command: str = ""
    allow_control: bool = False
    sweep: SweepOrder | None = None
    of_sweep: str = ""

    def as_json(self) -> bytes:
        """Return the record as JSON, as it is stored."""
        prices = [[pool, price] for pool, price in self.prices.items()]  # JSON keys must be strings
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {"prices": prices}
        return json.dumps(fields, indent=1, default=dataclasses.asdict).encode()

    @property
    def fleet(self) -> str:
        """The run whose machines train this one: its own, or those of its sweep."""
        return self.of_sweep or self.run

    @property
    def how_to_go_on(self) -> str:
        """How its user goes on with it once it has no head, as a phrase."""
        if self.sweep or self.of_sweep:
            return f"the command that began the sweep {self.fleet} goes on with it"
        return "go on with --resume"

    @property
    def head_session(self) -> str:
        """Start time of this session of the run, as in its machines' tags."""
        return self.tags.get(TAG + "created", "")

    @classmethod
    def from_json(cls, content: bytes) -> RunRecord:
        """Parse what `as_json` returned.

        Raises:
            DamageError: it is something else.
        """
        try:
            fields = json.loads(content)
            fields["prices"] = dict(TypeAdapter(list[tuple[Pool, float]]).validate_python(fields["prices"]))
            return TypeAdapter(cls).validate_python(fields)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamageError(
                f"{RUN_RECORD_KEY} of the run does not hold what was written to it; end the run with "
                "`idletrain down NAME`, or put an earlier version of that object back"
            ) from None


def claim(prefix: S3Prefix, record: RunRecord) -> None:
    """Write a new run's record.

    Raises:
        JobError: a run of this name exists.
    """
    content = record.as_json()
    try:
        prefix.put_if(RUN_RECORD_KEY, content, None)
    except ConflictError:
        stored = prefix.get(RUN_RECORD_KEY)
        if stored and stored.content == content:  # our own write succeeded, but its answer was lost
            return
        raise JobError(
            f"name: run {record.run} exists in {prefix.url}; add --resume to go on with it, or --name for another"
        ) from None


def read(prefix: S3Prefix) -> RunRecord:
    """Read a run's record.

    Raises:
        RunError: there is no such run.
    """
    stored = prefix.get(RUN_RECORD_KEY)
    if stored is None:
        parent, _, _ = prefix.prefix.rstrip("/").rpartition("/")
        runs = S3Prefix.at(f"s3://{prefix.bucket}/{parent}", prefix.client).folders() if parent else []
        raise RunError(f"{prefix.url} holds no run; there are: {', '.join(runs) or 'none'}")
    return RunRecord.from_json(stored.content)


def update(prefix: S3Prefix, **changes: Any) -> RunRecord:
    """Change fields of a record atomically, retrying after concurrent writes; return the new record.

    Raises:
        RunError: there is no such run.
    """
    while True:
        stored = prefix.get(RUN_RECORD_KEY)
        if stored is None:
            raise RunError(f"{prefix.url} holds no run")
        changed = dataclasses.replace(RunRecord.from_json(stored.content), **changes)
        try:
            prefix.put_if(RUN_RECORD_KEY, changed.as_json(), stored.tag)
        except ConflictError:
            continue
        return changed
