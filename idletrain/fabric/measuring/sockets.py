"""Plain TCP sockets between two nodes: what the link itself gives, with as little Python as possible.

A call is one line of JSON, `{"token": ..., "do": "echo", "sink", "source" or "cpu", "seconds": ...}`, and what follows.
Who receives a stream measures it, so that what lies in buffers is not counted.
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
READY = b"."  # what came before it would be in the buffer that the call was read from
SLICE_SECONDS = 0.02  # of a stream, in which its rate is one sample
SOCKET_CONNECT_SECONDS = 5.0
SOCKET_SILENCE_SECONDS = 20.0  # of a stream: what is that slow is no link
ByteMark = tuple[float, int]  # when, and how many bytes had come by then


@dataclass(frozen=True)
class Stream:
    """What came of a stream: a rate for each slice of time or transfer, and bytes."""

    rates: tuple[float, ...]
    moved_bytes: int


@dataclass(frozen=True)
class SocketAddress:
    """Where a node's listening post is reached.

    Attributes:
        host: Its IP address.
        port: Of the plain sockets.
        addresses: Of its Dask servers and its store, by what they are for.
    """

    host: str
    port: int
    addresses: dict[str, str]


class Listener(socketserver.ThreadingTCPServer):
    """Answers calls until it is shut down.

    Args:
        host: Where to listen, on a free port.
        token: What callers must know.

    Attributes:
        heard: When somebody called who knew it.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, token: str) -> None:
        self.token, self.heard = token, time.monotonic()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Answer no more."""
        self.shutdown()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Listener)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(SOCKET_SILENCE_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            call = json.loads(self.rfile.readline(1000))
            if call.get("token") != self.server.token:
                return
            self.server.heard = time.monotonic()
            match call["do"]:
                case "source":
                    _send(self.connection, float(call["seconds"]))
                case "cpu":
                    self.wfile.write(json.dumps(time.process_time()).encode())
                case "echo":
                    self.connection.sendall(READY)
                    _echo(self.connection)
                case _:
                    self.connection.sendall(READY)
                    marks, total = _receive(self.connection)
                    self.wfile.write(json.dumps({"marks": marks, "bytes": total}).encode())


def round_trips(host: str, port: int, token: str, count: int) -> tuple[float, ...]:
    """Seconds that eight bytes take there and back.

    Raises:
        OSError: there is no way to the post.
    """
    seconds = []
    with _called(host, port, {"token": token, "do": "echo"}) as line:
        _read_exactly(line, 1)
        for _ in range(count + 1):  # the first finds the way
            started = time.perf_counter()
            line.sendall(b"." * PING_BYTES)
            _read_exactly(line, PING_BYTES)
            seconds.append(time.perf_counter() - started)
    return tuple(seconds[1:])


def stream(host: str, port: int, token: str, seconds: float) -> Stream:
    """Send for so long.

    Raises:
        OSError: there is no way to the post.
    """
    with _called(host, port, {"token": token, "do": "sink"}) as line:
        _read_exactly(line, 1)
        _send(line, seconds)
        line.shutdown(socket.SHUT_WR)
        answer = json.loads(_read_all(line))
    return Stream(slices(answer["marks"]), answer["bytes"])


def both_ways(host: str, port: int, token: str, seconds: float) -> tuple[Stream, Stream]:
    """Send and receive at once, for so long; what went there and what came.

    Raises:
        OSError: there is no way to the post.
    """

    def fetch() -> Stream:
        with _called(host, port, {"token": token, "do": "source", "seconds": seconds}) as line:
            marks, total = _receive(line)
        return Stream(slices(marks), total)

    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(fetch)
        gone = stream(host, port, token, seconds)
        return gone, coming.result()


def flows(host: str, port: int, token: str, seconds: float, count: int) -> list[Stream]:
    """Send over so many connections at once.

    Raises:
        OSError: there is no way to the post.
    """
    with ThreadPoolExecutor(count) as beside:
        return list(beside.map(lambda _: stream(host, port, token, seconds), range(count)))


def cpu_seconds(host: str, port: int, token: str) -> float:
    """What the post's process has used of its CPUs so far.

    Raises:
        OSError: there is no way to the post.
    """
    with _called(host, port, {"token": token, "do": "cpu"}) as line:
        return float(json.loads(_read_all(line)))


def slices(byte_marks: Sequence[ByteMark], warm_seconds: float = WARM_SECONDS) -> tuple[float, ...]:
    """Rates in slices of time, without those of the beginning; all of a stream that was over before as one."""
    if len(byte_marks) < 2:
        return ()
    times, totals = zip(*byte_marks, strict=True)
    start = times[0] + warm_seconds
    count = math.floor((times[-1] - start) / SLICE_SECONDS + 1e-6)
    edges = start + SLICE_SECONDS * np.arange(count + 1) if count > 0 else np.array([times[0], times[-1]])
    rates = np.diff(np.interp(edges, times, totals)) / np.diff(edges)  # of equal length: a stall counts for what it is
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
    """Take all that comes; marks, the first when the first byte was there, and how many bytes there were."""
    space = memoryview(bytearray(CHUNK))
    marks: list[ByteMark] = []
    total, now, due = 0, 0.0, 0.0
    while count := line.recv_into(space):
        total += count
        now = time.monotonic()
        if now >= due:
            marks.append((now, total))
            due = now + SLICE_SECONDS
    return [*marks, (now, total)], total


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
