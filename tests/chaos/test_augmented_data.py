"""Augmentation and streams keep the same bits when a worker is killed in the middle of a subnet."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from . import augmented
from .helpers import Control, Run, train_alone, until


@pytest.mark.parametrize("kind", ["numbered", "read ahead", "stream"])
def test_a_killed_worker_s_samples_are_drawn_again_with_the_same_bits(
    make_run: Callable[..., Run], control: Control, kind: str
) -> None:
    run = make_run(rounds=3, data={"name": None, "factory": f"{augmented.__name__}:load", "args": {"kind": kind}})
    control.pace(0.1)
    head = run.launch()

    def marked() -> list[psutil.Process]:
        assert head.running, head.text
        marks = {event["attempt"] for event in run.events("progress_saved")}
        busy = run.busy()
        return [p for at, p in run.workers().items() if at in busy and busy[at]["attempt"] in marks]

    until("a worker with a checkpoint", marked)[0].send_signal(signal.SIGKILL)
    until("an heir", lambda: [event for event in run.events("leased") if event["step"]])
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert {event["cause"] for event in run.events("lost")} == {"kill"}
    until("the end of its readers", lambda: not head.survivors())
