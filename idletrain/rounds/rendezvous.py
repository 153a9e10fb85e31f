"""Forms the groups that train in lockstep: one as soon as every subnet's worker has asked to join, and a new one when a
member is replaced or cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from idletrain.exchange.messages import LeaseId, LockstepGroup, Reply
from idletrain.rounds.table import RoundState
from idletrain.rounds.worker_events import check_lease


class JoinRequest(NamedTuple):
    """A worker's request to join a group, and the future that takes the response."""

    lease: LeaseId
    address: str
    steps: frozenset[int]
    response: asyncio.Future[LockstepGroup | Reply]


def common_step(offers: Iterable[Collection[int]]) -> int:
    """Return the latest step that all can go on from; 0, the round's start, is always one."""
    return max(frozenset.intersection(*(frozenset({0, *steps}) for steps in offers)))


class Rendezvous:
    """The groups of a run, one after the other.

    Args:
        group_formed: Called with the step that a group goes on from, before its members get their responses.
    """

    def __init__(self, group_formed: Callable[[int], None]) -> None:
        self._requests: dict[int, JoinRequest] = {}
        self._group_formed = group_formed
        self._formed = 0

    async def join(
        self, lease: LeaseId, address: str, steps: Collection[int], now: RoundState | None
    ) -> LockstepGroup | Reply:
        """Wait until every subnet has a request, and return the group; a repeated request replaces the earlier one.

        Args:
            lease: The member's lease.
            address: Its worker's address.
            steps: Steps that it can go on from; 0 need not be named.
            now: The run's state, None if it is over.
        """
        if not now:
            return Reply.STALE_ROUND
        if (reply := check_lease(now, lease)) is not Reply.ACCEPTED:
            return reply
        response: asyncio.Future[LockstepGroup | Reply] = asyncio.get_running_loop().create_future()
        if (before := self._requests.pop(lease.subnet, None)) and not before.response.done():
            before.response.set_result(Reply.NOT_LEASED)
        self._requests[lease.subnet] = JoinRequest(lease, address, frozenset(steps), response)
        self.answer_waiting(now)
        return await response

    def answer_waiting(self, now: RoundState | None) -> None:
        """Refuse requests whose lease no longer holds, and form a group once every subnet has a request."""
        for k, request in list(self._requests.items()):
            reply = check_lease(now, request.lease) if now else Reply.STALE_ROUND
            if reply is not Reply.ACCEPTED:
                _resolve(self._requests.pop(k), reply)
        if not now or len(self._requests) < len(now.subnets):
            return
        self._formed += 1
        members = [self._requests.pop(k) for k in range(len(now.subnets))]
        step = common_step(member.steps for member in members)
        self._group_formed(step)
        group = LockstepGroup(self._formed, step, tuple(member.address for member in members))
        for member in members:
            _resolve(member, group)


def _resolve(request: JoinRequest, result: LockstepGroup | Reply) -> None:
    if not request.response.done():  # its connection may be gone
        request.response.set_result(result)
