"""Few send at once, and more where that brings more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from idletrain.exchange.admission import (
    HOLDER_SILENCE_SECONDS,
    MIN_HOLDERS,
    PROBE_AGAIN_SECONDS,
    RATE_WINDOW_SECONDS,
    AdmissionQueue,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(test: Callable[[AdmissionQueue, Clock], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()
    asyncio.run(test(AdmissionQueue(clock), clock))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_slots_are_given_in_the_order_of_requests() -> None:
    async def test(queue: AdmissionQueue, _clock: Clock) -> None:
        order: list[str] = []

        async def ask(name: str) -> None:
            await queue.acquire(name)
            order.append(name)

        requests = [asyncio.create_task(ask(name)) for name in "abcde"]
        await settle()
        assert order == ["a", "b"]
        queue.release("a")
        await settle()
        assert order == ["a", "b", "c"]
        queue.release("b")
        queue.release("c")
        await asyncio.gather(*requests)
        assert order == [*"abcde"]

    run(test)


def test_an_urgent_request_goes_first() -> None:
    async def test(queue: AdmissionQueue, _clock: Clock) -> None:
        for name in "ab":
            await queue.acquire(name)
        waiting = asyncio.create_task(queue.acquire("c"))
        await settle()
        urgent = asyncio.create_task(queue.acquire("d", urgent=True))
        await settle()
        queue.release("a")
        await settle()
        assert urgent.done()
        assert not waiting.done()
        queue.release("b")
        await asyncio.gather(waiting, urgent)

    run(test)


def test_a_silent_holder_loses_its_slot_and_a_cancelled_request_its_place() -> None:
    async def test(queue: AdmissionQueue, clock: Clock) -> None:
        for name in "ab":
            await queue.acquire(name)
        cancelled, last = (asyncio.create_task(queue.acquire(name)) for name in "cd")
        await settle()
        cancelled.cancel()
        await settle()
        clock.now += 0.9 * HOLDER_SILENCE_SECONDS
        queue.transferred("b", 1)
        clock.now += 0.2 * HOLDER_SILENCE_SECONDS
        waiting = asyncio.create_task(queue.acquire("e"))  # whoever comes next notices who is silent
        await asyncio.wait_for(last, 1)
        await settle()
        assert not waiting.done()  # b and d have theirs
        waiting.cancel()

    run(test)


def test_a_holder_that_is_gone_keeps_nobody_waiting() -> None:
    async def test(queue: AdmissionQueue, _clock: Clock) -> None:
        for name in "ab":
            await queue.acquire(name)
        waiting = {name: asyncio.create_task(queue.acquire(name)) for name in "cde"}
        await settle()
        queue.cancel("c")
        queue.cancel("a")
        await settle()
        assert [name for name, task in waiting.items() if task.done()] == ["c", "d"]
        queue.cancel("b")
        await asyncio.gather(*waiting.values())

    run(test)


def test_a_repeated_request_has_one_place_and_one_slot() -> None:
    async def test(queue: AdmissionQueue, _clock: Clock) -> None:
        await queue.acquire("a")
        await queue.acquire("a")
        await queue.acquire("b")
        requests = [asyncio.create_task(queue.acquire("c")) for _ in range(2)]
        await settle()
        queue.release("a")
        await asyncio.gather(*requests)
        last = asyncio.create_task(queue.acquire("d"))
        await settle()
        assert not last.done()
        last.cancel()

    run(test)


def bring(queue: AdmissionQueue, clock: Clock, rate_of_one: float, rate_of_all: float) -> None:
    """A span in which the holders send what their own links and the store's let through."""
    for _ in range(8):
        holders = list(queue._holders)
        rate = min(rate_of_all, rate_of_one * len(holders))
        clock.now += RATE_WINDOW_SECONDS / 4
        for holder in holders:
            queue.transferred(holder, int(rate * RATE_WINDOW_SECONDS / 4 / len(holders)))


def test_more_send_at_once_where_each_worker_s_link_is_slow() -> None:
    async def test(queue: AdmissionQueue, clock: Clock) -> None:
        requests = [asyncio.create_task(queue.acquire(str(i))) for i in range(12)]
        await settle()
        for _ in range(10):
            bring(queue, clock, 1e6, 8e6)
            await settle()
        assert 6 <= queue.max_holders <= 9
        for one in requests:
            one.cancel()

    run(test)


def test_few_send_at_once_where_the_store_s_link_is_full() -> None:
    async def test(queue: AdmissionQueue, clock: Clock) -> None:
        requests = [asyncio.create_task(queue.acquire(str(i))) for i in range(12)]
        await settle()
        for _ in range(10):
            bring(queue, clock, 1e7, 1e7)
            await settle()
        assert queue.max_holders == MIN_HOLDERS
        clock.now += PROBE_AGAIN_SECONDS
        bring(queue, clock, 1e7, 1e7)
        bring(queue, clock, 1e7, 1e7)
        assert queue.max_holders <= MIN_HOLDERS + 1
        for one in requests:
            one.cancel()

    run(test)
