"""The sockets of one side, on a thread of their own, which run `DatagramProtocol` with the real clock."""

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
from collections.abc import Callable
from concurrent.futures import Future

from idletrain.exchange.datagram.packet import MAX_DATAGRAM_BYTES, PAYLOAD, SessionKeys
from idletrain.exchange.datagram.packet_sender import BURST, OutgoingDatagram
from idletrain.exchange.datagram.protocol import GRANT_INTERVAL_SECONDS, DatagramProtocol
from idletrain.exchange.datagram.transfer import (
    Address,
    IncomingTransfer,
    OutgoingTransfer,
    ReceivedPayload,
    new_future,
)
from idletrain.exchange.datagram.window import ReceivedMask, ReceiveWindow, SendWindow

logger = logging.getLogger(__name__)
BUFFER_BYTES = 1 << 22  # requested from the kernel, which grants what it allows
SWITCH_SECONDS = 0.0005  # for which another thread may keep the interpreter: by default 5 ms, twice a shallow buffer
TRAFFIC_CLASS_OPTIONS = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}


class Endpoint:
    """Any number of transfers in both directions, over any number of sessions; safe to call from any thread.

    Args:
        host: The address to bind to.
        sockets: How many sockets, each a path of its own.

    Attributes:
        counts: What happened, by name: `sent`, `again`, `received`, `duplicate`, `dropped`, `unsent`, `too large`.
    """

    def __init__(self, host: str, sockets: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        with contextlib.ExitStack() as on_failure:
            self._sockets = [on_failure.enter_context(_bound(host)) for _ in range(sockets)]
            on_failure.pop_all()
        _SwitchInterval.shorten()
        self._protocol = DatagramProtocol(self.counts)
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for k, sock in enumerate(self._sockets):
            self._selector.register(sock, selectors.EVENT_READ, k)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._closing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="idletrain-datagrams", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Return whether the thread has ended."""
        return self._closed

    @property
    def address(self) -> Address:
        """Host and port of the first socket."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def open(self, keys: SessionKeys, to: Address | None = None) -> Future[None]:
        """Open a session; done when a datagram of full size has got through and its answer back.

        Args:
            keys: This side's.
            to: Where the other side listens. The side that listens gives None, and learns the peer's address from the
                first datagram.
        """
        opening: Future[None] = new_future()
        paths = [] if to is None else [(k, to) for k in range(len(self._sockets))]
        self._request(lambda: self._protocol.open(keys, paths, opening, time.monotonic()))
        return opening

    def send(
        self, session: int, transfer: int, content: memoryview, *, prompt: int, patience: float
    ) -> Future[ReceivedMask]:
        """Send a payload; done, with the pieces that arrived, when the receiver has enough.

        Args:
            session: Number of an open session.
            transfer: A number that was never used before in this session and direction.
            content: The payload's bytes.
            prompt: How many of them, from the first on, go in the better traffic class.
            patience: Seconds without an answer after which the transfer fails with PeerSilentError.
        """
        state = SendWindow(max(1, -(-len(content) // PAYLOAD)))
        outgoing = OutgoingTransfer(content, state, -(-prompt // PAYLOAD), time.monotonic(), patience)
        self._request(lambda: self._protocol.send(session, transfer, outgoing))
        return outgoing.done

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
        """Receive a payload of `size` bytes; done when it is complete enough, by the rules of `ReceiveWindow`.

        Args:
            session: Number of an open session.
            transfer: The sender's number of this transfer.
            size: Bytes.
            patience: Seconds of silence after which the transfer fails with PeerSilentError.
            required_pieces: Pieces, from the first on, that must arrive; all if None.
            min_pieces: How many pieces must arrive; all if None.
            is_acceptable: Decides, by the bytes and which pieces arrived, once those two rules are met.
        """
        content, pieces = bytearray(size), max(1, -(-size // PAYLOAD))
        check = functools.partial(is_acceptable, memoryview(content)) if is_acceptable else None
        state = ReceiveWindow(pieces, required_pieces, min_pieces, check)
        incoming = IncomingTransfer(content, state, time.monotonic(), patience)
        self._request(lambda: self._protocol.expect(session, transfer, incoming))
        return incoming.done

    def stop(self, session: int, transfer: int) -> None:
        """Complete an incoming transfer with the pieces that have arrived."""
        self._request(lambda: self._protocol.stop(session, transfer))

    def drop(self, session: int, transfer: int) -> None:
        """Abandon an outgoing transfer; one that is over stays as it is."""
        self._request(lambda: self._protocol.drop(session, transfer))

    def end(self, session: int) -> None:
        """Close a session; its transfers fail."""
        self._request(lambda: self._protocol.end(session))

    def progress(self, session: int, transfer: int) -> Future[ReceivedPayload | None]:
        """Return what has arrived of an incoming transfer, None if it is not under way; its bytes still change."""
        result: Future[ReceivedPayload | None] = new_future()
        self._request(lambda: result.set_result(self._protocol.progress(session, transfer)))
        return result

    def close(self) -> None:
        """Close the sockets; transfers under way fail."""
        self._closing = True
        self._request(lambda: None)
        self._thread.join()
        _SwitchInterval.restore()
        logger.info("datagrams: %s", dict(self.counts))

    # --- the thread ---------------------------------------------------------------------------------------------

    def _request(self, action: Callable[[], None]) -> None:
        """Have the thread do something; once it has ended, do it here: there are no sessions, so it fails."""
        self._requests.append(action)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b".")
        if self._closed:
            self._run_requests()

    def _run_requests(self) -> None:
        while True:
            try:
                action = self._requests.popleft()
            except IndexError:  # after the thread's end, several threads may be here at once
                return
            self._protocol.due_at = 0.0
            try:
                action()
            finally:
                self._flush()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._run_once()
                except Exception:  # a fault of one transfer must not stop the others
                    logger.exception("a datagram could not be dealt with")
                    time.sleep(GRANT_INTERVAL_SECONDS)
        finally:
            for number in list(self._protocol.sessions):
                self._protocol.end(number)
            self._closed = True
            self._run_requests()
            for sock in (*self._sockets, self._wake_in, self._wake_out):
                sock.close()
            self._selector.close()

    def _run_once(self) -> None:
        """Wait until something arrives or is due, and pass it on."""
        for key, _ in self._selector.select(max(0.0, self._protocol.due_at - time.monotonic())):
            if key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
            else:
                self._read(key.data)
        self._run_requests()
        if time.monotonic() >= self._protocol.due_at:
            for poll in (self._protocol.grant_credits, self._protocol.send_due):
                try:
                    poll(time.monotonic())
                finally:
                    self._flush()
            self._protocol.schedule(time.monotonic())

    def _read(self, index: int) -> None:
        for _ in range(BURST):
            try:
                datagram, address = self._sockets[index].recvfrom(MAX_DATAGRAM_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:  # an earlier datagram could not be delivered
                continue
            try:
                self._protocol.receive((index, address[:2]), datagram, time.monotonic())
            finally:
                self._flush()

    def _flush(self) -> None:
        while self._protocol.outbox:
            self._put(self._protocol.outbox.popleft())

    def _put(self, datagram: OutgoingDatagram) -> None:
        (index, address), content, traffic_class = datagram
        sock = self._sockets[index]
        option = (*TRAFFIC_CLASS_OPTIONS[sock.family], struct.pack("i", traffic_class))
        try:
            sock.sendmsg([content], [option], 0, address)
        except OSError as error:  # a full queue loses it as the network would
            self.counts["unsent"] += 1
            if error.errno == errno.EMSGSIZE:
                self.counts["too large"] += 1


class _SwitchInterval:
    """Shortens the interpreter's switch interval while any endpoint is open."""

    _lock, _open, _before = threading.Lock(), 0, 0.0

    @classmethod
    def shorten(cls) -> None:
        with cls._lock:
            cls._before = cls._before if cls._open else sys.getswitchinterval()
            cls._open += 1
            sys.setswitchinterval(min(cls._before, SWITCH_SECONDS))

    @classmethod
    def restore(cls) -> None:
        with cls._lock:
            cls._open -= 1
            if not cls._open:
                sys.setswitchinterval(cls._before)


def _bound(host: str) -> socket.socket:
    """Return a non-blocking UDP socket on a free port, whose datagrams are never fragmented."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.bind((host, 0))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, 62, 1)  # IPV6_DONTFRAG
    return sock
