"""Signals stop a run in order, then at once, and never break the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from idletrain.end_signals import END_SIGNALS, LAST_ASKED, ended_by_signals

LONG_SECONDS = 30.0


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Every handler as in a terminal before each test, and as it was after it."""
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number in END_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", END_SIGNALS)
def test_the_first_signal_stops_in_order(number: signal.Signals) -> None:
    async def run() -> str:
        stopped = asyncio.Event()
        with ended_by_signals() as ending:
            ending.stops_by(stopped.set)
            await send(number)
            await asyncio.wait_for(stopped.wait(), LONG_SECONDS)
        assert not ending.at_once
        return "stopped"

    assert asyncio.run(run()) == "stopped"


@pytest.mark.parametrize("number", END_SIGNALS)
def test_the_second_ends_at_once_and_closes_what_is_open(number: signal.Signals) -> None:
    seen: list[str] = []

    async def run() -> None:
        with ended_by_signals() as ending:
            ending.stops_by(lambda: seen.append("stop"))
            try:
                await send(number)
                await send(number)
                await asyncio.sleep(LONG_SECONDS)
            finally:
                await asyncio.sleep(0)  # what is closed may be awaited
                seen.append("closed")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert seen == ["stop", "closed"]


def test_a_signal_before_there_is_something_to_stop_ends_at_once() -> None:
    async def run() -> None:
        with ended_by_signals():
            await send(signal.SIGTERM)
            await asyncio.sleep(LONG_SECONDS)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())


def test_a_run_that_has_ended_by_itself_is_closed_in_order() -> None:
    async def run() -> str:
        with ended_by_signals() as ending:
            ending.stops_by(lambda: None)
            ending.ended()
            await send(signal.SIGINT)
            await asyncio.sleep(0)
        return "completed"

    assert asyncio.run(run()) == "completed"


def test_a_run_that_a_signal_has_stopped_is_closed_at_once_by_another() -> None:
    async def run() -> None:
        with ended_by_signals() as ending:
            ending.stops_by(lambda: None)
            await send(signal.SIGINT)
            ending.ended()
            await send(signal.SIGINT)
            await asyncio.sleep(LONG_SECONDS)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())


@pytest.mark.parametrize("closed_by", [None, OSError("a socket that was closed")])
def test_what_is_closed_cannot_keep_a_second_signal_to_itself(closed_by: Exception | None) -> None:
    async def run() -> None:
        with ended_by_signals() as ending:
            ending.stops_by(lambda: None)
            try:
                await send(signal.SIGINT)
                await send(signal.SIGINT)
                await asyncio.sleep(LONG_SECONDS)
            except asyncio.CancelledError:
                if closed_by:
                    raise closed_by from None

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())


def test_a_cancellation_that_is_no_signal_s_is_one_still() -> None:
    async def run() -> None:
        with ended_by_signals():
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(LONG_SECONDS)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_what_hangs_is_interrupted_in_the_end() -> None:
    async def run() -> None:
        with ended_by_signals() as ending:
            ending.stops_by(lambda: None)
            for _ in range(LAST_ASKED + 1):
                os.kill(os.getpid(), signal.SIGINT)  # nothing is awaited: the event loop can do nothing

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())


def test_handlers_are_as_before_behind_it_and_nohup_s_is_left_alone() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def run() -> None:
        with ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL

    asyncio.run(run())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_another_thread_gets_no_signals() -> None:
    before: list[Callable[..., object] | int | None] = [signal.getsignal(number) for number in END_SIGNALS]
    within: list[Callable[..., object] | int | None] = []

    async def run() -> None:
        with ended_by_signals():
            within.extend(signal.getsignal(number) for number in END_SIGNALS)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    thread.join()
    assert within == before
