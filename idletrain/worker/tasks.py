"""The Dask tasks that a head gives to its workers.

A Dask scheduler unpickles every task on its way, so torch is imported where a task runs: it would cost the scheduler
two seconds, in which no worker joins, and 200 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idletrain.worker.lease_spec import LeaseSpec

if TYPE_CHECKING:
    from idletrain.worker.attempt import Attempt


def describe() -> dict[str, Any]:
    """See `attempt.describe`."""
    from idletrain.worker import attempt

    return attempt.describe()


def train_subnet(spec: LeaseSpec) -> None:
    """See `attempt.carry_out`. What a lease does not need is not imported: a worker's start is counted in seconds."""
    from idletrain.worker import attempt

    attempt.carry_out(_kind_of(spec), spec)


def _kind_of(spec: LeaseSpec) -> type[Attempt]:
    if spec.how == "out-of-core":
        from idletrain.worker.out_of_core import OutOfCoreAttempt

        return OutOfCoreAttempt
    if spec.how == "lockstep":
        from idletrain.worker.lockstep import LockstepAttempt

        return LockstepAttempt
    from idletrain.worker.attempt import Attempt

    return Attempt
