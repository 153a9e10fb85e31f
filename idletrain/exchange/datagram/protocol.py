"""The datagram protocol without sockets, threads or clock: datagrams and time go in, datagrams and results come out.

Both sides agree on a transfer over the cluster's own connections before: its number, its size, when it is complete
enough, and the session's keys. Datagrams that nobody expects are dropped and counted.
"""

from __future__ import annotations

import struct
from collections import Counter
from concurrent.futures import Future

import numpy as np

from idletrain.exchange.datagram.link_rate import LinkRate
from idletrain.exchange.datagram.packet import PAYLOAD, Packet, PacketKind, SessionKeys, bits_of, peek
from idletrain.exchange.datagram.packet_sender import PacketSender
from idletrain.exchange.datagram.transfer import (
    IncomingTransfer,
    OutgoingTransfer,
    Path,
    PeerSilentError,
    ReceivedPayload,
    SessionState,
)
from idletrain.exchange.datagram.window import ReceiveWindow, share

IDLE_SECONDS = 0.5
GREETING_SECONDS = 0.05  # between two greetings, until one is answered
GRANT_INTERVAL_SECONDS = 0.0005  # between two grants of credit: each costs as much as several datagrams
FINISHED_KEPT = 256  # incoming transfers that are over, whose sender may not know yet
PATH_SOCKETS = 4  # of the side that opens a session: routers with equal paths choose by port


