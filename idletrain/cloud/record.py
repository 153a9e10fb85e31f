"""A run's record below its prefix: written before anything else is made, so that nothing can be made and forgotten.

The write that creates it is conditional: it is the lock on the run's name.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from idletrain.cloud.aws.requests import TAG, LaunchSite, Pool
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.errors import JobError, RunError
from idletrain.storage import ConflictError, S3Prefix

RUN_RECORD_KEY = "record.json"
SUMMARY_KEY = "summary.json"  # of a run that its head has brought home


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run in a cloud.

    Attributes:
        job: The job, as plain values.
        tags: What everything of the run is tagged with.
        deadline: When its machines end, whatever happens; Unix seconds.
        heads: Where the head may come from, the best first.
        prices: USD an hour of every pool.
        on_demand: On-demand USD an hour by instance type.
        spent_usd: What the sittings before this one cost.
        generation: How many heads were started before this one.
        need_bytes: RAM of one slot of a node.
        most_slots: Slots of a node that are made use of.
        state: `running`, `ending` or `ended`.
        failure: Why the head gave up, in a sentence, or empty.
        command: What was called, for the run's records.
        allow_control: Whether the dashboard's page may drain and kill workers.
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
    state: str = "running"
    failure: str = ""
    command: str = ""
    allow_control: bool = False

    def as_json(self) -> bytes:
        """The record as it is stored."""
        prices = [[pool, price] for pool, price in self.prices.items()]  # JSON's keys are texts
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {"prices": prices}
        return json.dumps(fields, indent=1, default=dataclasses.asdict).encode()

    @property
    def head_session(self) -> str:
        """When this sitting of the run began, as its machines' tags tell."""
        return self.tags.get(TAG + "created", "")

    @classmethod
    def from_json(cls, content: bytes) -> RunRecord:
        """The reverse of `as_json`."""
        fields = json.loads(content)
        wanted = fields["wanted"]
        fields["wanted"] = DesiredFleet(
            wanted["count"], wanted["policy"], tuple(Pool(**pool) for pool in wanted["pools"])
        )
        fields["site"] = LaunchSite(**fields["site"])
        fields["heads"] = tuple(Pool(**pool) for pool in fields["heads"])
        fields["prices"] = {Pool(**pool): price for pool, price in fields["prices"]}
        return cls(**fields)


def claim(prefix: S3Prefix, record: RunRecord) -> None:
    """Write a new run's record.

    Raises:
        JobError: the name is taken.
    """
    try:
        prefix.put_if(RUN_RECORD_KEY, record.as_json(), None)
    except ConflictError:
        raise JobError(
            f"name: run {record.run} exists in {prefix.url}; add --resume to go on with it, or --name for another"
        ) from None


def read(prefix: S3Prefix) -> RunRecord:
    """A run's record.

    Raises:
        RunError: there is no such run.
    """
    found = prefix.get(RUN_RECORD_KEY)
    if found is None:
        above, _, _ = prefix.prefix.rstrip("/").rpartition("/")
        beside = S3Prefix.at(f"s3://{prefix.bucket}/{above}", prefix.client).folders() if above else []
        raise RunError(f"{prefix.url} holds no run; there are: {', '.join(beside) or 'none'}")
    return RunRecord.from_json(found.content)


def update(prefix: S3Prefix, **changes: Any) -> RunRecord:
    """Change a record; whoever else changes it at the same time comes before or after.

    Raises:
        RunError: there is no such run.
    """
    while True:
        found = prefix.get(RUN_RECORD_KEY)
        if found is None:
            raise RunError(f"{prefix.url} holds no run")
        changed = dataclasses.replace(RunRecord.from_json(found.content), **changes)
        try:
            prefix.put_if(RUN_RECORD_KEY, changed.as_json(), found.tag)
        except ConflictError:
            continue
        return changed
