"""A direct link between workers that take their steps together: letters, each to one peer, over Dask's comm layer with
the cluster's own certificates, to the port of the worker itself. Letters are plain bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from distributed.comm import Comm
from distributed.core import connect

OPERATION = "idletrain-message"
PEER_POLL_SECONDS = 0.2  # between two looks whether the peers are still there
GOODBYE = -1  # the number of a letter that says that no other comes
Topic = tuple[str, int, int, int]  # store and run, epoch, round and gang: what a letter belongs to
TOPICS_KEPT = 8  # letters of older ones are dropped: a worker is in one gang of each of few runs


class CutOffError(Exception):
    """A peer is gone; with words, it cannot be reached or is silent for too long."""


class Mailbox:
    """What came from peers and was not taken yet; lives on the worker's event loop."""

    def __init__(self) -> None:
        self._letters: dict[Topic, dict[tuple[int, int], bytes]] = {}
        self._come = asyncio.Event()

    def put(self, to: Sequence[Any], number: int, sender: int, content: bytes) -> None:
        """Dask's handler of `OPERATION`: keep letter `number` of a sender."""
        run, epoch, round_, gang = to
        self._letters.setdefault((run, epoch, round_, gang), {})[number, sender] = content
        for oldest in list(self._letters)[:-TOPICS_KEPT]:
            del self._letters[oldest]
        self._come.set()

    def take(self, to: Topic, number: int, sender: int) -> bytes | None:
        """A letter, if it has come."""
        return self._letters.get(to, {}).pop((number, sender), None)

    def has_left(self, to: Topic, sender: int) -> bool:
        """Whether a sender has said goodbye."""
        return (GOODBYE, sender) in self._letters.get(to, {})

    async def wait(self, seconds: float) -> None:
        """Wait for the next letter, or so long."""
        self._come.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._come.wait(), seconds)

    def forget(self, to: Topic) -> None:
        """Drop what came for a gang that is no more."""
        self._letters.pop(to, None)


class PeerLinks:
    """One member's connections to the others of its gang.

    Args:
        mailbox: This worker's.
        to: What letters belong to.
        me: This member's number.
        lines: A connection to each member, None to itself.
        patience_seconds: How long to wait for a letter.

    Attributes:
        sent_bytes: Of letters, without their envelopes.
    """

    def __init__(
        self, mailbox: Mailbox, to: Topic, me: int, lines: Sequence[Comm | None], patience_seconds: float
    ) -> None:
        self._mailbox, self._to, self.me, self._lines, self._patience = mailbox, to, me, lines, patience_seconds
        self._number = 0
        self.sent_bytes = 0

    @property
    def members(self) -> int:
        """How many there are, this one counted."""
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
        """Connect to all others.

        Raises:
            CutOffError: one of them cannot be reached.
        """
        lines: list[Comm | None] = []
        try:
            for k, address in enumerate(addresses):
                lines.append(None if k == me else await _connected(address, patience_seconds, connection_args))
        except OSError as error:
            await _close(lines)
            raise CutOffError(f"{addresses[len(lines)]} cannot be reached") from error
        return cls(mailbox, to, me, lines, patience_seconds)

    async def swap(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send letter k to member k; returns what each sent here, with this member's letter to itself.

        Raises:
            CutOffError: a peer is gone, or silent for too long.
        """
        number, self._number = self._number, self._number + 1
        try:
            await asyncio.gather(*(self._send(k, number, messages[k]) for k, line in enumerate(self._lines) if line))
        except OSError as error:
            raise CutOffError from error
        got = {self.me: messages[self.me]}
        until = asyncio.get_running_loop().time() + self._patience
        while True:
            for k in range(self.members):
                if k not in got and (content := self._mailbox.take(self._to, number, k)) is not None:
                    got[k] = content
            if len(got) == self.members:
                return [got[k] for k in range(self.members)]
            gone = [k for k, line in enumerate(self._lines) if k not in got and line and self._is_gone(k, line)]
            if gone or asyncio.get_running_loop().time() > until:
                raise CutOffError("" if gone else f"no letter in {self._patience:.0f} s from {self._silent(got)}")
            await self._mailbox.wait(PEER_POLL_SECONDS)

    async def close(self) -> None:
        """Close the connections; peers that still wait are told."""
        for k, line in enumerate(self._lines):
            if line and not line.closed():
                with contextlib.suppress(OSError):
                    await self._send(k, GOODBYE, b"")
        await _close(self._lines)
        self._mailbox.forget(self._to)

    def _silent(self, received: Collection[int]) -> str:
        return ", ".join(line.peer_address for k, line in enumerate(self._lines) if line and k not in received)

    def _is_gone(self, k: int, line: Comm) -> bool:
        return bool(line.closed()) or self._mailbox.has_left(self._to, k)

    async def _send(self, k: int, number: int, content: bytes) -> None:
        line = self._lines[k]
        assert line
        envelope = {"op": OPERATION, "reply": False, "to": self._to, "number": number, "sender": self.me}
        await line.write({**envelope, "content": content})
        self.sent_bytes += len(content)


async def _connected(address: str, seconds: float, connection_args: dict[str, Any]) -> Comm:
    """A connection; Dask's own limit does not hold for its handshake."""
    return await asyncio.wait_for(connect(address, timeout=seconds, **connection_args), seconds)


async def _close(lines: Sequence[Comm | None]) -> None:
    for line in lines:
        if line:
            await line.close()
