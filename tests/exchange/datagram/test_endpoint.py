"""Transfers between real sockets on loopback, through a relay that does what a network may."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.datagram.packet import PAYLOAD, SESSION_KEY_BYTES, SessionKeys
from idletrain.exchange.datagram.packet_sender import BULK, MAX_SEQUENCE, PROMPT
from idletrain.exchange.datagram.protocol import DatagramProtocol
from idletrain.exchange.datagram.transfer import PIECES_PER_REPORT, PeerSilentError

IP_RECVTOS = 13  # linux/in.h
WAIT = 20.0
PATIENCE = 5.0
Fault = Callable[[bytes, random.Random], list[bytes]]


def unharmed(datagram: bytes, _random: random.Random) -> list[bytes]:
    return [datagram]


class Relay:
    """Passes datagrams between one server and whoever sends, each by the fault; what it holds back comes later."""

    def __init__(self, server: tuple[str, int], fault: Fault) -> None:
        self.fault, self.server, self.random = fault, server, random.Random(1)
        self.front = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.front.bind(("127.0.0.1", 0))
        self.front.settimeout(0.05)
        self.front.setsockopt(socket.IPPROTO_IP, IP_RECVTOS, 1)
        self.backs: dict[tuple[str, int], socket.socket] = {}
        self.seen: list[bytes] = []
        self.services: list[int] = []  # their classes
        self.closing = False
        self.threads = [threading.Thread(target=self._forth)]
        self.threads[0].start()

    @property
    def address(self) -> tuple[str, int]:
        return self.front.getsockname()

    def _forth(self) -> None:
        while not self.closing:
            try:
                datagram, ancillary, _, address = self.front.recvmsg(4096, 64)
            except TimeoutError:
                continue
            if address not in self.backs:
                back = self.backs[address] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                back.bind(("127.0.0.1", 0))
                back.settimeout(0.05)
                self.threads.append(threading.Thread(target=self._back, args=(address, back)))
                self.threads[-1].start()
            self.seen.append(datagram)
            self.services += [content[0] for _, _, content in ancillary]
            for one in self.fault(datagram, self.random):
                self.backs[address].sendto(one, self.server)

    def _back(self, address: tuple[str, int], back: socket.socket) -> None:
        while not self.closing:
            try:
                datagram = back.recv(4096)
            except TimeoutError:
                continue
            for one in self.fault(datagram, self.random):
                self.front.sendto(one, address)

    def close(self) -> None:
        self.closing = True
        for thread in self.threads:
            thread.join()
        for one in (self.front, *self.backs.values()):
            one.close()


@contextmanager
def pair(fault: Fault | None = None, sockets: int = 2) -> Iterator[tuple[Endpoint, Endpoint, Relay | None]]:
    """A server's and a client's endpoint with session 7 open, and the relay between them."""
    server, client = Endpoint("127.0.0.1"), Endpoint("127.0.0.1", sockets)
    relay = Relay(server.address, fault) if fault else None
    try:
        keys = SessionKeys(7, os.urandom(SESSION_KEY_BYTES), os.urandom(SESSION_KEY_BYTES))
        server.open(keys.swapped()).result(WAIT)
        client.open(keys, relay.address if relay else server.address).result(WAIT)
        yield server, client, relay
    finally:
        client.close()
        server.close()
        if relay:
            relay.close()


def content_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def across(sender: Endpoint, receiver: Endpoint, content: bytes, number: int = 1) -> bytes:
    incoming = receiver.receive(7, number, len(content), patience=PATIENCE)
    outgoing = sender.send(7, number, memoryview(content), prompt=0, patience=PATIENCE)
    payload = incoming.result(WAIT)
    outgoing.result(WAIT)
    assert payload.received.all()
    return bytes(payload.content)


def losing(datagram: bytes, chance: random.Random) -> list[bytes]:
    return [] if chance.random() < 0.1 else [datagram]


def spoiling(datagram: bytes, chance: random.Random) -> list[bytes]:
    """Loses, repeats, cuts and forges."""
    what = chance.random()
    if what < 0.05:
        return []
    if what < 0.1:
        return [datagram, datagram]
    if what < 0.15:
        return [datagram[: chance.randrange(len(datagram))], datagram]
    if what < 0.2:
        at = chance.randrange(len(datagram))
        return [datagram[:at] + bytes([datagram[at] ^ 1]) + datagram[at + 1 :]]
    return [datagram]


class Shuffling:
    """Holds back every third, for a while."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def __call__(self, datagram: bytes, chance: random.Random) -> list[bytes]:
        if chance.random() < 0.3 and len(self.held) < 20:
            self.held.append(datagram)
            return []
        late, self.held = ([*self.held], []) if chance.random() < 0.1 else ([], self.held)
        return [datagram, *late]


@pytest.mark.parametrize("size", [0, 1, PAYLOAD, PAYLOAD + 1, 300_000])
def test_payloads_arrive_in_both_directions(size: int) -> None:
    with pair() as (server, client, _):
        content = content_of(size)
        assert across(client, server, content) == content
        assert across(server, client, content) == content


