"""The Dask tasks that a head submits to its workers.

A Dask scheduler unpickles every task on its way, so torch is imported where a task runs: it would cost the scheduler
two seconds, in which no worker joins, and 200 MB.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from idletrain.worker.lease_spec import LeaseSpec

if TYPE_CHECKING:
    from idletrain.worker.attempt import Attempt


def describe(compiled_on: Collection[str] = ()) -> dict[str, Any]:
    """Return what the head must know of this worker, see `node.describe`."""
    from idletrain.worker import node

    return node.describe(compiled_on)


def train_subnet(spec: LeaseSpec) -> None:
    """Train one leased subnet, see `attempt.train_lease`.

    Modules that the lease does not need are not imported: they would slow the worker's start by seconds.
    """
    from idletrain.worker import attempt

    attempt.train_lease(_attempt_type(spec), spec)


def _attempt_type(spec: LeaseSpec) -> type[Attempt]:
    if spec.how == "out-of-core":
        from idletrain.worker.out_of_core import OutOfCoreAttempt

        return OutOfCoreAttempt
    if spec.how == "lockstep":
        from idletrain.worker.lockstep import LockstepAttempt

        return LockstepAttempt
    from idletrain.worker.attempt import Attempt

    return Attempt
