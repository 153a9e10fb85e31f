"""One side's sockets, on a thread of their own: any number of transfers out and in, over any number of sessions.

Whoever wants a transfer has agreed on it over the cluster's own connections before: its number, its size, what is
enough, and the session's keys. What comes unasked is dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from idletrain.exchange.datagram.packet import (
    KEY_BYTES,
    MAX_DATAGRAM_BYTES,
    PAYLOAD,
    Packet,
    PacketKind,
    Seal,
    bits_of,
    peek,
)
from idletrain.exchange.datagram.window import LinkRate, ReceivedMask, ReceiveWindow, RoundTrip, SendWindow, share

logger = logging.getLogger(__name__)
BURST = 64  # datagrams read or sent before the other things are looked at
BUFFER_BYTES = 1 << 22  # asked of the kernel; it gives what it allows
IDLE_SECONDS = 0.5
GREET_SECONDS = 0.05
SWITCH_SECONDS = 0.0005  # for which another thread may keep the interpreter: by default 5 ms, twice a shallow buffer
LOOP_SECONDS = 0.0005  # between two looks at what may be granted: each costs as much as several datagrams
NUMBERS_KEPT = 1024  # of transfers that went out; none is further behind the latest
MOST_NUMBER = (1 << 32) - 1  # of what is not data in a session
FINISHED_KEPT = 256  # transfers that are over, whose sender may not have heard so
PATH_SOCKETS = 4  # of who opens a session: routers with equal paths choose by port
PROMPT, BULK = 0x48, 0x28  # DSCP AF21 and AF11: what counts first, and the rest
TRAFFIC_CLASS_OPTIONS = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}
PIECES_PER_REPORT = 8 * PAYLOAD  # pieces of which a datagram says whether they are there
Address = tuple[str, int]


@dataclass(frozen=True)
class SessionKeys:
    """A session's number and its keys, for what this side sends and for what it gets."""

    session: int
    out: bytes
    back: bytes

    def turned(self) -> SessionKeys:
        """The other side's."""
        return SessionKeys(self.session, self.back, self.out)


@dataclass(frozen=True)
class ReceivedPayload:
    """A transfer that is over at its receiver: its bytes, zeros where nothing came, and which pieces did."""

    content: bytearray
    received: ReceivedMask


class PeerSilentError(ConnectionError):
    """The other side has not been heard for too long."""


def _lasting() -> Future[Any]:
    """A future that whoever waits for it cannot cancel: the thread sets its result whatever happens."""
    made: Future[Any] = Future()
    made.set_running_or_notify_cancel()
    return made


