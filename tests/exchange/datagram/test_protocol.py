"""The protocol on its own: two sides joined by function calls, with a clock that the test sets."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from idletrain.exchange.datagram.packet import PAYLOAD, SESSION_KEY_BYTES, SessionKeys
from idletrain.exchange.datagram.protocol import DatagramProtocol
from idletrain.exchange.datagram.transfer import (
    IncomingTransfer,
    OutgoingTransfer,
    PeerSilentError,
    SessionState,
    new_future,
)
from idletrain.exchange.datagram.window import ReceiveWindow, SendWindow

KEYS = SessionKeys(7, bytes(range(SESSION_KEY_BYTES)), bytes(range(100, 100 + SESSION_KEY_BYTES)))
STEP_SECONDS = 0.001


class Pair:
    """A client (side 0) and a server (side 1) with session 7 open; loses datagrams by chance."""

    def __init__(self, loss: float = 0.0) -> None:
        self.sides = [DatagramProtocol(Counter()), DatagramProtocol(Counter())]
        self.now, self.loss, self.random = 0.0, loss, random.Random(1)
        self.opening = new_future()
        self.sides[1].open(KEYS.swapped(), [], new_future(), self.now)
        self.sides[0].open(KEYS, [(0, ("server", 1))], self.opening, self.now)

    def step(self) -> None:
        self.now += STEP_SECONDS
        for side in self.sides:
            side.grant_credits(self.now)
            side.send_due(self.now)
            side.schedule(self.now)
        for sender, receiver in (self.sides, self.sides[::-1]):
            while sender.outbox:
                datagram = sender.outbox.popleft()
                if self.random.random() >= self.loss:
                    receiver.receive((0, ("peer", 1)), datagram.content, self.now)


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_a_payload_arrives_whole_and_both_sides_learn_it(loss: float) -> None:
    pair = Pair(loss)
    content = np.random.default_rng(0).bytes(200 * PAYLOAD + 1)
    outgoing = OutgoingTransfer(memoryview(content), SendWindow(201), 0, pair.now, patience=60)
    incoming = IncomingTransfer(bytearray(len(content)), ReceiveWindow(201), pair.now, patience=60)
    pair.sides[1].expect(7, 1, incoming)
    pair.sides[0].send(7, 1, outgoing)
    for _ in range(20_000):
        if incoming.done.done() and outgoing.done.done():
            break
        pair.step()
    assert pair.opening.done()
    assert bytes(incoming.done.result(0).content) == content
    assert outgoing.done.result(0).all()
    assert (pair.sides[0].counts["again"] > 0) == (loss > 0)


def test_a_silent_peer_fails_a_transfer_when_its_patience_ends() -> None:
    pair = Pair(loss=1.0)
    outgoing = OutgoingTransfer(memoryview(b"content"), SendWindow(1), 0, pair.now, patience=1)
    pair.sides[0].send(7, 1, outgoing)
    while pair.now < 0.9:
        pair.step()
    assert not outgoing.done.done()
    while pair.now < 1.1:
        pair.step()
    with pytest.raises(PeerSilentError, match="no answer in 1 s"):
        outgoing.done.result(0)


def test_a_protocol_with_nothing_to_do_sleeps() -> None:
    pair = Pair()
    for _ in range(10):
        pair.step()
    assert all(side.due_at - pair.now == pytest.approx(0.5) for side in pair.sides)
    assert not any(side.outbox for side in pair.sides)


def test_a_transfer_s_number_is_claimed_once() -> None:
    session = SessionState(KEYS)
    assert [session.claim_number(number) for number in (5, 5, 3000, 4, 2999)] == [True, False, True, False, True]
