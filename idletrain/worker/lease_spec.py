"""The description of a lease that a worker gets, and the version that head and worker must share."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Literal

from idletrain.exchange.messages import LeaseId
from idletrain.nn.ist.schemes import SubnetPlace

TrainingMode = Literal["in-core", "out-of-core", "lockstep"]


@dataclass(frozen=True)
class LeaseSpec:
    """One lease as it is sent to a worker; pickles to under 1 KB, beside what its place lists.

    Attributes:
        lease: Which attempt at which subnet of which round.
        store: Address of the parameter store.
        place: The subnet's place in its round's partition.
        how: In memory; out of core, in all the memory that the worker has for it; or in lockstep with the other
            subnets.
        progress_seconds: Time between two progress checkpoints.
        lease_seconds: Silence after which the lease is given to another worker.
        salvage: Whether the run can use an update that has not all its steps.
        first_step: The step from which schedules go on, see `nn.local_steps.LocalSteps`.
    """

    lease: LeaseId
    store: str
    place: SubnetPlace
    how: TrainingMode
    progress_seconds: float
    lease_seconds: float
    salvage: bool = False
    first_step: int | None = None

    def wants_checkpoint(self, since_last: float, seconds_left: float, transfer_seconds: float) -> bool:
        """Return whether to send a progress checkpoint while steps go on.

        One that is still under way after the last step would delay the update.

        Args:
            since_last: Seconds since the last one.
            seconds_left: Seconds until the last step is done.
            transfer_seconds: Seconds that sending a checkpoint takes.
        """
        return since_last > self.progress_seconds and seconds_left > transfer_seconds


@functools.cache
def version() -> str:
    """Return the installed package's version."""
    return importlib.metadata.version("idletrain")
