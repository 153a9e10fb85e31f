"""Seal a session's packets and put them into the outbox: pieces of payloads, reports, credit and control."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from idletrain.exchange.datagram.packet import PAYLOAD, Packet, PacketKind
from idletrain.exchange.datagram.transfer import IncomingTransfer, OutgoingTransfer, Path, SessionState

BURST = 64  # datagrams of one transfer, or read from one socket, before others have their turn
MAX_SEQUENCE = (1 << 32) - 1  # of control packets in a session
PROMPT, BULK = 0x48, 0x28  # DSCP AF21 and AF11: for what counts most, and for the rest


class OutgoingDatagram(NamedTuple):
    """A sealed datagram, the path that it takes, and its traffic class (DSCP)."""

    path: Path
    content: bytes
    traffic_class: int


class PacketSender:
    """The packets of one side's sessions.

    Args:
        counts: What happened, by name: `sent`, `again`.
        end: Closes the session of a number.

    Attributes:
        outbox: Datagrams to be sent now, in order.
    """

    def __init__(self, counts: Counter[str], end: Callable[[int], None]) -> None:
        self.outbox: deque[OutgoingDatagram] = deque()
        self._counts, self._end = counts, end

    def burst(self, session: SessionState, transfer: int, outgoing: OutgoingTransfer, now: float) -> None:
        """Send pieces of a payload, as many as credit allows and at most `BURST`."""
        for _ in range(BURST):
            item = outgoing.state.next()
            if item is None:
                return
            piece, sequence = item
            body = bytes(outgoing.content[piece * PAYLOAD : (piece + 1) * PAYLOAD])
            packet = Packet(PacketKind.DATA, session.number, transfer, sequence, piece, body)
            self._seal(session, packet, PROMPT if piece < outgoing.prompt_pieces else BULK)
            self._counts["sent" if sequence <= outgoing.state.pieces else "again"] += 1
            outgoing.state.sent(now)

    def final_report(self, session: SessionState, transfer: int) -> None:
        """Say that a transfer is complete, and which pieces arrived."""
        bits = session.finished[transfer]
        for start in range(0, max(1, len(bits)), PAYLOAD):
            self.control(session, PacketKind.STOP, transfer, 8 * start, bits[start : start + PAYLOAD])

    def grant(self, session: SessionState, transfer: int, incoming: IncomingTransfer) -> None:
        """Grant the sender the credit that its transfer has."""
        incoming.granted = incoming.state.limit
        self.control(session, PacketKind.GRANT, transfer, incoming.granted)

    def control(
        self,
        session: SessionState,
        kind: PacketKind,
        transfer: int,
        number: int,
        body: bytes = b"",
        path: Path | None = None,
    ) -> None:
        """Send a packet that is not data; end the session when its sequence numbers, and so its nonces, are used up."""
        if session.control == MAX_SEQUENCE:
            self._end(session.number)
            return
        session.control += 1
        self._seal(session, Packet(kind, session.number, transfer, session.control, number, body), PROMPT, path)

    def _seal(self, session: SessionState, packet: Packet, traffic_class: int, path: Path | None = None) -> None:
        """Put a sealed packet into the outbox, on the next path in turn unless one is given."""
        path = path or (session.paths[packet.sequence % len(session.paths)] if session.paths else None)
        content = session.send_seal.close(packet)
        if path is not None:
            self.outbox.append(OutgoingDatagram(path, content, traffic_class))
