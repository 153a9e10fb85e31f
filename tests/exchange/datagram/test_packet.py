"""Datagrams: what is sealed is read, and nothing else is."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.datagram.packet import (
    MAX_DATAGRAM_BYTES,
    PAYLOAD,
    SESSION_KEY_BYTES,
    Packet,
    PacketKind,
    Seal,
    bits_of,
    peek,
)

KEY = bytes(range(SESSION_KEY_BYTES))
UINT32 = st.integers(0, 2**32 - 1)
PACKETS = st.builds(Packet, st.sampled_from(PacketKind), UINT32, UINT32, UINT32, UINT32, st.binary(max_size=PAYLOAD))


@settings(deadline=None)
@given(PACKETS)
def test_what_is_sealed_is_read_with_the_same_key_alone(packet: Packet) -> None:
    datagram = Seal(KEY).close(packet)
    assert len(datagram) <= MAX_DATAGRAM_BYTES
    assert Seal(KEY).open(datagram) == packet
    assert Seal(os.urandom(SESSION_KEY_BYTES)).open(datagram) is None
    claimed = peek(datagram)
    assert claimed is not None
    assert (claimed.session, claimed.transfer) == (packet.session, packet.transfer)


@settings(deadline=None)
@given(PACKETS, st.data())
def test_a_changed_or_cut_datagram_is_none(packet: Packet, data: st.DataObject) -> None:
    datagram = bytearray(Seal(KEY).close(packet))
    place = data.draw(st.integers(0, len(datagram) - 1))
    if place in (2, 3):  # says nothing, but is sealed, too
        place = 0
    cut = datagram[:place]
    assert Seal(KEY).open(bytes(cut)) is None
    datagram[place] ^= data.draw(st.integers(1, 255))
    assert Seal(KEY).open(bytes(datagram)) is None


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=MAX_DATAGRAM_BYTES + 100))
def test_any_bytes_are_refused(content: bytes) -> None:
    assert Seal(KEY).open(content) is None


@pytest.mark.parametrize("count", [0, 1, 8, 9, 1000])
def test_bits_say_what_is_there_the_first_piece_in_the_lowest_bit(count: int) -> None:
    there = [i % 3 == 0 for i in range(count)]
    body = bits_of(there, 0)
    assert len(body) == -(-count // 8)
    assert [bool(body[i // 8] >> i % 8 & 1) for i in range(count)] == there