@dataclass
class _OutgoingTransfer:
    content: memoryview
    state: SendWindow
    prompt: int
    heard_at: float
    patience: float
    there: ReceivedMask = field(init=False)  # as far as the receiver told in the end
    reported: set[int] = field(default_factory=set)
    done: Future[ReceivedMask] = field(default_factory=_lasting)

    def __post_init__(self) -> None:
        self.there = np.zeros(self.state.pieces, bool)

    def ended(self, start: int, body: bytes) -> bool:
        """Note a part of what the receiver has in the end, or that it is all; True once it is told whole."""
        self.state.stop()
        part = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")[: max(0, len(self.there) - start)]
        self.there[start : start + len(part)] = part
        self.reported |= {start} if len(part) and not start % PIECES_PER_REPORT else set()
        self.there |= not body
        return not body or len(self.reported) == -(-len(self.there) // PIECES_PER_REPORT)


@dataclass
class _IncomingTransfer:
    content: bytearray
    state: ReceiveWindow
    heard_at: float
    patience: float
    reported: int = 0
    done: Future[ReceivedPayload] = field(default_factory=_lasting)


class _Session:
    """Keys, where the other side is, and what is under way with it."""

    def __init__(self, keys: SessionKeys) -> None:
        self.number = keys.session
        self.out_seal, self.back_seal = Seal(keys.out), Seal(keys.back)
        self.paths: list[tuple[socket.socket, Address]] = []
        self.out: dict[int, _OutgoingTransfer] = {}
        self.coming: dict[int, _IncomingTransfer] = {}
        self.trip = RoundTrip()
        self.used: set[int] = set()
        self.finished: dict[int, bytes] = {}  # with what of them was there, a bit a piece; nothing if all was
        self.control = 0  # sequence of what is not data: each nonce once
        self.hello: Future[None] | None = None
        self.opener = False
        self.heard = 0  # the highest sequence of what is not data: an older one says nothing about who is there
        self.greeted_at = 0.0
        self.greeting_heard = 0  # an older one, sent by whoever recorded it, would lead astray

    def is_new(self, transfer: int) -> bool:
        """Whether this number was not used yet for what goes out; it is now."""
        latest = max(self.used, default=0)
        if transfer in self.used or transfer <= latest - NUMBERS_KEPT:
            return False
        self.used = {one for one in self.used if one > latest - NUMBERS_KEPT} | {transfer}
        return True


class _Switching:
    """How long another thread may keep the interpreter: little, while any endpoint is open."""

    _lock, _open, _before = threading.Lock(), 0, 0.0

    @classmethod
    def quicken(cls) -> None:
        with cls._lock:
            cls._before = cls._before if cls._open else sys.getswitchinterval()
            cls._open += 1
            sys.setswitchinterval(min(cls._before, SWITCH_SECONDS))

    @classmethod
    def slacken(cls) -> None:
        with cls._lock:
            cls._open -= 1
            if not cls._open:
                sys.setswitchinterval(cls._before)


class Endpoint:
    """See above.

    Args:
        host: The address to bind to.
        sockets: How many, each a path of its own.

    Attributes:
        counts: What happened, by name: `sent`, `again`, `received`, `duplicate`, `dropped`, `unsent`, `too large`.
        link: What is known of this side's link, as a receiver.
    """

    def __init__(self, host: str, sockets: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.link = LinkRate()
        with contextlib.ExitStack() as failed:
            self._sockets = [failed.enter_context(_bound(host)) for _ in range(sockets)]
            failed.pop_all()
        _Switching.quicken()
        self._sessions: dict[int, _Session] = {}
        self._asked: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for one in (*self._sockets, self._wake_out):
            self._selector.register(one, selectors.EVENT_READ)
        self._closing = self._over = False
        self._due_at = 0.0  # when there is something to say or to send, whatever comes
        self._thread = threading.Thread(target=self._run, name="idletrain-datagrams", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._over

    @property
    def address(self) -> Address:
        """Of the first socket."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def open(self, keys: SessionKeys, to: Address | None = None) -> Future[None]:
        """Begin a session; done when a datagram of full size has come through and its answer back.

        Args:
            keys: This side's.
            to: Where the other side listens, for who opens the session; the other side learns it from what comes.
        """
        opened: Future[None] = _lasting()

        def begin() -> None:
            session = self._sessions[keys.session] = _Session(keys)
            if to is None:
                opened.set_result(None)
                return
            session.hello, session.opener = opened, True
            session.paths = [(one, to) for one in self._sockets]
            self._greet(session)

        self._ask(begin)
        return opened

    def send(
        self, session: int, transfer: int, content: memoryview, *, prompt: int, patience: float
    ) -> Future[ReceivedMask]:
        """Send a transfer; done when the receiver has enough, with the pieces that it has.

        Args:
            session: An open one.
            transfer: Its number, never used before in this session and direction.
            content: Its bytes.
            prompt: How many of them, from the first on, go in the class of what counts.
            patience: Seconds without an answer after which it fails with SilentError.
        """
        state = SendWindow(max(1, -(-len(content) // PAYLOAD)))
        out = _OutgoingTransfer(content, state, -(-prompt // PAYLOAD), time.monotonic(), patience)

        def begin() -> None:
            found = self._sessions.get(session)
            if found is None:
                out.done.set_exception(PeerSilentError("the session is closed"))
            elif not found.is_new(transfer):
                out.done.set_exception(PeerSilentError("the transfer's number was used before, and so its nonces"))
            else:
                found.out[transfer] = out

        self._ask(begin)
        return out.done

    def receive(
        self,
        session: int,
        transfer: int,
        size: int,
        *,
        patience: float,
        required_pieces: int | None = None,
        min_pieces: int | None = None,
        is_acceptable: Callable[[memoryview, ReceivedMask], bool] | None = None,
    ) -> Future[ReceivedPayload]:
        """Expect a transfer; see `Receiving` for what is enough. SilentError after `patience` seconds of silence."""
        content, pieces = bytearray(size), max(1, -(-size // PAYLOAD))
        asked = functools.partial(is_acceptable, memoryview(content)) if is_acceptable else None
        state = ReceiveWindow(pieces, required_pieces, min_pieces, asked)
        coming = _IncomingTransfer(content, state, time.monotonic(), patience)

        def begin() -> None:
            found = self._sessions.get(session)
            if found is None:
                coming.done.set_exception(PeerSilentError("the session is closed"))
            else:
                coming.state.trip = found.trip
                found.coming[transfer] = coming

        self._ask(begin)
        return coming.done

    def stop(self, session: int, transfer: int) -> None:
        """Take what has come of a transfer for enough."""

        def enough() -> None:
            found = self._sessions.get(session)
            if found and (coming := found.coming.get(transfer)):
                self._finish(found, transfer, coming)

        self._ask(enough)

    def drop(self, session: int, transfer: int) -> None:
        """Send no more of a transfer, whatever the receiver has; one that is over is left alone."""

        def leave() -> None:
            found = self._sessions.get(session)
            out = found.out.pop(transfer, None) if found else None
            if out:
                out.done.set_exception(PeerSilentError("it was given up"))

        self._ask(leave)

    def end(self, session: int) -> None:
        """Close a session: what is under way in it fails."""
        self._ask(lambda: self._end(session))

    def close(self) -> None:
        """Close the sockets; what is under way fails."""
        self._closing = True
        self._ask(lambda: None)
        self._thread.join()
        _Switching.slacken()
        logger.info("datagrams: %s", dict(self.counts))

    def progress(self, session: int, transfer: int) -> Future[ReceivedPayload | None]:
        """What has come of a transfer that is under way; its bytes are those that still come."""
        told: Future[ReceivedPayload | None] = _lasting()

        def look() -> None:
            found = self._sessions.get(session)
            coming = found.coming.get(transfer) if found else None
            told.set_result(ReceivedPayload(coming.content, coming.state.received.copy()) if coming else None)

        self._ask(look)
        return told

    # --- the thread ---------------------------------------------------------------------------------------------

    def _ask(self, what: Callable[[], None]) -> None:
        """Have the thread do something; once it has ended there are no sessions, which is an answer, too."""
        self._asked.append(what)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b".")
        if self._over:
            self._run_requests()

    def _run_requests(self) -> None:
        while True:
            try:
                what = self._asked.popleft()
            except IndexError:  # once it is over, more than one thread answers
                return
            self._due_at = 0.0
            what()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except Exception:  # one transfer's fault is not the others'
                    logger.exception("a datagram could not be dealt with")
                    time.sleep(LOOP_SECONDS)
        finally:
            for number in list(self._sessions):
                self._end(number)
            self._over = True
            self._run_requests()
            for one in (*self._sockets, self._wake_in, self._wake_out):
                one.close()
            self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(max(0.0, self._due_at - time.monotonic())):
            if key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]
        self._run_requests()
        if time.monotonic() >= self._due_at:
            self._grant_credits()
            self._send_all()
            self._due_at = self._next_due(time.monotonic())

    def _next_due(self, now: float) -> float:
        sending = [out.state for session in self._sessions.values() for out in session.out.values()]
        if any(state.ready for state in sending):
            return now
        wakes = [state.wake_at() for state in sending]
        coming = self._incoming()
        wakes += [state.answer_at for state in coming]
        if any(state.wants > 0 and state.has_arrived(now) for state in coming):  # room grows with time
            wakes.append(now + LOOP_SECONDS)
        wakes += [session.greeted_at + GREET_SECONDS for session in self._sessions.values() if session.hello]
        return min((now + IDLE_SECONDS, *wakes))

    def _end(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is None:
            return
        pending: list[Future[Any]] = [one.done for one in session.out.values()]
        pending += [one.done for one in session.coming.values()]
        for done in (*pending, *([session.hello] if session.hello else [])):
            if not done.done():
                done.set_exception(PeerSilentError("the session is closed"))

    # --- what comes ---------------------------------------------------------------------------------------------

    def _read(self, one: socket.socket) -> None:
        for _ in range(BURST):
            try:
                datagram, address = one.recvfrom(MAX_DATAGRAM_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:  # an earlier datagram could not be delivered
                continue
            self._acquire(one, address[:2], datagram)

    def _acquire(self, one: socket.socket, address: Address, datagram: bytes) -> None:
        claimed = peek(datagram)
        session = self._sessions.get(claimed.session) if claimed else None
        packet = session.back_seal.open(datagram) if session else None
        if packet is None or session is None:
            self.counts["dropped"] += 1
            return
        now = time.monotonic()
        if packet.kind is not PacketKind.DATA:
            self._due_at = 0.0
        fresh = packet.kind is not PacketKind.DATA and packet.sequence > session.heard
        session.heard = packet.sequence if fresh else session.heard
        match packet.kind:
            case PacketKind.HELLO:
                self._hello(session, one, address, packet)
            case PacketKind.DATA:
                self._data(session, packet, now)
            case PacketKind.PROBE:
                self._probed(session, packet, now, fresh=fresh)
            case _:
                self._answered(session, packet, now, fresh=fresh)

    def _hello(self, session: _Session, one: socket.socket, address: Address, packet: Packet) -> None:
        if not session.opener:  # asked: say the same back, and remember the way
            if packet.sequence <= session.greeting_heard:
                self.counts["dropped"] += 1
                return
            session.greeting_heard = packet.sequence
            if (one, address) not in session.paths:
                session.paths = [*session.paths, (one, address)][-2 * PATH_SOCKETS :]
            self._send_packet(session, PacketKind.HELLO, 0, packet.number, packet.body, path=(one, address))
        elif session.hello is not None:
            session.hello.set_result(None)
            session.hello = None

    def _data(self, session: _Session, packet: Packet, now: float) -> None:
        coming = session.coming.get(packet.transfer)
        if coming is None:
            self.counts["duplicate" if packet.transfer in session.finished else "dropped"] += 1
            return
        start = packet.number * PAYLOAD
        if len(packet.body) != min(PAYLOAD, len(coming.content) - start):
            self.counts["dropped"] += 1
            return
        if not coming.state.take(packet.sequence, packet.number, now):
            self.counts["duplicate"] += 1
            return
        coming.content[start : start + len(packet.body)] = packet.body
        coming.heard_at = now
        self.counts["received"] += 1
        self.link.arrived(now, 1)
        if coming.state.is_done():
            self._due_at = 0.0
            self._finish(session, packet.transfer, coming)

    def _finish(self, session: _Session, transfer: int, incoming: _IncomingTransfer) -> None:
        del session.coming[transfer]
        there = b"" if not incoming.state.missing else np.packbits(incoming.state.received, bitorder="little").tobytes()
        session.finished = {**dict(list(session.finished.items())[1 - FINISHED_KEPT :]), transfer: there}
        self._send_end(session, transfer)
        incoming.done.set_result(ReceivedPayload(incoming.content, incoming.state.received))

    def _send_end(self, session: _Session, transfer: int) -> None:
        there = session.finished[transfer]
        for start in range(0, max(1, len(there)), PAYLOAD):
            self._send_packet(session, PacketKind.STOP, transfer, 8 * start, there[start : start + PAYLOAD])

    def _probed(self, session: _Session, packet: Packet, now: float, *, fresh: bool) -> None:
        """Note that the sender asks what is there and what may be sent."""
        coming = session.coming.get(packet.transfer)
        if coming is None:
            if packet.transfer in session.finished:
                self._send_end(session, packet.transfer)
            return  # else its receiver may not have asked for it yet: the sender probes again
        coming.heard_at = now if fresh else coming.heard_at
        if len(packet.body) == 4:
            (asked,) = struct.unpack("!I", packet.body)
            coming.state.probed(asked, packet.number, now)

    def _answer(self, session: _Session, transfer: int, incoming: _IncomingTransfer, asked: int, now: float) -> None:
        share(self.link, self._incoming(), now, first=[incoming.state])
        for start in range(0, len(incoming.state.received), 8 * (PAYLOAD - 4)):
            part = incoming.state.received[start : start + 8 * (PAYLOAD - 4)]
            body = struct.pack("!I", asked) + bits_of(part.tolist(), 0)
            self._send_packet(session, PacketKind.MISSING, transfer, start, body)
        incoming.reported = incoming.state.limit
        self._send_packet(session, PacketKind.GRANT, transfer, incoming.reported)

    def _answered(self, session: _Session, packet: Packet, now: float, *, fresh: bool) -> None:
        out = session.out.get(packet.transfer)
        if out is None:
            return
        out.heard_at = now if fresh else out.heard_at
        if packet.kind is PacketKind.GRANT:
            out.state.granted(packet.number, now)
        elif packet.kind is PacketKind.MISSING and len(packet.body) >= 4:
            (asked,) = struct.unpack_from("!I", packet.body)
            there = np.unpackbits(np.frombuffer(packet.body, np.uint8, offset=4), bitorder="little").astype(bool)
            out.state.report_missing(asked, there.tolist(), packet.number, now)
        elif packet.kind is PacketKind.STOP and out.ended(packet.number, packet.body):
            del session.out[packet.transfer]
            out.done.set_result(out.there)

    def _incoming(self) -> list[ReceiveWindow]:
        return [coming.state for session in self._sessions.values() for coming in session.coming.values()]

    # --- what goes ----------------------------------------------------------------------------------------------

    def _grant_credits(self) -> None:
        """Grant what there is room for; give up on who is silent."""
        now = time.monotonic()
        if any(session.coming for session in self._sessions.values()):
            share(self.link, self._incoming(), now)
        for session in list(self._sessions.values()):
            for transfer, coming in list(session.coming.items()):
                if (asked := coming.state.answer(now)) is not None:
                    self._answer(session, transfer, coming, asked, now)
                if coming.state.limit > coming.reported and session.paths:
                    coming.reported = coming.state.limit
                    self._send_packet(session, PacketKind.GRANT, transfer, coming.reported)
                if now - coming.heard_at > coming.patience:
                    del session.coming[transfer]
                    coming.done.set_exception(PeerSilentError(f"nothing came for {coming.patience:.0f} s"))

    def _send_all(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.hello and now - session.greeted_at > GREET_SECONDS:
                self._greet(session)
            for transfer, out in list(session.out.items()):
                if now - out.heard_at > out.patience:
                    del session.out[transfer]
                    out.done.set_exception(PeerSilentError(f"no answer in {out.patience:.0f} s"))
                    continue
                self._send_some(session, transfer, out, now)
                if (asked := out.state.probe(now)) is not None:
                    body = struct.pack("!I", asked)
                    self._send_packet(session, PacketKind.PROBE, transfer, out.state.sequence, body)

    def _send_some(self, session: _Session, transfer: int, out: _OutgoingTransfer, now: float) -> None:
        for _ in range(BURST):
            found = out.state.next()
            if found is None:
                return
            piece, sequence = found
            body = bytes(out.content[piece * PAYLOAD : (piece + 1) * PAYLOAD])
            packet = Packet(PacketKind.DATA, session.number, transfer, sequence, piece, body)
            path = session.paths[sequence % len(session.paths)] if session.paths else None
            self._put(path, session.out_seal.close(packet), PROMPT if piece < out.prompt else BULK)
            self.counts["sent" if sequence <= out.state.pieces else "again"] += 1
            out.state.sent(now)

    def _greet(self, session: _Session) -> None:
        session.greeted_at = time.monotonic()
        for path in session.paths:
            self._send_packet(session, PacketKind.HELLO, 0, 0, bytes(PAYLOAD), path=path)

    def _send_packet(
        self,
        session: _Session,
        kind: PacketKind,
        transfer: int,
        number: int,
        body: bytes = b"",
        path: tuple[socket.socket, Address] | None = None,
    ) -> None:
        if session.control == MOST_NUMBER:  # a nonce serves once
            self._end(session.number)
            return
        session.control += 1
        packet = Packet(kind, session.number, transfer, session.control, number, body)
        path = path or (session.paths[session.control % len(session.paths)] if session.paths else None)
        self._put(path, session.out_seal.close(packet), PROMPT)

    def _put(self, path: tuple[socket.socket, Address] | None, datagram: bytes, service: int) -> None:
        if path is None:
            return
        one, address = path
        try:
            one.sendmsg([datagram], [(*TRAFFIC_CLASS_OPTIONS[one.family], struct.pack("i", service))], 0, address)
        except OSError as error:  # a full queue loses it as the network would
            self.counts["unsent"] += 1
            if error.errno == errno.EMSGSIZE:
                self.counts["too large"] += 1


def _bound(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_DGRAM)
    try:
        one.bind((host, 0))
    except OSError:
        one.close()
        raise
    one.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        one.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if family == socket.AF_INET:  # no fragments
        one.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
    else:
        one.setsockopt(socket.IPPROTO_IPV6, 62, 1)  # IPV6_DONTFRAG
    return one


def keys_of(session: int, secret: Sequence[bytes]) -> SessionKeys:
    """A session's keys as they come over the cluster's connections.

    Raises:
        ValueError: they have another length.
    """
    out, back = secret
    if len(out) != KEY_BYTES or len(back) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes")
    return SessionKeys(session, out, back)
