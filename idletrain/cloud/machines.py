"""Describe machines, the pools they come from and the outcome of a launch, in words that every cloud shares. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TAG = "idletrain:"
ALIVE_STATES = ("pending", "running", "stopping", "stopped")
RUNNING_STATES = ("pending", "running")
ENDED_STATES = ("shutting-down", "terminated")
SPOT_INTERRUPTION = "Server.SpotInstanceTermination"  # reason of a machine that the cloud took back


@dataclass(frozen=True)
class Pool:
    """A source of machines: a market, an instance type and a zone."""

    market: str
    """`spot` or `on-demand`."""
    type: str
    zone: str


@dataclass(frozen=True)
class Instance:
    """A machine as the cloud describes it."""

    id: str
    state: str
    pool: Pool
    launched_at: float
    address: str
    tags: Mapping[str, str]
    reason: str

    @property
    def run(self) -> str:
        """Name of the run that it belongs to."""
        return self.tags[TAG + "run"]

    @property
    def head_session(self) -> str:
        """Start time of its session of the run, by the launcher's clock, from its tags."""
        return self.tags.get(TAG + "created", "")

    @property
    def role(self) -> str:
        """`head` or `worker`."""
        return self.tags.get(TAG + "role", "")

    @property
    def attempt(self) -> str:
        """The request that launched it (see `NodeRequest`), from its tags; empty for a head."""
        return self.tags.get(TAG + "attempt", "")


@dataclass(frozen=True)
class LeftoverResource:
    """A resource of a run that is not a machine."""

    kind: Literal["group", "template", "parameter"]
    id: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class LaunchSite:
    """Network, image and template of a run's machines in the account."""

    region: str
    vpc: str
    subnets: Mapping[str, str]
    """Zone to subnet."""
    ami: str
    group: str = ""
    template: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """A request for nodes of one market; sent again with the same attempt, it launches no second time.

    Attributes:
        pools: Where they may come from, the best first.
        count: Number of nodes.
        attempt: What distinguishes this request from every other one.
        tags: Tags of the nodes.
        max_price: USD an hour that one spot node may cost, or None.
    """

    pools: tuple[Pool, ...]
    count: int
    attempt: str
    tags: Mapping[str, str]
    max_price: float | None = None


@dataclass(frozen=True)
class LaunchedMachine:
    """A machine in an answer to a launch request."""

    id: str
    pool: Pool


@dataclass(frozen=True)
class LaunchOutcome:
    """The outcome of a launch request: its machines count, whatever else failed.

    Attributes:
        machines: Machines that were launched.
        unavailable: Pools that give no machines now; they are skipped for a while.
        why: Why machines are missing, in the cloud's own words; empty for nothing but a lack of capacity.
        repeat: True if the cloud gave no answer to the request, which is then sent again as it was.
    """

    machines: tuple[LaunchedMachine, ...] = ()
    unavailable: frozenset[Pool] = frozenset()
    why: str = ""
    repeat: bool = False


def run_tags(run: str, prefix: str, owner: str, version: str, created: float, deadline: float) -> dict[str, str]:
    """Return the tags of all resources of a run; times are Unix seconds."""
    values = {
        "run": run,
        "prefix": prefix,
        "owner": owner,
        "version": version,
        "created": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(timespec="seconds"),
        "deadline": str(int(deadline)),
    }
    return {TAG + key: value for key, value in values.items()} | {"Name": f"idletrain-{run}"}
