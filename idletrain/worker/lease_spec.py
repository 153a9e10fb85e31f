"""What a lease says to the worker that gets it, and whether head and worker are the same version."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

from idletrain.exchange.messages import LeaseId
from idletrain.nn.ist.partition import Block

How = Literal["in-core", "out-of-core", "lockstep"]


@dataclass(frozen=True)
class Spec:
    """One lease as it is sent to a worker; picklable in under 1 KB.

    Attributes:
        salvage: Whether an update of fewer steps than all is of use to the run.
        how: In core; out of core, in all the memory that the worker has for it; or in lockstep with the other subnets.
    """

    lease: LeaseId
    store: str
    blocks: tuple[Block, ...]
    how: How
    mark_seconds: float
    lease_seconds: float
    salvage: bool = False

    def wants_mark(self, since_last: float, seconds_left: float, takes: float) -> bool:
        """Whether to send a mark while steps go on; one that is still under way at the end would hold up the update.

        Args:
            since_last: Seconds.
            seconds_left: Until the last step is done.
            takes: Seconds that a mark is on its way.
        """
        return since_last > self.mark_seconds and seconds_left > takes


def version() -> str:
    """The installed package's version."""
    return importlib.metadata.version("idletrain")
