"""Who trains in lockstep with whom: a gang is formed when every subnet's worker has asked for one, and again when one
of its members is replaced or cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from idletrain.exchange.messages import LeaseId, LockstepGroup, Reply
from idletrain.rounds.state import check_lease
from idletrain.rounds.table import RoundState


class JoinRequest(NamedTuple):
    """A member's question, and where its answer goes."""

    lease: LeaseId
    address: str
    steps: frozenset[int]
    response: asyncio.Future[LockstepGroup | Reply]


def common_step(offers: Iterable[Collection[int]]) -> int:
    """The latest step that all can go on from; each can begin the round again."""
    return max(frozenset.intersection(*(frozenset({0, *steps}) for steps in offers)))


class Rendezvous:
    """The gangs of a run, one after the other.

    Args:
        formed: Told the step that a gang goes on from, before its members are.
    """

    def __init__(self, group_formed: Callable[[int], None]) -> None:
        self._requests: dict[int, JoinRequest] = {}
        self._group_formed = group_formed
        self._formed = 0

    async def join(
        self, lease: LeaseId, address: str, steps: Collection[int], now: RoundState | None
    ) -> LockstepGroup | Reply:
        """Wait until all have asked; who asks again is answered again.

        Args:
            lease: The member's.
            address: Its worker's.
            steps: Those that it can go on from; 0 need not be named.
            now: The run's state, None if it is over.
        """
        if not now:
            return Reply.STALE_ROUND
        if (reply := check_lease(now, lease)) is not Reply.ACCEPTED:
            return reply
        answer: asyncio.Future[LockstepGroup | Reply] = asyncio.get_running_loop().create_future()
        if (before := self._requests.pop(lease.subnet, None)) and not before.response.done():
            before.response.set_result(Reply.NOT_LEASED)
        self._requests[lease.subnet] = JoinRequest(lease, address, frozenset(steps), answer)
        self.answer_waiting(now)
        return await answer

    def answer_waiting(self, now: RoundState | None) -> None:
        """Answer those that have nothing to wait for in this state, or all if they are complete."""
        for k, asked in list(self._requests.items()):
            reply = check_lease(now, asked.lease) if now else Reply.STALE_ROUND
            if reply is not Reply.ACCEPTED:
                _resolve(self._requests.pop(k), reply)
        if not now or len(self._requests) < len(now.subnets):
            return
        self._formed += 1
        members = [self._requests.pop(k) for k in range(len(now.subnets))]
        step = common_step(member.steps for member in members)
        self._group_formed(step)
        gang = LockstepGroup(self._formed, step, tuple(member.address for member in members))
        for member in members:
            _resolve(member, gang)


def _resolve(request: JoinRequest, answer: LockstepGroup | Reply) -> None:
    if not request.response.done():  # its connection may be gone
        request.response.set_result(answer)