class DatagramProtocol:
    """Sessions and their transfers on one side; its caller passes on what `outbox` holds after every call.

    Results are futures: `opening` of a session, `done` of a transfer.

    Attributes:
        sessions: Open sessions, by number.
        outbox: Datagrams to be sent now, in order.
        due_at: When `grant_credits` and `send_due` are to be called again, even if nothing arrives.
        counts: What happened, by name: `sent`, `again`, `received`, `duplicate`, `dropped`.
        link: The measured rate of this side's link, as a receiver.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self.sessions: dict[int, SessionState] = {}
        self._sender = PacketSender(counts, self.end)
        self.outbox = self._sender.outbox
        self.due_at = 0.0
        self.counts = counts
        self.link = LinkRate()

    # --- what the user asks for ---------------------------------------------------------------------------------

    def open(self, keys: SessionKeys, paths: list[Path], opening: Future[None], now: float) -> None:
        """Start a session: greet the other side on all paths, or, without paths, wait for its greeting."""
        session = self.sessions[keys.session] = SessionState(keys)
        if not paths:
            opening.set_result(None)
            return
        session.opening, session.is_opener = opening, True
        session.paths = paths
        self._greet(session, now)

    def end(self, number: int) -> None:
        """Close a session; its transfers fail."""
        if session := self.sessions.pop(number, None):
            session.fail_all("the session is closed")

    def send(self, number: int, transfer: int, outgoing: OutgoingTransfer) -> None:
        """Start to send a payload in session `number`."""
        session = self.sessions.get(number)
        if session is None:
            outgoing.done.set_exception(PeerSilentError("the session is closed"))
        elif not session.claim_number(transfer):
            outgoing.done.set_exception(PeerSilentError("the transfer's number was used before, and so its nonces"))
        else:
            session.outgoing[transfer] = outgoing

    def expect(self, number: int, transfer: int, incoming: IncomingTransfer) -> None:
        """Start to receive a payload in session `number`."""
        session = self.sessions.get(number)
        if session is None:
            incoming.done.set_exception(PeerSilentError("the session is closed"))
        else:
            incoming.state.trip = session.trip
            session.incoming[transfer] = incoming

    def stop(self, number: int, transfer: int) -> None:
        """Complete an incoming transfer with the pieces that have arrived."""
        session = self.sessions.get(number)
        if session and (incoming := session.incoming.get(transfer)):
            self._finish(session, transfer, incoming)

    def drop(self, number: int, transfer: int) -> None:
        """Abandon an outgoing transfer, if it is still under way."""
        session = self.sessions.get(number)
        if session and (outgoing := session.outgoing.pop(transfer, None)):
            outgoing.done.set_exception(PeerSilentError("it was given up"))

    def progress(self, number: int, transfer: int) -> ReceivedPayload | None:
        """Return what has arrived of an incoming transfer, None if it is not under way; its bytes are not a copy."""
        session = self.sessions.get(number)
        incoming = session.incoming.get(transfer) if session else None
        return ReceivedPayload(incoming.content, incoming.state.received.copy()) if incoming else None

    # --- what arrives -------------------------------------------------------------------------------------------

    def receive(self, path: Path, datagram: bytes, now: float) -> None:
        """Process a datagram that arrived on a path; drop it unless its session's key sealed it."""
        claimed = peek(datagram)
        session = self.sessions.get(claimed.session) if claimed else None
        packet = session.receive_seal.open(datagram) if session else None
        if packet is None or session is None:
            self.counts["dropped"] += 1
            return
        if packet.kind is not PacketKind.DATA:
            self.due_at = 0.0
        fresh = packet.kind is not PacketKind.DATA and packet.sequence > session.last_sequence
        session.last_sequence = packet.sequence if fresh else session.last_sequence
        match packet.kind:
            case PacketKind.HELLO:
                self._on_hello(session, path, packet)
            case PacketKind.DATA:
                self._on_data(session, packet, now)
            case PacketKind.PROBE:
                self._on_probe(session, packet, now, fresh=fresh)
            case _:
                self._on_report(session, packet, now, fresh=fresh)

    def _on_hello(self, session: SessionState, path: Path, packet: Packet) -> None:
        if not session.is_opener:  # send the same back, and remember the path
            if packet.sequence <= session.greeting_heard:
                self.counts["dropped"] += 1
                return
            session.greeting_heard = packet.sequence
            if path not in session.paths:
                session.paths = [*session.paths, path][-2 * PATH_SOCKETS :]
            self._sender.control(session, PacketKind.HELLO, 0, packet.number, packet.body, path=path)
        elif session.opening is not None:
            session.opening.set_result(None)
            session.opening = None

    def _on_data(self, session: SessionState, packet: Packet, now: float) -> None:
        incoming = session.incoming.get(packet.transfer)
        if incoming is None:
            self.counts["duplicate" if packet.transfer in session.finished else "dropped"] += 1
            return
        start = packet.number * PAYLOAD
        if len(packet.body) != min(PAYLOAD, len(incoming.content) - start):
            self.counts["dropped"] += 1
            return
        if not incoming.state.take(packet.sequence, packet.number, now):
            self.counts["duplicate"] += 1
            return
        incoming.content[start : start + len(packet.body)] = packet.body
        incoming.heard_at = now
        self.counts["received"] += 1
        self.link.arrived(now, 1)
        if incoming.state.is_done():
            self.due_at = 0.0
            self._finish(session, packet.transfer, incoming)

    def _finish(self, session: SessionState, transfer: int, incoming: IncomingTransfer) -> None:
        del session.incoming[transfer]
        bits = b"" if not incoming.state.missing else np.packbits(incoming.state.received, bitorder="little").tobytes()
        session.finished = {**dict(list(session.finished.items())[1 - FINISHED_KEPT :]), transfer: bits}
        self._sender.final_report(session, transfer)
        incoming.done.set_result(ReceivedPayload(incoming.content, incoming.state.received))

    def _on_probe(self, session: SessionState, packet: Packet, now: float, *, fresh: bool) -> None:
        """Note that a sender asks which pieces are missing and how many it may send."""
        incoming = session.incoming.get(packet.transfer)
        if incoming is None:
            if packet.transfer in session.finished:
                self._sender.final_report(session, packet.transfer)
            return  # else this side may not expect the transfer yet: the sender probes again
        incoming.heard_at = now if fresh else incoming.heard_at
        if len(packet.body) == 4:
            (probe,) = struct.unpack("!I", packet.body)
            incoming.state.probed(probe, packet.number, now)

    def _on_report(self, session: SessionState, packet: Packet, now: float, *, fresh: bool) -> None:
        """Update an outgoing transfer by its receiver's grant, report of missing pieces, or final report."""
        outgoing = session.outgoing.get(packet.transfer)
        if outgoing is None:
            return
        outgoing.heard_at = now if fresh else outgoing.heard_at
        if packet.kind is PacketKind.GRANT:
            outgoing.state.granted(packet.number, now)
        elif packet.kind is PacketKind.MISSING and len(packet.body) >= 4:
            (probe,) = struct.unpack_from("!I", packet.body)
            arrived = np.unpackbits(np.frombuffer(packet.body, np.uint8, offset=4), bitorder="little").astype(bool)
            outgoing.state.report_missing(probe, arrived.tolist(), packet.number, now)
        elif packet.kind is PacketKind.STOP and outgoing.add_final_report(packet.number, packet.body):
            del session.outgoing[packet.transfer]
            outgoing.done.set_result(outgoing.delivered)

    # --- what is due --------------------------------------------------------------------------------------------

    def grant_credits(self, now: float) -> None:
        """Answer probes, grant the credit that the link has room for, and fail transfers whose sender is silent."""
        if any(session.incoming for session in self.sessions.values()):
            share(self.link, self._receive_windows(), now)
        for session in list(self.sessions.values()):
            for transfer, incoming in list(session.incoming.items()):
                if (probe := incoming.state.answer(now)) is not None:
                    self._answer_probe(session, transfer, incoming, probe, now)
                if incoming.state.limit > incoming.granted and session.paths:
                    self._sender.grant(session, transfer, incoming)
                if now - incoming.heard_at > incoming.patience:
                    del session.incoming[transfer]
                    incoming.done.set_exception(PeerSilentError(f"nothing came for {incoming.patience:.0f} s"))

    def send_due(self, now: float) -> None:
        """Send due greetings, data that was granted and probes; fail transfers whose receiver is silent."""
        for session in list(self.sessions.values()):
            if session.opening and now - session.greeted_at > GREETING_SECONDS:
                self._greet(session, now)
            for transfer, outgoing in list(session.outgoing.items()):
                if now - outgoing.heard_at > outgoing.patience:
                    del session.outgoing[transfer]
                    outgoing.done.set_exception(PeerSilentError(f"no answer in {outgoing.patience:.0f} s"))
                    continue
                self._sender.burst(session, transfer, outgoing, now)
                if (probe := outgoing.state.probe(now)) is not None:
                    body = struct.pack("!I", probe)
                    self._sender.control(session, PacketKind.PROBE, transfer, outgoing.state.sequence, body)

    def schedule(self, now: float) -> None:
        """Set `due_at` by what is under way."""
        sending = [out.state for session in self.sessions.values() for out in session.outgoing.values()]
        if any(state.ready for state in sending):
            self.due_at = now
            return
        receiving = self._receive_windows()
        times = [state.wake_at() for state in sending] + [state.answer_at for state in receiving]
        if any(state.wants > 0 and state.is_heard(now) for state in receiving):  # room grows with time
            times.append(now + GRANT_INTERVAL_SECONDS)
        times += [session.greeted_at + GREETING_SECONDS for session in self.sessions.values() if session.opening]
        self.due_at = min((now + IDLE_SECONDS, *times))

    def _receive_windows(self) -> list[ReceiveWindow]:
        return [incoming.state for session in self.sessions.values() for incoming in session.incoming.values()]

    # --- packets ------------------------------------------------------------------------------------------------

    def _answer_probe(
        self, session: SessionState, transfer: int, incoming: IncomingTransfer, probe: int, now: float
    ) -> None:
        share(self.link, self._receive_windows(), now, first=[incoming.state])
        for start in range(0, len(incoming.state.received), 8 * (PAYLOAD - 4)):
            part = incoming.state.received[start : start + 8 * (PAYLOAD - 4)]
            body = struct.pack("!I", probe) + bits_of(part.tolist(), 0)
            self._sender.control(session, PacketKind.MISSING, transfer, start, body)
        self._sender.grant(session, transfer, incoming)

    def _greet(self, session: SessionState, now: float) -> None:
        session.greeted_at = now
        for path in session.paths:
            self._sender.control(session, PacketKind.HELLO, 0, 0, bytes(PAYLOAD), path=path)
