"""Few send at once, and more where that brings more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from idletrain.exchange.admission import AGAIN_SECONDS, FEW, SILENT_SECONDS, SPAN_SECONDS, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(test: Callable[[Turns, Clock], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()
    asyncio.run(test(Turns(clock), clock))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_turns_are_given_in_the_order_in_which_they_are_asked_for() -> None:
    async def test(turns: Turns, _clock: Clock) -> None:
        order: list[str] = []

        async def ask(name: str) -> None:
            await turns.take(name)
            order.append(name)

        asked = [asyncio.create_task(ask(name)) for name in "abcde"]
        await settle()
        assert order == ["a", "b"]
        turns.give("a")
        await settle()
        assert order == ["a", "b", "c"]
        turns.give("b")
        turns.give("c")
        await asyncio.gather(*asked)
        assert order == [*"abcde"]

    run(test)


def test_what_is_urgent_goes_before_all_that_wait() -> None:
    async def test(turns: Turns, _clock: Clock) -> None:
        for name in "ab":
            await turns.take(name)
        waiting = asyncio.create_task(turns.take("c"))
        await settle()
        urgent = asyncio.create_task(turns.take("d", urgent=True))
        await settle()
        turns.give("a")
        await settle()
        assert urgent.done()
        assert not waiting.done()
        turns.give("b")
        await asyncio.gather(waiting, urgent)

    run(test)


def test_who_is_silent_loses_its_turn_and_who_goes_away_its_place() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        for name in "ab":
            await turns.take(name)
        gone, last = (asyncio.create_task(turns.take(name)) for name in "cd")
        await settle()
        gone.cancel()
        await settle()
        clock.now += 0.9 * SILENT_SECONDS
        turns.moved("b", 1)
        clock.now += 0.2 * SILENT_SECONDS
        waiting = asyncio.create_task(turns.take("e"))  # whoever comes next notices who is silent
        await asyncio.wait_for(last, 1)
        await settle()
        assert not waiting.done()  # b and d have theirs
        waiting.cancel()

    run(test)


def test_who_is_known_to_be_gone_keeps_nobody_waiting() -> None:
    async def test(turns: Turns, _clock: Clock) -> None:
        for name in "ab":
            await turns.take(name)
        waiting = {name: asyncio.create_task(turns.take(name)) for name in "cde"}
        await settle()
        turns.leave("c")
        turns.leave("a")
        await settle()
        assert [name for name, task in waiting.items() if task.done()] == ["c", "d"]
        turns.leave("b")
        await asyncio.gather(*waiting.values())

    run(test)


def test_who_asks_again_has_its_place_or_its_turn_once() -> None:
    async def test(turns: Turns, _clock: Clock) -> None:
        await turns.take("a")
        await turns.take("a")
        await turns.take("b")
        asked = [asyncio.create_task(turns.take("c")) for _ in range(2)]
        await settle()
        turns.give("a")
        await asyncio.gather(*asked)
        last = asyncio.create_task(turns.take("d"))
        await settle()
        assert not last.done()
        last.cancel()

    run(test)


def bring(turns: Turns, clock: Clock, rate_of_one: float, rate_of_all: float) -> None:
    """A span in which those that have turns send what their own links and the store's let through."""
    for _ in range(8):
        holders = list(turns._holders)
        rate = min(rate_of_all, rate_of_one * len(holders))
        clock.now += SPAN_SECONDS / 4
        for holder in holders:
            turns.moved(holder, int(rate * SPAN_SECONDS / 4 / len(holders)))


def test_where_each_has_a_slow_link_of_its_own_more_send_at_once() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        asked = [asyncio.create_task(turns.take(str(i))) for i in range(12)]
        await settle()
        for _ in range(10):
            bring(turns, clock, 1e6, 8e6)
            await settle()
        assert 6 <= turns.most <= 9
        for one in asked:
            one.cancel()

    run(test)


def test_where_the_store_s_link_is_full_few_do() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        asked = [asyncio.create_task(turns.take(str(i))) for i in range(12)]
        await settle()
        for _ in range(10):
            bring(turns, clock, 1e7, 1e7)
            await settle()
        assert turns.most == FEW
        clock.now += AGAIN_SECONDS
        bring(turns, clock, 1e7, 1e7)
        bring(turns, clock, 1e7, 1e7)
        assert turns.most <= FEW + 1
        for one in asked:
            one.cancel()

    run(test)
