"""A trial in the head's own process ends in order, at once, or with a sentence; some ends are the sweep's as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rehearsal import sleeping

from idletrain.cloud.aws.account import Account
from idletrain.cloud.controller import FleetController
from idletrain.cloud.head_run import RunHooks
from idletrain.cloud.head_trial import HeadTrial
from idletrain.errors import RunError

IDLE_DURATION = 60.0
BEFORE = "it was stopped before it began"
STOPPED = {
    "kind": "run_ended",
    "status": "stopped",
    "rounds": 1,
    "params_sha256": None,
    "run_dir": "",
    "s": 1.0,
    "t": 1.0,
}


class Training:
    """What trains a trial below: it starts, and ends with an error or when it is stopped."""

    def __init__(self, error: Exception | None = None, *, starts: bool = True) -> None:
        self.error, self.starts, self.stopped = error, starts, asyncio.Event()
        self.hooks = RunHooks()

    async def __call__(self, hooks: RunHooks) -> None:
        self.hooks = hooks
        if self.starts:
            hooks.on_start(self.stopped.set, print)
        if self.error:
            raise self.error
        await self.stopped.wait()


@pytest.fixture
def controller(account: Account) -> FleetController:
    return FleetController(account, sleeping(account), "tls://127.0.0.1:1")


def checked(
    controller: FleetController, training: Callable[[], Training], then: Callable[[HeadTrial, Training], Awaitable[Any]]
) -> tuple[Any, list[str]]:
    """Return what came of a trial, and for what the sweep was given up."""
    given_up: list[str] = []

    async def check() -> Any:
        trains = training()
        trial = HeadTrial(trains, controller, given_up.append, IDLE_DURATION)
        await asyncio.sleep(0)
        return await then(trial, trains)

    return asyncio.run(check()), given_up


async def waited(trial: HeadTrial, _: Training) -> tuple[list[Any], str]:
    return [taken async for taken in trial.records()], await trial.wait()


@pytest.mark.parametrize(
    ("error", "why"),
    [(RunError("no room"), "no room"), (ValueError("x"), "the head met a bug, not your fault: ValueError('x')")],
)
def test_why_it_failed_is_a_sentence(error: Exception, why: str, controller: FleetController) -> None:
    controller.idle_since = None  # its nodes are there
    assert checked(controller, lambda: Training(error), waited) == (([], why), [])


@pytest.mark.parametrize(("idle_seconds", "given_up"), [(IDLE_DURATION, True), (5.0, False), (None, False)])
def test_no_other_trial_is_tried_where_no_node_came(
    idle_seconds: float | None, given_up: bool, controller: FleetController
) -> None:
    controller.idle_since = None if idle_seconds is None else time.monotonic() - idle_seconds
    assert checked(controller, lambda: Training(RunError("no node")), waited)[1] == ["no node"] * given_up
    before = lambda: Training(RunError("your loss raised"), starts=False)  # noqa: E731 (no node was needed yet)
    assert checked(controller, before, waited)[1] == []


def test_it_trains_from_its_start_to_its_end(controller: FleetController) -> None:
    async def seen(trial: HeadTrial, training: Training) -> list[bool]:
        trains = [trial.trains]
        training.hooks.on_end()
        await trial.end()
        return [*trains, trial.trains]

    assert checked(controller, Training, seen)[0] == [True, False]
    assert checked(controller, lambda: Training(starts=False), seen)[0] == [False, False]


def test_an_interrupt_stops_it_in_order_once_it_trains_and_at_once_before(controller: FleetController) -> None:
    async def interrupted(trial: HeadTrial, training: Training) -> tuple[str, bool]:
        trial.interrupt()
        return await trial.wait(), training.stopped.is_set()

    assert checked(controller, Training, interrupted)[0] == ("", True)
    assert checked(controller, lambda: Training(starts=False), interrupted)[0] == (BEFORE, False)


def test_what_outlives_its_context_ends_at_once(controller: FleetController) -> None:
    async def ended(trial: HeadTrial, _: Training) -> str:
        await trial.end()
        return await trial.wait()

    assert checked(controller, Training, ended)[0] == BEFORE


def test_a_trial_that_its_machine_s_end_stops_ends_the_sweep(controller: FleetController) -> None:
    async def stopped(trial: HeadTrial, training: Training) -> None:
        training.hooks.summary.add(STOPPED)
        training.hooks.sinks[-1](STOPPED)
        await trial.end()

    async def pruned(trial: HeadTrial, training: Training) -> None:
        trial.interrupt()
        await stopped(trial, training)

    assert checked(controller, Training, stopped)[1] == ["the head's machine ends"]
    assert checked(controller, Training, pruned)[1] == []
