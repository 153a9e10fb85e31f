"""What a lease says to the worker that gets it, and whether head and worker are the same version."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

from idletrain.exchange.messages import LeaseId
from idletrain.nn.ist.partition import Block

TrainingMode = Literal["in-core", "out-of-core", "lockstep"]


@dataclass(frozen=True)
class LeaseSpec:
    """One lease as it is sent to a worker; picklable in under 1 KB.

    Attributes:
        salvage: Whether an update of fewer steps than all is of use to the run.
        how: In core; out of core, in all the memory that the worker has for it; or in lockstep with the other subnets.
    """

    lease: LeaseId
    store: str
    blocks: tuple[Block, ...]
    how: TrainingMode
    progress_seconds: float
    lease_seconds: float
    salvage: bool = False

    def wants_checkpoint(self, since_last: float, seconds_left: float, takes: float) -> bool:
        """Whether to send a mark while steps go on; one that is still under way at the end would hold up the update.

        Args:
            since_last: Seconds.
            seconds_left: Until the last step is done.
            takes: Seconds that a mark is on its way.
        """
        return since_last > self.progress_seconds and seconds_left > takes


def version() -> str:
    """The installed package's version."""
    return importlib.metadata.version("idletrain")
