"""One datagram: a header in the clear, which the seal covers, and a sealed body.

Keys are of one session and one direction and come over the cluster's own connections; a nonce is a packet's place in
its transfer, which is never used twice. What was not sealed with the key is dropped: forged, truncated, of a stranger.
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
# Where a path carries less, the greeting, which is as long, does not pass, and all goes over TCP.
PAYLOAD = 1280
KEY_BYTES = 16
_HEADER = struct.Struct("!BBxxIIII")  # version, kind, session, transfer, sequence, number
_NONCE = struct.Struct("!IB3xI")
HEADER_BYTES = _HEADER.size
MAX_DATAGRAM_BYTES = HEADER_BYTES + PAYLOAD + 16


class PacketKind(enum.IntEnum):
    """What a packet says; those above PROBE go the other way."""

    HELLO = 0
    """Either end asks or answers whether datagrams of this size pass."""
    DATA = 1
    """Number `number` of a transfer's pieces."""
    PROBE = 2
    """All that may be sent is sent, up to the sequence in `number`: what is missing? Its body is the probe's number."""
    GRANT = 3
    """Data up to sequence `number` may be sent."""
    MISSING = 4
    """An answer: the probe's number, then a bit a piece, 1 if it is there, from piece number `number` on."""
    STOP = 5
    """Enough is there: a bit a piece from piece number `number` on, or nothing if all are."""


@dataclass(frozen=True, slots=True)
class Packet:
    """See `Kind`."""

    kind: PacketKind
    session: int
    transfer: int
    sequence: int
    number: int
    body: bytes = b""


class Seal:
    """Seals what goes one way in one session.

    Args:
        key: `KEY_BYTES` of it.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def close(self, packet: Packet) -> bytes:
        """The datagram."""
        header = _HEADER.pack(VERSION, packet.kind, packet.session, packet.transfer, packet.sequence, packet.number)
        return header + self._cipher.encrypt(_nonce(packet), packet.body, header)

    def open(self, datagram: bytes | memoryview) -> Packet | None:
        """What a datagram says; None if it was not sealed with this key, or is not whole."""
        packet = peek(datagram)
        if packet is None:
            return None
        try:
            body = self._cipher.decrypt(_nonce(packet), bytes(datagram[HEADER_BYTES:]), bytes(datagram[:HEADER_BYTES]))
        except InvalidTag:
            return None
        return Packet(packet.kind, packet.session, packet.transfer, packet.sequence, packet.number, body)


def peek(datagram: bytes | memoryview) -> Packet | None:
    """What the header claims, to look up whose key it needs; None if it is none."""
    if len(datagram) < HEADER_BYTES:
        return None
    version, kind, session, transfer, sequence, number = _HEADER.unpack_from(datagram)
    if version != VERSION or kind not in PacketKind._value2member_map_:
        return None
    return Packet(PacketKind(kind), session, transfer, sequence, number)


def bits_of(arrived: Sequence[bool], start: int) -> bytes:
    """Pieces from `start` on as the body of MISSING, as many as fit."""
    part = arrived[start : start + 8 * PAYLOAD]
    return int("".join("1" if one else "0" for one in reversed(part)) or "0", 2).to_bytes(-(-len(part) // 8), "little")


def _nonce(packet: Packet) -> bytes:
    return _NONCE.pack(packet.transfer, packet.kind, packet.sequence)
