"""The state of one datagram session and of each payload that it carries, in either direction."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from idletrain.exchange.datagram.link_rate import RoundTrip
from idletrain.exchange.datagram.packet import PAYLOAD, Seal, SessionKeys
from idletrain.exchange.datagram.window import ReceivedMask, ReceiveWindow, SendWindow

PIECES_PER_REPORT = 8 * PAYLOAD  # pieces whose arrival one datagram can report, a bit each
TRANSFER_IDS_KEPT = 1024  # numbers of outgoing transfers; none is further behind the latest
Address = tuple[str, int]
Path = tuple[int, Address]
"""Index of the local socket, and the peer's address."""


@dataclass(frozen=True)
class ReceivedPayload:
    """A payload as its receiver has it: its bytes, zeros where nothing arrived, and which pieces arrived."""

    content: bytearray
    received: ReceivedMask


class PeerSilentError(ConnectionError):
    """The other side has not been heard for too long."""


def new_future() -> Future[Any]:
    """Return a future that its waiter cannot cancel: the endpoint sets its result whatever happens."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass
class OutgoingTransfer:
    """A payload that is being sent.

    Attributes:
        content: The payload's bytes.
        state: Which pieces to send, and how many may be sent.
        prompt_pieces: How many pieces, from the first on, go in the better traffic class.
        heard_at: When the receiver was last heard.
        patience: Seconds of silence after which the transfer fails.
        delivered: Pieces that the receiver has in the end, as far as it reported.
        reported: First pieces of the reports that arrived.
        done: Its result is `delivered`.
    """

    content: memoryview
    state: SendWindow
    prompt_pieces: int
    heard_at: float
    patience: float
    delivered: ReceivedMask = field(init=False)
    reported: set[int] = field(default_factory=set)
    done: Future[ReceivedMask] = field(default_factory=new_future)

    def __post_init__(self) -> None:
        self.delivered = np.zeros(self.state.pieces, bool)

    def add_final_report(self, start: int, body: bytes) -> bool:
        """Add a report of the pieces that the receiver has in the end; return True once all reports are here.

        Args:
            start: The first piece that the report covers.
            body: A bit a piece; empty if the receiver has them all.
        """
        self.state.stop()
        part = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")[: max(0, len(self.delivered) - start)]
        self.delivered[start : start + len(part)] = part
        self.reported |= {start} if len(part) and not start % PIECES_PER_REPORT else set()
        self.delivered |= not body
        return not body or len(self.reported) == -(-len(self.delivered) // PIECES_PER_REPORT)


@dataclass
class IncomingTransfer:
    """A payload that is being received.

    Attributes:
        content: Its bytes in their places, zeros where none have arrived.
        state: Which pieces are here, and how many may be in flight.
        heard_at: When the sender was last heard.
        patience: Seconds of silence after which the transfer fails.
        granted: The sequence up to which the sender was told that it may send.
        done: Its result is the payload.
    """

    content: bytearray
    state: ReceiveWindow
    heard_at: float
    patience: float
    granted: int = 0
    done: Future[ReceivedPayload] = field(default_factory=new_future)


class SessionState:
    """One session: its keys, the paths to the other side, and the transfers under way.

    Args:
        keys: This side's.

    Attributes:
        paths: Ways to the other side; datagrams take them in turn.
        outgoing: Transfers to the other side, by number.
        incoming: Transfers from the other side, by number.
        trip: The shortest round trip of late, shared by all incoming transfers.
        finished: Of recent incoming transfers that are over, which pieces arrived, a bit each; empty if all did.
        control: Sequence number of the latest packet sent that is not data; each makes one nonce.
        last_sequence: Highest such number received; a packet with a lower one may be a replay and proves nothing.
        opening: Resolved when the session is open; None once it is, and at the side that listens.
        is_opener: Whether this side opens the session and so greets.
        greeted_at: When the last greeting was sent.
        greeting_heard: Sequence of the latest greeting received; an older one is a replay and must not change paths.
    """

    def __init__(self, keys: SessionKeys) -> None:
        self.number = keys.session
        self.send_seal, self.receive_seal = Seal(keys.send), Seal(keys.receive)
        self.paths: list[Path] = []
        self.outgoing: dict[int, OutgoingTransfer] = {}
        self.incoming: dict[int, IncomingTransfer] = {}
        self.trip = RoundTrip()
        self.finished: dict[int, bytes] = {}
        self.control = self.last_sequence = self.greeting_heard = 0
        self.opening: Future[None] | None = None
        self.is_opener = False
        self.greeted_at = 0.0
        self._used: set[int] = set()

    def claim_number(self, transfer: int) -> bool:
        """Reserve a number for an outgoing transfer; return False if it was used before."""
        latest = max(self._used, default=0)
        if transfer in self._used or transfer <= latest - TRANSFER_IDS_KEPT:
            return False
        self._used = {number for number in self._used if number > latest - TRANSFER_IDS_KEPT} | {transfer}
        return True

    def fail_all(self, reason: str) -> None:
        """Fail every transfer under way, and the opening if it is pending."""
        pending: list[Future[Any]] = [transfer.done for transfer in self.outgoing.values()]
        pending += [transfer.done for transfer in self.incoming.values()]
        for done in (*pending, *([self.opening] if self.opening else [])):
            if not done.done():
                done.set_exception(PeerSilentError(reason))
