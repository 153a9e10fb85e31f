"""Measure the link between two nodes over plain TCP sockets, with as little Python as possible.

A call is one line of JSON, `{"token": ..., "do": "echo", "sink", "source" or "cpu", "seconds": ...}`, and then the
bytes of the measurement. The receiver of a stream measures it, so that bytes in send buffers are not counted.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from idletrain.fabric.measuring.presets import WARM_SECONDS

CHUNK = 1 << 18
PING_BYTES = 8
READY = b"."  # sent by the server once it has read the call: earlier bytes would end up in that read's buffer
SLICE_SECONDS = 0.02  # of a stream; the rate in one slice is one sample
SOCKET_CONNECT_SECONDS = 5.0
SOCKET_SILENCE_SECONDS = 20.0  # without a byte, after which a connection is given up
ByteMark = tuple[float, int]  # a monotonic time, and the bytes received until then


@dataclass(frozen=True)
class Stream:
    """A measured stream: its rates in bytes/s, one for each slice of time or transfer, and its bytes."""

    rates: tuple[float, ...]
    moved_bytes: int


@dataclass(frozen=True)
class SocketAddress:
    """Addresses of a node's probe server.

    Attributes:
        host: IP address.
        port: Port of the plain sockets.
        servers: Addresses of its Dask servers and its store, by purpose (`dask`, `dask tls`, `store`).
    """

    host: str
    port: int
    servers: dict[str, str]


class Listener(socketserver.ThreadingTCPServer):
    """Answer calls until closed.

    Args:
        host: IP address to listen on, on a free port.
        token: Secret that callers must send.

    Attributes:
        last_call_at: Monotonic time of the last call with the right token.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, token: str) -> None:
        self.token, self.last_call_at = token, time.monotonic()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Listener)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(SOCKET_SILENCE_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            token, what, seconds = _call_in(self.rfile.readline(1000))
            if token != self.server.token:
                return
            self.server.last_call_at = time.monotonic()
            match what:
                case "source":
                    _send(self.connection, seconds)
                case "cpu":
                    self.wfile.write(json.dumps(time.process_time()).encode())
                case "echo":
                    self.connection.sendall(READY)
                    _echo(self.connection)
                case _:
                    self.connection.sendall(READY)
                    byte_marks, total = _receive(self.connection)
                    self.wfile.write(json.dumps({"marks": byte_marks, "bytes": total}).encode())


def _call_in(line: bytes) -> tuple[str, str, float]:
    """Return the token of a call, what to do, and the seconds for it.

    Raises:
        ValueError: it is no call.
    """
    try:
        call = json.loads(line)
        return str(call["token"]), str(call["do"]), float(call.get("seconds", 0.0))
    except (TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no call: {error}") from None


def round_trips(host: str, port: int, token: str, count: int) -> tuple[float, ...]:
    """Return `count` round-trip times of eight bytes, in seconds.

    Raises:
        OSError: The node cannot be reached.
    """
    seconds = []
    with _called(host, port, {"token": token, "do": "echo"}) as line:
        _read_exactly(line, 1)
        for _ in range(count + 1):  # the first warms the connection up and is dropped
            started = time.perf_counter()
            line.sendall(b"." * PING_BYTES)
            _read_exactly(line, PING_BYTES)
            seconds.append(time.perf_counter() - started)
    return tuple(seconds[1:])


def stream(host: str, port: int, token: str, seconds: float) -> Stream:
    """Send for `seconds`; return the stream as the receiver measured it.

    Raises:
        OSError: The node cannot be reached.
    """
    with _called(host, port, {"token": token, "do": "sink"}) as line:
        _read_exactly(line, 1)
        _send(line, seconds)
        line.shutdown(socket.SHUT_WR)
        answer = json.loads(_read_all(line))
    return Stream(slices(answer["marks"]), answer["bytes"])


def both_ways(host: str, port: int, token: str, seconds: float) -> tuple[Stream, Stream]:
    """Send and receive at once for `seconds`; return the outgoing and the incoming stream.

    Raises:
        OSError: The node cannot be reached.
    """

    def fetch() -> Stream:
        with _called(host, port, {"token": token, "do": "source", "seconds": seconds}) as line:
            byte_marks, total = _receive(line)
        return Stream(slices(byte_marks), total)

    with ThreadPoolExecutor(1) as pool:
        incoming = pool.submit(fetch)
        outgoing = stream(host, port, token, seconds)
        return outgoing, incoming.result()


def flows(host: str, port: int, token: str, seconds: float, count: int) -> list[Stream]:
    """Send over `count` connections at once for `seconds`; return a stream for each.

    Raises:
        OSError: The node cannot be reached.
    """
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: stream(host, port, token, seconds), range(count)))


def cpu_seconds(host: str, port: int, token: str) -> float:
    """Return the CPU seconds that the other node's process has used so far.

    Raises:
        OSError: The node cannot be reached.
    """
    with _called(host, port, {"token": token, "do": "cpu"}) as line:
        return float(json.loads(_read_all(line)))


def slices(byte_marks: Sequence[ByteMark]) -> tuple[float, ...]:
    """Return bytes/s in slices of time after the warm-up; one mean rate of a stream that ended during it."""
    if len(byte_marks) < 2:
        return ()
    times, totals = zip(*byte_marks, strict=True)
    start = times[0] + WARM_SECONDS
    count = math.floor((times[-1] - start) / SLICE_SECONDS + 1e-6)
    edges = start + SLICE_SECONDS * np.arange(count + 1) if count > 0 else np.array([times[0], times[-1]])
    rates = np.diff(np.interp(edges, times, totals)) / np.diff(edges)  # equal slices: a stall counts by its length
    return tuple(float(rate) for rate in rates)


@contextlib.contextmanager
def _called(host: str, port: int, call: dict[str, Any]) -> Any:
    with socket.create_connection((host, port), SOCKET_CONNECT_SECONDS) as line:
        line.settimeout(SOCKET_SILENCE_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(json.dumps(call).encode() + b"\n")
        yield line


def _echo(line: socket.socket) -> None:
    while content := line.recv(PING_BYTES):
        line.sendall(content)


def _send(line: socket.socket, seconds: float) -> None:
    chunk, until = bytes(CHUNK), time.monotonic() + seconds
    while time.monotonic() < until:
        line.sendall(chunk)


def _receive(line: socket.socket) -> tuple[list[ByteMark], int]:
    """Receive to the end of the stream; return byte marks, the first at the first bytes, and the number of bytes."""
    space = memoryview(bytearray(CHUNK))
    byte_marks: list[ByteMark] = []
    total, now, due = 0, 0.0, 0.0
    while count := line.recv_into(space):
        total += count
        now = time.monotonic()
        if now >= due:
            byte_marks.append((now, total))
            due = now + SLICE_SECONDS
    return [*byte_marks, (now, total)], total


def _read_exactly(line: socket.socket, count: int) -> None:
    while count:
        content = line.recv(count)
        if not content:
            raise ConnectionResetError("the other end hung up")
        count -= len(content)


def _read_all(line: socket.socket) -> bytes:
    content = bytearray()
    while part := line.recv(CHUNK):
        content += part
    return bytes(content)
