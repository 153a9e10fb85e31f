"""Random numbers of data and modules, and streams, are the same again when a worker is killed amid a subnet."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import psutil
import pytest

from . import augmented
from .helpers import Control, Process, Run, train_alone, until


@pytest.mark.parametrize(
    "kind", ["numbered", "read ahead", "stream", "stream with state", "augmented stream with state"]
)
def test_a_killed_worker_s_samples_are_drawn_again_with_the_same_bits(
    make_run: Callable[..., Run], control: Control, kind: str
) -> None:
    run = make_run(rounds=3, data={"name": None, "factory": f"{augmented.__name__}:load", "args": {"kind": kind}})
    control.pace(0.1)
    head = kill_in_the_middle(run, lambda: control.pace(0))
    resumed = control.path / "gone_on"
    if kind.endswith("with state"):  # the heir, and in later rounds whoever has not had the subnet
        assert {int(pid) for pid in resumed.read_text().split()} - {head.pid}
        assert len(json.loads((run.dir / "streams.json").read_text())) == 2
    else:
        assert not resumed.exists()
    until("the end of its readers", lambda: not head.survivors())


def test_a_killed_worker_s_forward_draws_again_the_same_numbers(make_run: Callable[..., Run]) -> None:
    """Its event loop draws from `random` meanwhile: Dask does so to estimate the size of each heartbeat."""
    model = {"factory": f"{augmented.__name__}:NoisyNetwork", "args": {}}
    kill_in_the_middle(make_run(rounds=3, model=model, training={"method": "local-sgd"}), lambda: None)


def kill_in_the_middle(run: Run, calm: Callable[[], None]) -> Process:
    """Kill a worker that has a checkpoint, and check the end; `calm` is called when another goes on from there."""
    head = run.launch()

    def marked() -> list[psutil.Process]:
        assert head.running, head.text
        marks = {event["attempt"] for event in run.events("progress_saved")}
        busy = run.busy()
        return [p for at, p in run.workers().items() if at in busy and busy[at]["attempt"] in marks]

    until("a worker with a checkpoint", marked)[0].send_signal(signal.SIGKILL)
    until("an heir", lambda: [event for event in run.events("leased") if event["step"]])
    calm()
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert run.causes_of_loss() == {"kill"}
    return head
