"""Direct links between the members of a lockstep group: messages of plain bytes, each to one peer.

They travel over Dask's comm layer with the cluster's own certificates, to the port of the worker itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from distributed.comm import Comm
from distributed.core import connect

OPERATION = "idletrain-message"
PEER_POLL_SECONDS = 0.2  # between two checks that the peers are still connected
GOODBYE = -1  # number of a sender's last message
Topic = tuple[str, int, int, int]  # store and run, epoch, round and group that a message belongs to
TOPICS_KEPT = 8  # messages of older topics are dropped: a worker is in one group of each of few runs


class CutOffError(Exception):
    """A peer is gone; with a text, it cannot be reached or was silent for too long."""


class Mailbox:
    """Messages from peers that were not taken yet; lives on the worker's event loop."""

    def __init__(self) -> None:
        self._messages: dict[Topic, dict[tuple[int, int], bytes]] = {}
        self._arrived = asyncio.Event()

    def put(self, to: Sequence[Any], number: int, sender: int, content: bytes) -> None:
        """Store message `number` of a sender; the Dask handler of `OPERATION`."""
        run, epoch, round_, group = to
        self._messages.setdefault((run, epoch, round_, group), {})[number, sender] = content
        for oldest in list(self._messages)[:-TOPICS_KEPT]:
            del self._messages[oldest]
        self._arrived.set()

    def take(self, to: Topic, number: int, sender: int) -> bytes | None:
        """Remove and return a message, None if it has not arrived."""
        return self._messages.get(to, {}).pop((number, sender), None)

    def has_left(self, to: Topic, sender: int) -> bool:
        """Return whether a sender has closed its links."""
        return (GOODBYE, sender) in self._messages.get(to, {})

    async def wait(self, seconds: float) -> None:
        """Wait for the next message, at most `seconds`."""
        self._arrived.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)

    def forget(self, to: Topic) -> None:
        """Drop the messages of a group that has ended."""
        self._messages.pop(to, None)


class PeerLinks:
    """One member's connections to the other members of its lockstep group.

    Args:
        mailbox: This worker's.
        to: The topic of all messages.
        me: This member's number.
        lines: A connection to each member, None to itself.
        patience_seconds: How long to wait for a message.

    Attributes:
        sent_bytes: Bytes of messages sent, without their envelopes.
    """

    def __init__(
        self, mailbox: Mailbox, to: Topic, me: int, lines: Sequence[Comm | None], patience_seconds: float
    ) -> None:
        self._mailbox, self._to, self.me, self._lines, self._patience = mailbox, to, me, lines, patience_seconds
        self._number = 0
        self.sent_bytes = 0

    @property
    def members(self) -> int:
        """Return the number of members of the group, including this one."""
        return len(self._lines)

    @classmethod
    async def open(
        cls,
        mailbox: Mailbox,
        to: Topic,
        me: int,
        addresses: Sequence[str],
        patience_seconds: float,
        connection_args: dict[str, Any],
    ) -> PeerLinks:
        """Connect to all other members.

        Raises:
            CutOffError: one of them cannot be reached.
        """
        lines: list[Comm | None] = []
        try:
            for k, address in enumerate(addresses):
                lines.append(None if k == me else await _connect(address, patience_seconds, connection_args))
        except OSError as error:
            await _close(lines)
            raise CutOffError(f"{addresses[len(lines)]} cannot be reached") from error
        return cls(mailbox, to, me, lines, patience_seconds)

    async def swap(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send message k to member k; return what each member sent here, and this member's message to itself.

        Raises:
            CutOffError: a peer is gone, or silent for too long.
        """
        number, self._number = self._number, self._number + 1
        try:
            await asyncio.gather(*(self._send(k, number, messages[k]) for k, line in enumerate(self._lines) if line))
        except OSError as error:
            raise CutOffError from error
        received = {self.me: messages[self.me]}
        until = asyncio.get_running_loop().time() + self._patience
        while True:
            for k in range(self.members):
                if k not in received and (content := self._mailbox.take(self._to, number, k)) is not None:
                    received[k] = content
            if len(received) == self.members:
                return [received[k] for k in range(self.members)]
            lost = [k for k, line in enumerate(self._lines) if k not in received and line and self._is_lost(k, line)]
            if lost or asyncio.get_running_loop().time() > until:
                raise CutOffError("" if lost else f"no message in {self._patience:.0f} s from {self._silent(received)}")
            await self._mailbox.wait(PEER_POLL_SECONDS)

    async def close(self) -> None:
        """Close the connections; peers that still wait notice."""
        for k, line in enumerate(self._lines):
            if line and not line.closed():
                with contextlib.suppress(OSError):
                    await self._send(k, GOODBYE, b"")
        await _close(self._lines)
        self._mailbox.forget(self._to)

    def _silent(self, received: Collection[int]) -> str:
        return ", ".join(line.peer_address for k, line in enumerate(self._lines) if line and k not in received)

    def _is_lost(self, k: int, line: Comm) -> bool:
        return bool(line.closed()) or self._mailbox.has_left(self._to, k)

    async def _send(self, k: int, number: int, content: bytes) -> None:
        line = self._lines[k]
        assert line
        envelope = {"op": OPERATION, "reply": False, "to": self._to, "number": number, "sender": self.me}
        await line.write({**envelope, "content": content})
        self.sent_bytes += len(content)


async def _connect(address: str, seconds: float, connection_args: dict[str, Any]) -> Comm:
    """Connect; Dask's own time limit does not cover its handshake."""
    return await asyncio.wait_for(connect(address, timeout=seconds, **connection_args), seconds)


async def _close(lines: Sequence[Comm | None]) -> None:
    for line in lines:
        if line:
            await line.close()
