"""How large parts are, and how many are on their way, follows from the link's rate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idletrain.exchange.messages import LeaseId, PushHeader
from idletrain.exchange.ordered_requests import OrderedRequests
from idletrain.exchange.parted_push import (
    AHEAD_SECONDS,
    MAX_AHEAD_BYTES,
    MAX_PART_BYTES,
    PART_BYTES,
    PARTS_AT_ONCE,
    PartedPush,
    PushRate,
)

HEADER = PushHeader(LeaseId("run", 1, 2, 3, 4), 9, 1.5, 0)


@given(st.floats(0, 1e13))
def test_parts_are_whole_multiples_within_their_bounds(rate: float) -> None:
    link = PushRate(rate)
    assert link.part_bytes % PART_BYTES == 0  # and so whole values
    assert PART_BYTES <= link.part_bytes <= MAX_PART_BYTES
    assert PARTS_AT_ONCE * link.part_bytes <= link.bytes_ahead <= MAX_AHEAD_BYTES


def test_a_gigabit_link_has_forty_milliseconds_of_bytes_on_their_way() -> None:
    link = PushRate(125e6)
    assert link.part_bytes == 2 * PART_BYTES
    assert link.bytes_ahead == int(AHEAD_SECONDS * 125e6)


class Connection(OrderedRequests):
    """Requests to a store that answers each at once, and what had been sent before each answer."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.bytes_sent = 0
        self.before_answers: list[tuple[str, int]] = []

    async def send(self, operation: str, **fields: Any) -> None:
        self.sent.append(operation)
        if operation == "part":
            self.bytes_sent += len(fields["flat"].data)

    async def answer(self) -> dict[str, Any]:
        self.before_answers.append((self.sent[-1], self.bytes_sent))
        return {"reply": "accepted"}


@pytest.mark.parametrize("rate", [0.0, 1e8, 1e12])
def test_bytes_are_sent_ahead_of_answers_and_the_push_right_behind_the_last(rate: float) -> None:
    """So that the link is not idle while the store answers; a quicker one passes more meanwhile."""
    connection, link = Connection(), PushRate(rate)
    ahead, part = link.bytes_ahead, link.part_bytes
    content = torch.zeros(2 * MAX_AHEAD_BYTES, dtype=torch.uint8)
    asyncio.run(PartedPush(HEADER, content, link, urgent=False).send(connection))
    admission, first = connection.before_answers[:2]
    assert admission == ("admit_push", 0)
    assert first[0] == "part"
    assert ahead <= first[1] < ahead + part
    assert connection.sent[-1] == "push"
    of_push = [sent for sent, _ in connection.before_answers].index("push")
    assert len(connection.before_answers) - of_push > 1, "it waited for all answers to parts"