@pytest.mark.parametrize("fault", [losing, spoiling, Shuffling()], ids=["loss", "spoilt", "shuffled"])
def test_payloads_arrive_despite_loss_damage_and_reordering(fault: Fault) -> None:
    with pair(fault) as (server, client, _):
        content = content_of(400_000, 3)
        assert across(client, server, content) == content
        assert across(server, client, content, 2) == content
        if fault is spoiling:
            assert server.counts["dropped"] > 0
            assert server.counts["duplicate"] > 0
        if fault is losing:
            assert client.counts["again"] > 0


def test_transfers_of_many_at_once_do_not_mix() -> None:
    with pair() as (server, client, _):
        contents = {k: content_of(20_000 + k, k) for k in range(1, 9)}
        incoming = {k: server.receive(7, k, len(c), patience=PATIENCE) for k, c in contents.items()}
        outgoing = [client.send(7, k, memoryview(c), prompt=0, patience=PATIENCE) for k, c in contents.items()]
        assert {k: bytes(f.result(WAIT).content) for k, f in incoming.items()} == contents
        for one in outgoing:
            one.result(WAIT)


def test_an_acceptable_part_stops_the_sender() -> None:
    with pair(losing) as (server, client, _):
        content = content_of(300 * PAYLOAD)
        incoming = server.receive(7, 1, len(content), patience=PATIENCE, required_pieces=30, min_pieces=240)
        client.send(7, 1, memoryview(content), prompt=30 * PAYLOAD, patience=PATIENCE).result(WAIT)
        payload = incoming.result(WAIT)
        assert payload.received[:30].all()
        assert payload.received.sum() >= 240
        pieces = np.frombuffer(bytes(payload.content), np.uint8).reshape(300, PAYLOAD)
        sent = np.frombuffer(content, np.uint8).reshape(300, PAYLOAD)
        assert (pieces[payload.received] == sent[payload.received]).all()
        assert not pieces[~payload.received].any()


def test_the_sender_of_very_many_pieces_learns_which_arrived() -> None:
    with pair() as (server, client, _):
        pieces = PIECES_PER_REPORT + 1000  # more than one datagram can tell of
        content = bytes(PAYLOAD) * pieces
        incoming = server.receive(
            7, 1, len(content), patience=PATIENCE, required_pieces=1, min_pieces=PIECES_PER_REPORT - 5000
        )
        reported = client.send(7, 1, memoryview(content), prompt=0, patience=PATIENCE).result(WAIT)
        payload = incoming.result(WAIT)
        assert PIECES_PER_REPORT - 5000 <= payload.received.sum() < pieces
        assert np.array_equal(reported, payload.received)


def test_stop_completes_a_transfer_with_the_pieces_that_arrived() -> None:
    with pair() as (server, client, _):
        content = bytes(PAYLOAD) * 20_000
        incoming = server.receive(7, 1, len(content), patience=PATIENCE)
        outgoing = client.send(7, 1, memoryview(content), prompt=0, patience=PATIENCE)
        while (so_far := server.progress(7, 1).result(WAIT)) is None or not so_far.received.any():
            time.sleep(0.001)
        server.stop(7, 1)
        payload = incoming.result(WAIT)
        assert 0 < payload.received.sum() < 20_000
        assert np.array_equal(outgoing.result(WAIT), payload.received)
        server.stop(7, 1)  # which is over
        assert across(client, server, b"more", 2) == b"more"


def test_a_receiver_that_stops_reading_is_given_up_and_not_flooded() -> None:
    silent = threading.Event()

    def fault(datagram: bytes, _random: random.Random) -> list[bytes]:
        return [] if silent.is_set() else [datagram]

    with pair(fault) as (server, client, _):
        content = bytes(PAYLOAD) * 20_000
        incoming = server.receive(7, 1, len(content), patience=2 * PATIENCE)
        outgoing = client.send(7, 1, memoryview(content), prompt=0, patience=1.0)
        while (so_far := server.progress(7, 1).result(WAIT)) is None or so_far.received.sum() < 100:
            time.sleep(0.001)
        silent.set()
        time.sleep(0.1)
        before = client.counts["sent"] + client.counts["again"]
        with pytest.raises(PeerSilentError):
            outgoing.result(WAIT)
        assert client.counts["sent"] + client.counts["again"] == before
        assert not incoming.done()


def test_prompt_bytes_travel_in_the_better_traffic_class() -> None:
    with pair(unharmed) as (server, client, relay):
        assert relay
        content = content_of(50 * PAYLOAD)
        incoming = server.receive(7, 1, len(content), patience=PATIENCE)
        client.send(7, 1, memoryview(content), prompt=10 * PAYLOAD, patience=PATIENCE).result(WAIT)
        incoming.result(WAIT)
        classes = [service for datagram, service in zip(relay.seen, relay.services, strict=True) if datagram[1] == 1]
        assert classes.count(PROMPT) >= 10
        assert classes.count(BULK) >= 40
        assert {PROMPT, BULK} == set(relay.services)


