"""A push whose payload goes in parts, over one connection after another until all of it has arrived."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, replace
from typing import Any

from distributed.protocol import to_serialize
from torch import Tensor

from idletrain.exchange.admission import holder_of
from idletrain.exchange.messages import LATE_ROWS_REPLIES, PushHeader, Receipt, Reply, as_message
from idletrain.exchange.ordered_requests import OrderedRequests

PART_BYTES = 1 << 18  # 20 ms of a link of 100 Mbit/s; a part is a multiple of it, but for the last
MAX_PART_BYTES = 16 * PART_BYTES
PART_SECONDS = 0.005  # that a part travels over a faster link: the store checks it while the next ones travel
PARTS_AT_ONCE = 2  # so that the link is not idle while the store answers
AHEAD_SECONDS = 0.04  # of bytes sent before they are answered over one: beside training, an answer may take 10 ms
MAX_AHEAD_BYTES = 4 * MAX_PART_BYTES  # the rate is that of an earlier push, and the link may be slower now


class PushRate:
    """How quickly parts arrived last, and what follows for those to come.

    Attributes:
        bytes_per_second: The rate; 0 before any part was answered.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second

    @property
    def part_bytes(self) -> int:
        """How large the next part is to be."""
        whole = int(PART_SECONDS * self.bytes_per_second) // PART_BYTES * PART_BYTES
        return min(MAX_PART_BYTES, max(PART_BYTES, whole))

    @property
    def bytes_ahead(self) -> int:
        """How many bytes may be on their way."""
        ahead = min(MAX_AHEAD_BYTES, int(AHEAD_SECONDS * self.bytes_per_second))
        return max(PARTS_AT_ONCE * self.part_bytes, ahead)


class PartedPush:
    """A push in parts.

    Args:
        header: Describes the payload.
        content: Its bytes.
        rate: That of earlier pushes, which this one replaces by its own; None for small parts at any rate, of which the
            store sees soon when it has enough.
        urgent: Whether it goes before waiting pushes.

    Attributes:
        arrived: The bytes that the store has answered for, from the first on.
    """

    def __init__(self, header: PushHeader, content: Tensor, rate: PushRate | None, *, urgent: bool) -> None:
        self._header, self._content, self._urgent = header, content, urgent
        self._measured, self._rate = rate, rate or PushRate()
        self.arrived = 0

    async def send(self, requests: OrderedRequests) -> dict[str, Any]:
        """Send what has not arrived yet in order, and the push right behind, so that the link is never idle; return the
        push's answer, or the first refusal.

        Raises:
            OSError: the connection is broken; what the store has answered for need not be sent again.
        """
        of_part = as_message(replace(self._header, position=""))  # which goes once, with the push
        first = start = self.arrived
        stop, pushed = len(self._content), False
        sizes: deque[int] = deque()  # of the parts that are on their way
        await requests.send("admit_push", holder=holder_of(self._header.lease), urgent=self._urgent)
        await requests.answer()
        started = time.perf_counter()
        while True:
            while start < stop and start - self.arrived < self._rate.bytes_ahead:
                part = self._content[start : start + self._rate.part_bytes]
                await requests.send("part", header=of_part, start=start, flat=to_serialize(part.numpy()))
                sizes.append(len(part))
                start += len(part)
            if start == stop and not pushed:
                nothing = to_serialize(self._content[:0].numpy())
                await requests.send("push", header=as_message(self._header), flat=nothing)
                pushed = True
            answer = await requests.answer()
            if not sizes:
                return answer
            self.arrived += sizes.popleft()
            if self._measured:
                self._measured.bytes_per_second = (self.arrived - first) / (time.perf_counter() - started)
            reply = Reply(answer["reply"])
            if reply is Reply.ENOUGH or reply in LATE_ROWS_REPLIES:  # the push's answer says what is missing
                stop = start
            elif reply is not Reply.ACCEPTED:
                return asdict(Receipt(reply))
