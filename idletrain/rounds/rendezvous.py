"""Who trains in lockstep with whom: a gang is formed when every subnet's worker has asked for one, and again when one
of its members is replaced or cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from idletrain.exchange.messages import Gang, LeaseId, Reply
from idletrain.rounds.state import State, standing


class Asked(NamedTuple):
    """A member's question, and where its answer goes."""

    lease: LeaseId
    address: str
    steps: frozenset[int]
    answer: asyncio.Future[Gang | Reply]


def common_step(offers: Iterable[Collection[int]]) -> int:
    """The latest step that all can go on from; each can begin the round again."""
    return max(frozenset.intersection(*(frozenset({0, *steps}) for steps in offers)))


class Gangs:
    """The gangs of a run, one after the other.

    Args:
        formed: Told the step that a gang goes on from, before its members are.
    """

    def __init__(self, formed: Callable[[int], None]) -> None:
        self._asked: dict[int, Asked] = {}
        self._tell_step = formed
        self._formed = 0

    async def join(self, lease: LeaseId, address: str, steps: Collection[int], now: State | None) -> Gang | Reply:
        """Wait until all have asked; who asks again is answered again.

        Args:
            lease: The member's.
            address: Its worker's.
            steps: Those that it can go on from; 0 need not be named.
            now: The run's state, None if it is over.
        """
        if not now:
            return Reply.STALE_ROUND
        if (reply := standing(now, lease)) is not Reply.ACCEPTED:
            return reply
        answer: asyncio.Future[Gang | Reply] = asyncio.get_running_loop().create_future()
        if (before := self._asked.pop(lease.subnet, None)) and not before.answer.done():
            before.answer.set_result(Reply.NOT_LEASED)
        self._asked[lease.subnet] = Asked(lease, address, frozenset(steps), answer)
        self.settle(now)
        return await answer

    def settle(self, now: State | None) -> None:
        """Answer those that have nothing to wait for in this state, or all if they are complete."""
        for k, asked in list(self._asked.items()):
            reply = standing(now, asked.lease) if now else Reply.STALE_ROUND
            if reply is not Reply.ACCEPTED:
                _tell(self._asked.pop(k), reply)
        if not now or len(self._asked) < len(now.subnets):
            return
        self._formed += 1
        members = [self._asked.pop(k) for k in range(len(now.subnets))]
        step = common_step(member.steps for member in members)
        self._tell_step(step)
        gang = Gang(self._formed, step, tuple(member.address for member in members))
        for member in members:
            _tell(member, gang)


def _tell(asked: Asked, answer: Gang | Reply) -> None:
    if not asked.answer.done():  # its connection may be gone
        asked.answer.set_result(answer)
