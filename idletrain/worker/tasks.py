"""The Dask tasks that a head gives to its workers.

A Dask scheduler unpickles every task on its way, so torch is imported where a task runs: it would cost the scheduler
two seconds, in which no worker joins, and 200 MB.
"""

from __future__ import annotations

from typing import Any

from idletrain.worker.lease_spec import Spec


def describe() -> dict[str, Any]:
    """See `attempt.describe`."""
    from idletrain.worker import attempt

    return attempt.describe()


def train_subnet(spec: Spec) -> None:
    """See `attempt.train_subnet`."""
    from idletrain.worker import attempt

    attempt.train_subnet(spec)