def test_a_replayed_datagram_changes_nothing() -> None:
    with pair(unharmed) as (server, client, relay):
        assert relay
        content = content_of(50_000)
        assert across(client, server, content) == content
        recorded, before = list(relay.seen), dict(server.counts)
        incoming = server.receive(7, 2, len(content), patience=0.7)
        time.sleep(0.1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for datagram in recorded:
                stranger.sendto(datagram, server.address)
            stranger.settimeout(0.3)
            with pytest.raises(PeerSilentError):
                incoming.result(WAIT)
        assert server.counts["received"] == before["received"]
        assert server.counts["duplicate"] + server.counts["dropped"] >= before["received"]  # every piece of them
        other = content_of(50_000, 4)
        assert across(client, server, other, 3) == other  # and the way to the client is as it was


def test_an_open_session_sends_no_greetings() -> None:
    with pair(unharmed, sockets=4) as (_, _, relay):
        assert relay
        time.sleep(0.3)
        before = len(relay.seen)
        time.sleep(0.3)
        assert len(relay.seen) == before


def test_a_transfer_s_number_serves_once() -> None:
    with pair() as (server, client, _):
        across(client, server, b"one")
        with pytest.raises(PeerSilentError, match="used before"):
            client.send(7, 1, memoryview(b"two"), prompt=0, patience=PATIENCE).result(WAIT)


def test_a_fault_of_one_transfer_does_not_affect_others() -> None:
    def enough(_content: memoryview, _received: np.ndarray) -> bool:
        raise RuntimeError("made up")

    with pair() as (server, client, _):
        content = content_of(20 * PAYLOAD)
        server.receive(7, 1, len(content), patience=0.5, required_pieces=1, min_pieces=5, is_acceptable=enough)
        client.send(7, 1, memoryview(content), prompt=0, patience=0.5)
        assert across(client, server, content, 2) == content


def test_a_silent_peer_fails_the_transfer() -> None:
    with pair() as (server, client, _):
        with pytest.raises(PeerSilentError, match="nothing came"):
            server.receive(7, 1, 5, patience=0.2).result(WAIT)
        with pytest.raises(PeerSilentError, match="no answer"):
            client.send(7, 2, memoryview(b"hello"), prompt=0, patience=0.2).result(WAIT)
        with pytest.raises(PeerSilentError, match="closed"):
            client.send(8, 2, memoryview(b"hello"), prompt=0, patience=0.2).result(WAIT)


def test_a_receiver_whose_sender_has_not_started_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[float] = []
    grant = DatagramProtocol.grant_credits
    monkeypatch.setattr(
        DatagramProtocol, "grant_credits", lambda self, now: (polls.append(time.monotonic()), grant(self, now))[1]
    )
    with pair() as (server, client, _):
        content = content_of(300_000)
        incoming = server.receive(7, 1, len(content), patience=PATIENCE)
        time.sleep(1.0)
        assert 0 < len(polls) < 100  # twice a millisecond it would be 2,000
        client.send(7, 1, memoryview(content), prompt=0, patience=PATIENCE)
        assert bytes(incoming.result(WAIT).content) == content


def test_a_session_ends_before_it_would_use_a_nonce_again() -> None:
    with pair() as (server, client, _):
        content = content_of(300_000)
        server._protocol.sessions[7].control = MAX_SEQUENCE - 3  # of which the first grants are some
        incoming = server.receive(7, 1, len(content), patience=PATIENCE)
        outgoing = client.send(7, 1, memoryview(content), prompt=0, patience=0.5)
        with pytest.raises(PeerSilentError, match="the session is closed"):
            incoming.result(WAIT)
        with pytest.raises(PeerSilentError, match="no answer"):
            outgoing.result(WAIT)


def test_an_address_that_cannot_be_bound_leaves_nothing_behind() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(OSError, match="assign"):
        Endpoint("192.0.2.1", 2)
    assert sys.getswitchinterval() == before


def test_over_ipv6_the_traffic_class_is_set_too() -> None:
    server, client = Endpoint("::1"), Endpoint("::1")
    try:
        keys = SessionKeys(7, os.urandom(SESSION_KEY_BYTES), os.urandom(SESSION_KEY_BYTES))
        server.open(keys.swapped()).result(WAIT)
        client.open(keys, server.address).result(WAIT)
        content = content_of(50_000)
        assert across(client, server, content) == content
        assert not client.counts["unsent"] + server.counts["unsent"]
    finally:
        client.close()
        server.close()


def test_a_session_that_no_datagram_comes_through_does_not_open() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        client = Endpoint("127.0.0.1")
        try:
            opened = client.open(SessionKeys(1, bytes(SESSION_KEY_BYTES), bytes(SESSION_KEY_BYTES)), deaf.getsockname())
            with pytest.raises(TimeoutError):
                opened.result(0.3)
            client.end(1)
            with pytest.raises(PeerSilentError):
                opened.result(WAIT)
        finally:
            client.close()


def test_close_fails_transfers_under_way_and_frees_the_port() -> None:
    with pair() as (server, _, _):
        address = server.address
        incoming = server.receive(7, 1, 5, patience=PATIENCE)
        server.close()
        with pytest.raises(PeerSilentError):
            incoming.result(WAIT)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(address)
