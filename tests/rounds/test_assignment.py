"""Which worker is leased which subnet."""

from __future__ import annotations

import sys
from collections import Counter

from idletrain.exchange.messages import Reply
from idletrain.rounds.protocol import AttemptEnded, ClockTick, Heartbeat, Persisted, Pushed
from idletrain.rounds.state import advance
from tests.rounds.world import LARGE, SMALL, STEPS, World


def test_the_largest_subnet_goes_to_the_smallest_worker_that_holds_it() -> None:
    world = World(needs=(SMALL, LARGE))
    world.join("small", memory_bytes=SMALL)
    assert [(c.lease.subnet, c.worker) for c in world.leases] == [(0, "small")]
    world.join("large")
    assert [(c.lease.subnet, c.worker) for c in world.leases] == [(0, "small"), (1, "large")]


def test_a_worker_is_leased_a_second_subnet_when_there_is_one_for_everybody() -> None:
    world = World(needs=(SMALL,) * 5, workers=("a", "b"))
    world.do(ClockTick)
    assert Counter(c.worker for c in world.leases) == {"a": 2, "b": 2}
    first, second = (c.lease for c in world.leases if c.worker == "a")
    assert not world.state.subnets[first.subnet].lease.queued
    assert world.state.subnets[second.subnet].lease.queued
    world.finish_subnet(first.subnet)  # who takes the last one is decided by who is done first
    assert world.leases[-1].worker == "a"
    assert not world.state.subnets[second.subnet].lease.queued


def test_the_last_subnets_of_a_round_wait_for_the_worker_that_is_done_first() -> None:
    world = World(needs=(SMALL,) * 3, workers=("a", "b"))
    world.do(ClockTick)
    assert Counter(c.worker for c in world.leases) == {"a": 1, "b": 1}
    world.finish_subnet(world.leases[1].lease.subnet)
    assert world.leases[2].worker == world.leases[1].worker


def test_a_joiner_takes_over_what_waits_behind_another_subnet() -> None:
    world = World(needs=(SMALL,) * 2)
    world.join("a", leases=2)
    queued = world.leases[1].lease
    world.join("b", leases=2)
    assert (world.leases[2].worker, world.leases[2].lease.subnet) == ("b", queued.subnet)
    assert not world.state.subnets[queued.subnet].lease.queued
    assert world.send(Heartbeat, queued, steps=0) is Reply.NOT_LEASED
    assert world.lost == []


def test_a_joiner_takes_over_what_waits_behind_a_subnet_that_nobody_wants_any_more() -> None:
    """The first lease of a worker expires while it is in a step; the second one should not wait for the step's end."""
    world = World(needs=(SMALL,) * 2)
    world.join("a", leases=2)
    first, second = (granted.lease for granted in world.leases)
    world.now = 9.0
    assert world.send(Heartbeat, second, steps=0, doing="wait") is Reply.ACCEPTED
    world.now = 11.0
    world.do(ClockTick)
    assert first.attempt in world.state.workers["a"].unwanted
    assert world.state.subnets[second.subnet].lease.queued
    world.join("b", "c")
    assert {(c.lease.subnet, c.worker) for c in world.leases[-2:]} == {(first.subnet, "b"), (second.subnet, "c")}


def test_the_end_of_a_subnet_costs_as_much_with_ten_times_the_workers() -> None:
    """Half of the workers hold an attempt that others took over, and some are idle."""
    costs = []
    for workers in (40, 400):
        world = World(needs=(SMALL,) * workers, workers=(f"w{n}" for n in range(workers // 2)))
        world.do(ClockTick)
        world.join(*(f"late{n}" for n in range(workers // 2 + 2)))
        assert sum(len(worker.unwanted) for worker in world.state.workers.values()) == workers // 2
        lease = world.lease_of(0)
        steps = Pushed(now=world.now, lease=lease, steps=STEPS, update=True), Persisted(now=world.now, subnet=0)
        ended = AttemptEnded(now=world.now, lease=lease, worker=world.state.subnets[0].lease.worker)
        state, calls = world.state, Counter[str]()
        sys.setprofile(lambda _frame, event, _of, calls=calls: calls.update([event]))
        try:
            for event in (*steps, ended):
                state, _ = advance(state, event)
        finally:
            sys.setprofile(None)
        costs.append(calls["call"])
    assert costs[1] < 1.5 * costs[0]


def test_a_second_subnet_must_fit_beside_the_first() -> None:
    world = World(needs=(LARGE,) * 4)
    world.join("a", memory_bytes=2 * LARGE - 1, leases=2)
    assert len(world.leases) == 1


def test_a_subnet_trained_out_of_core_has_its_worker_for_itself() -> None:
    world = World(needs=(SMALL,) * 3, exclusive=frozenset({0}))
    world.join("a", leases=2)
    assert [c.lease.subnet for c in world.leases] == [0]
    world.finish_subnet(0)
    assert [c.lease.subnet for c in world.leases] == [0, 1, 2]


def test_nothing_is_trained_out_of_core_beside_a_subnet_in_core() -> None:
    world = World(needs=(LARGE, SMALL, SMALL), exclusive=frozenset({1, 2}))
    world.join("a", leases=2)
    assert [c.lease.subnet for c in world.leases] == [0]
    world.finish_subnet(0)
    assert [c.lease.subnet for c in world.leases] == [0, 1]


def test_a_worker_that_a_subnet_did_not_fit_gets_smaller_ones() -> None:
    world = World(needs=(LARGE, SMALL), exclusive=frozenset({0}))
    world.join("a")
    assert [c.lease.subnet for c in world.leases] == [0]
    world.end(world.lease_of(0), out_of_memory=True)
    assert [c.lease.subnet for c in world.leases] == [0, 1]
    world.join("b")
    assert (world.leases[-1].worker, world.leases[-1].lease.subnet) == ("b", 0)


def test_a_subnet_that_no_worker_can_hold_waits_for_one_that_can() -> None:
    world = World(needs=(LARGE,))
    world.join("small", memory_bytes=SMALL)
    assert world.leases == []
    world.join("large")
    assert [c.worker for c in world.leases] == ["large"]
