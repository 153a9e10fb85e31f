"""One datagram: a header in the clear, which the seal covers, and an encrypted body.

A key serves one session and one direction and travels over the cluster's own connections. A nonce is a packet's place
in its transfer, which is never used twice. A datagram that the key did not seal (forged, truncated, a stranger's) is
dropped.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VERSION = 1
# Bytes: ten rows of a codec. With headers and seal 1,344 over IPv4: within Ethernet's 1,500 and the tunnels over that.
# Where a path carries less, the greeting, which is as long, does not get through, and payloads travel over TCP.
PAYLOAD = 1280
SESSION_KEY_BYTES = 16
_HEADER = struct.Struct("!BBxxIIII")  # version, kind, session, transfer, sequence, number
_NONCE = struct.Struct("!IB3xI")
HEADER_BYTES = _HEADER.size
MAX_DATAGRAM_BYTES = HEADER_BYTES + PAYLOAD + 16


class PacketKind(enum.IntEnum):
    """A packet's kind; receivers send those above PROBE, senders DATA and PROBE, both HELLO."""

    HELLO = 0
    """Asks, or answers, whether datagrams of this size get through."""
    DATA = 1
    """Piece `number` of a transfer."""
    PROBE = 2
    """All that was granted is sent, up to the sequence in `number`: what is missing? Its body is the probe's number."""
    GRANT = 3
    """Data up to sequence `number` may be sent."""
    MISSING = 4
    """The answer to a probe: the probe's number, then a bit a piece, 1 if it arrived, from piece `number` on."""
    STOP = 5
    """The final report: the receiver has enough; a bit a piece from piece `number` on, or nothing if all arrived."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet; `kind` says what `number` and `body` mean."""

    kind: PacketKind
    session: int
    transfer: int
    sequence: int
    number: int
    body: bytes = b""


@dataclass(frozen=True)
class SessionKeys:
    """A session's number, and the keys of what this side sends and of what it receives, `SESSION_KEY_BYTES` each."""

    session: int
    send: bytes
    receive: bytes

    def __post_init__(self) -> None:
        if len(self.send) != SESSION_KEY_BYTES or len(self.receive) != SESSION_KEY_BYTES:
            raise ValueError(f"a key has {SESSION_KEY_BYTES} bytes")

    def swapped(self) -> SessionKeys:
        """Return the other side's."""
        return SessionKeys(self.session, self.receive, self.send)


class Seal:
    """Encrypts and authenticates the packets of one session in one direction.

    Args:
        key: `SESSION_KEY_BYTES` bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def close(self, packet: Packet) -> bytes:
        """Return the packet as a datagram."""
        header = _HEADER.pack(VERSION, packet.kind, packet.session, packet.transfer, packet.sequence, packet.number)
        return header + self._cipher.encrypt(_nonce(packet), packet.body, header)

    def open(self, datagram: bytes | memoryview) -> Packet | None:
        """Return a datagram's packet; None if it was not sealed with this key, or is not whole."""
        packet = peek(datagram)
        if packet is None:
            return None
        try:
            body = self._cipher.decrypt(_nonce(packet), bytes(datagram[HEADER_BYTES:]), bytes(datagram[:HEADER_BYTES]))
        except InvalidTag:
            return None
        return Packet(packet.kind, packet.session, packet.transfer, packet.sequence, packet.number, body)


def peek(datagram: bytes | memoryview) -> Packet | None:
    """Return what the header claims, which says whose key to open it with; None if there is no valid header."""
    if len(datagram) < HEADER_BYTES:
        return None
    version, kind, session, transfer, sequence, number = _HEADER.unpack_from(datagram)
    if version != VERSION or kind not in PacketKind._value2member_map_:
        return None
    return Packet(PacketKind(kind), session, transfer, sequence, number)


def bits_of(arrived: Sequence[bool], start: int) -> bytes:
    """Return pieces from `start` on as the bits of MISSING, as many as fit."""
    part = arrived[start : start + 8 * PAYLOAD]
    bits = "".join("1" if is_here else "0" for is_here in reversed(part))
    return int(bits or "0", 2).to_bytes(-(-len(part) // 8), "little")


def _nonce(packet: Packet) -> bytes:
    return _NONCE.pack(packet.transfer, packet.kind, packet.sequence)
