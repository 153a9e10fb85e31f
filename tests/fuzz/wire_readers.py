"""Readers of what other processes of a run, a browser or a stranger send."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from reader import Reader, fields_in
from tornado.httputil import HTTPHeaders, HTTPInputError, HTTPServerRequest, RequestStartLine
from tornado.web import Application, HTTPError

from idletrain.cluster import dashboard_guard
from idletrain.errors import RefusedError
from idletrain.exchange import messages
from idletrain.exchange.codec import Codec
from idletrain.exchange.datagram import packet
from idletrain.exchange.datagram.packet import PAYLOAD, Packet, PacketKind, Seal, SessionKeys
from idletrain.exchange.datagram.protocol import DatagramProtocol
from idletrain.exchange.datagram.transfer import IncomingTransfer, OutgoingTransfer, new_future
from idletrain.exchange.datagram.window import ReceiveWindow, SendWindow
from idletrain.fabric.measuring import sockets
from idletrain.observe import page

KEYS = SessionKeys(7, bytes(16), bytes(range(16)))
PIECES = 3
PACKET = struct.Struct("!BBHIH")  # kind, transfer, sequence, number, length of the body


def datagram(content: bytes) -> object:
    return packet.peek(content), Seal(bytes(16)).open(content)


def session(content: bytes) -> object:
    """Datagrams that the other side's key sealed, whatever they say, at both sides of a session."""
    for opens in (False, True):
        side = DatagramProtocol(Counter())
        side.open(KEYS, [(0, ("host", 1))] if opens else [], new_future(), 0.0)
        side.expect(7, 1, IncomingTransfer(bytearray(PIECES * PAYLOAD - 1), ReceiveWindow(PIECES), 0.0, 60))
        side.send(7, 2, OutgoingTransfer(memoryview(bytes(PIECES * PAYLOAD)), SendWindow(PIECES), 0, 0.0, 60))
        seal, rest, now = Seal(KEYS.receive), content, 0.0
        while len(rest) >= PACKET.size:
            kind, transfer, sequence, number, length = PACKET.unpack_from(rest)
            body, rest = rest[PACKET.size : PACKET.size + length], rest[PACKET.size + length :]
            sent = Packet(PacketKind(kind % len(PacketKind)), 7, transfer, sequence, number, body)
            side.receive((0, ("host", 1)), seal.close(sent), now)
            now += 0.01
            side.grant_credits(now)
            side.send_due(now)
            side.schedule(now)
    return None


def coded(content: bytes) -> object:
    """Frames of every kind and length, decoded where the length fits and refused where not."""
    for kind in ("bf16", "int8", "int4"):
        codec = Codec(kind, ((3, 600),), 700)
        with contextlib.suppress(ValueError):
            codec.decode(torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8))
        whole = bytearray(content[: codec.nbytes].ljust(codec.nbytes, b"\xff"))
        flat = codec.decode(torch.frombuffer(whole, dtype=torch.uint8))
        codec.gains(torch.frombuffer(whole, dtype=torch.uint8))
        assert flat.shape == (700,)
    return None


def push(content: bytes) -> object:
    """A push: its header in a line of JSON, then its payload."""
    line, _, payload = content.partition(b"\n")
    header = messages.push_header(fields_in(line))
    refusal = messages.inspect(header, [payload], 8) or messages.inspect_values([payload])
    if refusal:
        raise RefusedError(refusal)
    return header


def visit(content: bytes) -> object:
    """A request to the dashboard: method and path, headers, and a body that may name a worker."""
    head, _, body = content.decode("latin-1").partition("\n\n")
    line, _, headers = head.partition("\n")
    method, _, path = line.partition(" ")
    start, connection = RequestStartLine(method, path, "HTTP/1.1"), SimpleNamespace()
    request = HTTPServerRequest(headers=HTTPHeaders.parse(headers), start_line=start, connection=connection)
    dashboard_guard._Guard(Application(), "token").find_handler(request)
    refusal = page.request_refusal("kill", {**request.headers, "X-Idletrain": "kill"}, {"allow_control": True})
    if refusal:
        raise RefusedError(refusal)
    return page.named_worker(body.encode("latin-1"))


class Line(io.BytesIO):
    """A connection of the fabric's listener: what it gets comes from these bytes."""

    def ignore(self, *_: Any) -> None:
        """Do nothing."""

    setsockopt = settimeout = sendall = ignore

    def recv(self, count: int) -> bytes:
        return self.read(count)

    def recv_into(self, space: memoryview) -> int:
        return self.readinto(space)


def probe_call(content: bytes) -> object:
    """A call of the fabric's listener, by somebody who has its token or not."""
    handler = sockets._Handler.__new__(sockets._Handler)
    line = Line(content)
    server = sockets.Listener.__new__(sockets.Listener)
    server.token, server.last_call_at = "t", 0.0
    vars(handler).update(connection=line, rfile=line, wfile=io.BytesIO(), server=server)
    handler.handle()
    return None


def sent(*packets: tuple[int, int, int, int, bytes]) -> bytes:
    return b"".join(PACKET.pack(*head, len(body)) + body for *head, body in packets)


LEASE = {"run": "r", "epoch": 1, "round": 0, "subnet": 0, "attempt": 1}
HEADER = {"lease": LEASE, "steps": 5, "train_seconds": 1.0, "checksum": messages.checksum([bytes(8)])}

READERS = {
    "datagram": Reader(
        datagram,
        runs=3_500_000,
        sound=(Seal(bytes(16)).close(Packet(PacketKind.DATA, 1, 2, 3, 4, b"x")),),
        modules=("exchange.datagram.packet",),
    ),
    "session": Reader(
        session,
        runs=11_000,
        sound=(
            sent((0, 0, 1, 0, bytes(PAYLOAD)), (1, 1, 1, 0, bytes(PAYLOAD)), (2, 1, 2, 3, bytes(4))),
            sent((3, 2, 1, 3, b""), (4, 2, 2, 0, bytes([0, 0, 0, 1, 5])), (5, 2, 3, 0, b"\7"), (5, 2, 4, 0, b"")),
        ),
        modules=("exchange.datagram.protocol", "exchange.datagram.transfer"),
    ),
    "codec": Reader(coded, runs=38_000, sound=(bytes(4000), b"\xff" * 4000, b""), modules=("exchange.codec",)),
    "push": Reader(
        push,
        runs=3_000_000,
        sound=(json.dumps(HEADER).encode() + b"\n" + bytes(8),),
        modules=("exchange.messages",),
        odd=(b'{"lease": {}, "steps": "x"}\n',),
    ),
    "visit": Reader(
        visit,
        runs=1_200_000,
        sound=(b'POST /idletrain/kill?token=token\nHost: localhost:1\nCookie: idletrain-1=token\n\n{"worker": "w"}',),
        modules=("cluster.dashboard_guard", "observe.page"),
        odd=(b"GET / \nHost: [\n\n", b"GET / \nHost: localhost:99999\nOrigin: http://[\n\n"),
        errors=(HTTPInputError, HTTPError),
    ),
    "probe call": Reader(
        probe_call,
        runs=2_500_000,
        sound=(b'{"token": "t", "do": "sink"}\n.....', b'{"token": "t", "do": "echo"}\n........'),
        modules=("fabric.measuring.sockets",),
        odd=(b"[]\n", b"[" * 1000, b'{"token": "t"}\n', b'{"token": "t", "do": "source", "seconds": "x"}\n'),
    ),
}
