"""Define what a cloud's account and its machines must offer, in words that every cloud shares.

A second cloud implements both protocols in a folder of its own; nothing outside such a folder knows which cloud it is.
Every call blocks, may be repeated without harm, and raises only errors of `idletrain.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from idletrain.cloud.instance_types import Offer
from idletrain.cloud.machines import ALIVE_STATES, Instance, LaunchOutcome, LaunchSite, LeftoverResource, NodeRequest
from idletrain.cloud.market import MarketSnapshot
from idletrain.cloud.record import RunRecord
from idletrain.cluster.identity import Identity


class CloudAccount(Protocol):
    """An account of a cloud in one region."""

    @property
    def region(self) -> str:
        """Name of the region."""
        ...

    @property
    def owner(self) -> str:
        """The identity that calls the cloud."""
        ...

    @property
    def bucket(self) -> str:
        """Name of the account's own bucket, which holds all runs unless a job names another."""
        ...

    @property
    def s3(self) -> Any:
        """Client of the account's object store, which speaks S3 (see `idletrain.storage.S3Prefix`)."""
        ...

    def explained(self) -> AbstractContextManager[None]:
        """Turn the errors of the object store's client, within the context, into ours."""
        ...

    # --- what there is ------------------------------------------------------------------------------------------

    def site(self, ami: str | None, gpu: bool) -> LaunchSite:
        """Return the network and the machine image; `ami` names an image, None is the cloud's own."""
        ...

    def regions(self) -> list[str]:
        """Return the names of the regions that the account may use, sorted."""
        ...

    def market(self, cache: Path) -> MarketSnapshot:
        """Return the types, zones and prices of the region, from a cached answer where it is fresh."""
        ...

    def spot_prices(self, types: Collection[str]) -> dict[tuple[str, str], float]:
        """Return the current spot prices of these types, USD an hour by type and zone."""
        ...

    def interruptions(self, cache: Path) -> Mapping[str, float]:
        """Return the share of each type's spot machines that the cloud takes back in a month, as far as it is known."""
        ...

    def quota_fault(self, nodes: int, offers: Collection[Offer]) -> str | None:
        """Return why the account's limits allow a fleet of none of these offers, or None."""
        ...

    def readable_data(self) -> Sequence[str]:
        """Return the S3 prefixes of data that machines with the default roles may read."""
        ...

    def instances(self, run: str | None = None, states: Collection[str] = ALIVE_STATES) -> list[Instance]:
        """List the machines of a run, or of all runs, by tag."""
        ...

    def remnants(self, run: str | None = None) -> list[LeftoverResource]:
        """List all resources but machines that are tagged with a run, or with any run."""
        ...

    def console(self, instance: str) -> str:
        """Return the console output of a machine, as far as the cloud has kept it."""
        ...

    def identity(self, run: str, role: str) -> Identity:
        """Read the certificates of a role (`head` or `worker`) of a run."""
        ...

    # --- what is created, changed and deleted --------------------------------------------------------------------

    def prepare_run(
        self,
        run: RunRecord,
        image: str,
        identities: Mapping[str, Identity],
        report: Callable[[str], None],
        reached: Callable[[str], None],
    ) -> LaunchSite:
        """Create what a run's machines need; return their place.

        Args:
            run: The run.
            image: The container image that machines run.
            identities: Certificates by role.
            report: Gets a line on what is waited for.
            reached: Called with `group` and `identities` once those are there.
        """
        ...

    def start_head(self, run: RunRecord, image: str, report: Callable[[str], None]) -> str:
        """Start a run's head in the first of its pools with capacity; return its id. Repeating starts no second one."""
        ...

    def start_nodes(self, site: LaunchSite, request: NodeRequest) -> LaunchOutcome:
        """Start nodes, as many as there is capacity for; never raises: the outcome says what is missing and why."""
        ...

    def terminate(self, ids: Collection[str]) -> None:
        """Terminate machines; ids that are gone, or not yet visible, are no error."""
        ...

    def delete(self, remnant: LeftoverResource) -> None:
        """Delete a resource that is not a machine."""
        ...

    def leave_group(self, instance: str) -> None:
        """Take a machine out of its run's network group, so that the group can be deleted before the machine ends."""
        ...

    def tag(self, ids: Collection[str], tags: Mapping[str, str]) -> None:
        """Set tags on machines, which read them from their metadata."""
        ...


class NoMetadataError(Exception):
    """The machine's metadata cannot be had now."""


@dataclass(frozen=True)
class Announcement:
    """The cloud's announcements to this machine.

    Attributes:
        notice: Whether it is reclaimed in about two minutes, or was requested to leave by `idletrain interrupt`.
        rebalance: Whether its risk of that is higher; many machines with this recommendation run on for hours.
    """

    notice: bool = False
    rebalance: bool = False


class CloudMachine(Protocol):
    """The machine of a cloud that this process runs on."""

    def instance_id(self) -> str:
        """Return its id, as the account's lists name it."""
        ...

    def private_address(self) -> str:
        """Return its address within the network."""
        ...

    def tags(self) -> dict[str, str]:
        """Return its tags."""
        ...

    def announced(self) -> Announcement:
        """Return what is announced now: nothing in the ordinary case.

        Raises:
            NoMetadataError: nobody answers.
        """
        ...

    def account(self) -> CloudAccount:
        """Return the account that it belongs to, with the rights of the machine's role."""
        ...
