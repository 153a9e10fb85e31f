"""The Dask tasks that time a job's local steps. torch is imported where one runs: a scheduler unpickles every task."""

from __future__ import annotations

import platform

from distributed import get_worker


def open_work(content: bytes) -> None:
    """See `step_time.open_work`."""
    from idletrain.autotune import step_time

    step_time.open_work(get_worker(), content)


def work_pace(seconds: float) -> tuple[str, float]:
    """Return the name of the node's processor, which other nodes may share, and the seconds of a step on it."""
    from idletrain.autotune import step_time

    worker = get_worker()
    work: step_time.StepProbe = worker.extensions[step_time.STEP_PROBE_KEY]
    return worker.address if work.on_gpu else platform.node(), work.pace(1, seconds)


def close_work() -> None:
    """See `step_time.close_work`."""
    from idletrain.autotune import step_time

    step_time.close_work(get_worker())
