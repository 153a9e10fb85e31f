"""Transfers over a network that loses, repeats and reorders, without a socket."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.datagram.link_rate import FIRST_WINDOW, LinkRate, RoundTrip
from idletrain.exchange.datagram.window import ReceiveWindow, SendWindow, share


@dataclass
class Net:
    """A bottleneck link into one receiver.

    Attributes:
        rate: Pieces a second.
        trip: Seconds, both ways together.
        queue: Pieces that wait at most; more are dropped.
        loss: Share of what is lost in either direction beside that.
        jitter: Seconds by which a piece may be late.
        twice: Share of what arrives twice.
    """

    rate: float = 9000.0
    trip: float = 0.002
    queue: int = 24
    loss: float = 0.0
    jitter: float = 0.0
    twice: float = 0.0


class World:
    """Senders and their receiver, in a simulated time."""

    def __init__(
        self,
        net: Net,
        sizes: list[int],
        seed: int,
        after: World | None = None,
        trips: list[float] | None = None,
        **enough: object,
    ) -> None:
        self.far = trips or [net.trip] * len(sizes)
        self.killed: dict[int, float] = {}
        self.net, self.random = net, random.Random(seed)
        self.link, self.began = (after.link, after.now + 1) if after else (LinkRate(), 0.0)
        self.senders = [SendWindow(n) for n in sizes]
        self.trips = after.trips if after else [RoundTrip() for _ in sizes]
        self.receivers = [ReceiveWindow(n, trip=t, **enough) for n, t in zip(sizes, self.trips, strict=True)]  # type: ignore[arg-type]
        self.done_at: list[float | None] = [None] * len(sizes)
        self.reported = [0] * len(sizes)
        self.now = self.free_at = self.began
        self.sent = self.dropped = 0
        self.events: list[tuple[float, int, str, int, tuple[int, ...]]] = []
        self._count = 0

    def run(self, until: float = 60.0) -> float:
        """Until all senders are told to stop; returns when."""
        while not all(s.stopped for s in self.senders):
            self._senders()
            at = min(
                self.events[0][0] if self.events else math.inf,
                min((s.wake_at() for s in self.senders if not s.stopped), default=math.inf),
                self.now + 0.001,
            )
            self.now = max(self.now + 1e-5, at)
            assert self.now < self.began + until, "it hangs"
            while self.events and self.events[0][0] <= self.now:
                _, _, kind, k, body = heapq.heappop(self.events)
                getattr(self, f"_{kind}")(k, body)
            self._receiver()
        return self.now - self.began

    def kill(self, k: int, at: float) -> None:
        """A sender falls silent."""
        self.killed[k] = at

    def _senders(self) -> None:
        for k, sender in enumerate(self.senders):
            if self.now >= self.killed.get(k, math.inf):
                sender.stopped = True
                continue
            while (packet := sender.next()) is not None:
                self.sent += 1
                sender.sent(self.now)
                self._through(k, "data", packet)
            if (probe := sender.probe(self.now)) is not None:
                self._through(k, "probe", (probe, sender.sequence))

    def _through(self, k: int, kind: str, body: tuple[int, ...]) -> None:
        waiting = max(0.0, self.free_at - self.now) * self.net.rate
        if waiting > self.net.queue or self.random.random() < self.net.loss:
            self.dropped += 1
            return
        self.free_at = max(self.free_at, self.now) + (1 / self.net.rate if kind == "data" else 0)
        for _ in range(1 + (self.random.random() < self.net.twice)):
            late = self.net.jitter * self.random.random()
            self._later(self.free_at + self.far[k] / 2 + late, kind, k, body)

    def _back(self, kind: str, k: int, body: tuple[int, ...]) -> None:
        if self.random.random() >= self.net.loss:
            self._later(self.now + self.far[k] / 2 + self.net.jitter * self.random.random(), kind, k, body)

    def _later(self, at: float, kind: str, k: int, body: tuple[int, ...]) -> None:
        self._count += 1
        heapq.heappush(self.events, (at, self._count, kind, k, body))

    def _data(self, k: int, body: tuple[int, ...]) -> None:
        piece, sequence = body
        receiver = self.receivers[k]
        if self.done_at[k] is not None:
            return
        if receiver.take(sequence, piece, self.now):
            self.link.arrived(self.now, 1)
        if receiver.is_done():
            self.done_at[k] = self.now
            self._back("stop", k, ())

    def _probe(self, k: int, body: tuple[int, ...]) -> None:
        probe, sequence = body
        if self.done_at[k] is not None:
            self._back("stop", k, ())
            return
        self.receivers[k].probed(probe, sequence, self.now)

    def _open(self) -> list[ReceiveWindow]:
        return [r for r, at in zip(self.receivers, self.done_at, strict=True) if at is None]

    def _receiver(self) -> None:
        share(self.link, self._open(), self.now)
        for k, receiver in enumerate(self.receivers):
            if self.done_at[k] is None and (probe := receiver.answer(self.now)) is not None:
                share(self.link, self._open(), self.now, first=[receiver])
                self._back("missing", k, (probe, *receiver.received.astype(int).tolist()))
                self.reported[k] = receiver.limit
                self._back("grant", k, (receiver.limit,))
            if self.done_at[k] is None and receiver.limit > self.reported[k]:
                self.reported[k] = receiver.limit
                self._back("grant", k, (receiver.limit,))

    def _grant(self, k: int, body: tuple[int, ...]) -> None:
        self.senders[k].granted(body[0], self.now)

    def _missing(self, k: int, body: tuple[int, ...]) -> None:
        probe, *there = body
        self.senders[k].report_missing(probe, [bool(one) for one in there], 0, self.now)

    def _stop(self, k: int, _body: tuple[int, ...]) -> None:
        self.senders[k].stop()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=4),
    st.floats(0, 0.3),
    st.sampled_from([0.0, 0.001, 0.02]),
    st.floats(0, 0.3),
    st.integers(0, 1000),
)
def test_all_pieces_arrive_whatever_the_network_does(
    sizes: list[int], loss: float, jitter: float, twice: float, seed: int
) -> None:
    world = World(Net(loss=loss, jitter=jitter, twice=twice, queue=8), sizes, seed)
    world.run()
    assert all(receiver.received.all() for receiver in world.receivers)


@pytest.mark.parametrize(("trip", "limit"), [(0.0002, 1.1), (0.002, 1.1), (0.02, 1.35)])
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_one_sender_fills_the_link(trip: float, limit: float, loss: float) -> None:
    """A second transfer, when the link is known: 5 MB at 100 Mbit/s."""
    net = Net(trip=trip, loss=loss, queue=24)
    world = World(net, [4000], 1)
    world.run()
    again = World(net, [4000], 2, after=world)
    took = again.run()
    assert took / (4000 / net.rate + trip) < limit
    assert again.sent < 4000 * (1 + 2 * loss + 0.05)


@pytest.mark.parametrize("queue", [24, 48])
@pytest.mark.parametrize("pieces", [80, 800])
def test_eight_senders_at_once_do_not_overrun_a_shallow_buffer(queue: int, pieces: int) -> None:
    net = Net(trip=0.0005, queue=queue)
    ideal = 8 * pieces / net.rate
    first = World(net, [pieces] * 8, 1)
    assert first.run() / ideal < 1.5  # it has yet to find the link's rate
    again = World(net, [pieces] * 8, 2, after=first)
    assert again.run() / ideal < 1.1
    assert again.dropped < 0.02 * again.sent


def test_a_far_sender_beside_a_near_one_gets_its_share_and_neither_overruns_the_buffer() -> None:
    """100 Mbit/s, 20 ms and 0.2 ms away: the near one is served meanwhile, the far one in time."""
    net = Net(queue=48)
    trips = [0.02, 0.0002]
    world = World(net, [2000, 2000], 1, trips=trips)
    world.run()
    again = World(net, [2000, 2000], 2, after=world, trips=trips)
    assert again.run() / (4000 / net.rate) < 1.35
    assert again.dropped < 0.05 * again.sent


def test_a_dead_sender_does_not_keep_the_others_waiting() -> None:
    net = Net(trip=0.0005)
    world = World(net, [800] * 4, 1)
    world.kill(0, at=0.02)
    took = world.run()
    assert world.receivers[0].missing
    assert took / (4 * 800 / net.rate) < 1.1


def test_an_acceptable_part_completes_but_never_without_required_pieces() -> None:
    net = Net(loss=0.2)
    world = World(net, [200], 3, required_pieces=40, min_pieces=180)
    world.run()
    (receiver,) = world.receivers
    assert receiver.received[:40].all()
    assert 180 <= receiver.count < 200
    probe = []

    def enough(received: np.ndarray) -> bool:
        probe.append(int(received.sum()))
        return bool(received[50])

    world = World(net, [200], 4, required_pieces=40, min_pieces=150, is_acceptable=enough)
    world.run()
    assert world.receivers[0].received[50]
    assert min(probe) >= 150


def test_a_receiver_grants_its_window_and_one_piece_to_a_new_transfer() -> None:
    link, transfers = LinkRate(), [ReceiveWindow(100) for _ in range(20)]
    share(link, transfers, 0.0)
    assert not any(t.in_flight for t in transfers)  # nobody has been heard
    for transfer in transfers:
        transfer.probed(1, 0, 0.0)
    share(link, transfers, 0.0)
    assert sum(t.in_flight for t in transfers) == FIRST_WINDOW
    share(link, transfers, 0.0, first=transfers)
    assert all(t.in_flight >= 1 for t in transfers)


def test_pieces_that_were_not_granted_are_ignored() -> None:
    receiver = ReceiveWindow(10)
    receiver.grant(3, 0.0)
    assert not receiver.take(4, 0, 0.0)
    assert not receiver.take(0, 0, 0.0)
    assert not receiver.take(1, 10, 0.0)
    assert not receiver.take(1, -1, 0.0)
    assert receiver.take(3, 0, 0.0)
    assert not receiver.take(2, 0, 0.0)
    assert (receiver.count, receiver.top) == (1, 3)


def test_each_part_of_an_answer_counts_once_and_answers_to_old_probes_do_not() -> None:
    sender = SendWindow(6)
    probe = sender.probe(0.0)
    assert probe is not None
    sender.granted(20, 0.1)
    while sender.next():
        pass
    sender.report_missing(probe, [False] * 6, 0, 0.2)
    assert sender.next() is None
    probe = sender.probe(0.3)
    assert probe is not None
    sender.report_missing(probe, [True, False, True], 0, 0.4)
    assert [packet[0] for packet in (sender.next(),) if packet] == [1]
    sender.report_missing(probe, [True, True, False], 3, 0.4)
    sender.report_missing(probe, [True, False, True], 0, 0.5)
    assert [packet[0] for packet in (sender.next(),) if packet] == [5]
    assert sender.next() is None


def test_a_probe_waits_for_its_answer_and_then_longer_and_longer() -> None:
    sender = SendWindow(2)
    assert sender.probe(0.0) == 1
    assert sender.probe(0.001) is None
    times = [tick / 1000 for tick in range(1, 4000) if sender.probe(tick / 1000) is not None]
    gaps = np.diff(times)
    assert (gaps[1:] > gaps[:-1] - 0.0015).all()  # but for a tick
    assert 0.04 < gaps.max() <= 0.051
    last = max(probe for probe in range(1, 1000) if probe in sender._probed_at)
    sender.report_missing(last, [], 0, 4.0)  # an answer without a grant: others are served
    again = [tick / 1000 for tick in range(4000, 4300) if sender.probe(tick / 1000) is not None]
    assert np.diff(again).min() > 0.04
    sender.granted(5, 5.0)
    assert sender.ready
    assert sender.probe(9.0) is None  # there is something to send


@pytest.mark.parametrize("seed", range(3))
def test_pauses_longer_than_the_round_trip_do_not_make_a_link_seem_slow_for_good(seed: int) -> None:
    net = Net(jitter=0.006)
    assert World(net, [400] * 8, seed).run() < 2 * 3200 / net.rate
