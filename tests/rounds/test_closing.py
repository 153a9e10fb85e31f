"""Salvage closes rounds early."""

from __future__ import annotations

from idletrain.exchange.messages import Reply
from idletrain.rounds.protocol import ClockTick, Commit, Heartbeat, Pushed, WorkerLeft
from tests.rounds.world import SMALL, STEPS, World


def test_salvage_closes_a_round_whose_last_subnet_was_lost_with_the_checkpoint_that_it_left() -> None:
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.send(Pushed, world.lease_of(1), steps=2)
    world.finish_subnet(0)
    world.do(WorkerLeft, worker=next(c.worker for c in world.leases if c.lease.subnet == 1))
    world.store(1)
    assert world.committed == [Commit(0, ((0, STEPS), (1, 2)))]


def test_salvage_leaves_out_a_subnet_that_left_nothing() -> None:
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.finish_subnet(0)
    world.do(WorkerLeft, worker=next(c.worker for c in world.leases if c.lease.subnet == 1))
    assert world.committed == [Commit(0, ((0, STEPS),))]


def test_salvage_reissues_a_lost_subnet_while_others_train_anyway() -> None:
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.do(WorkerLeft, worker="a")
    world.join("c")
    assert world.leases[-1].worker == "c"


def test_salvage_trains_again_when_all_subnets_were_lost_before_any_checkpoint() -> None:
    """There is nothing to close the round with: without another lease the run would never end."""
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.do(WorkerLeft, worker="a")
    world.do(WorkerLeft, worker="b")
    world.join("c")
    assert world.leases[-1].worker == "c"
    world.drive()
    assert world.finished == "completed"


def test_salvage_closes_a_round_that_takes_half_as_long_again_as_the_last() -> None:
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.now = 4.0
    world.finish_subnet(0)
    world.send(Pushed, world.lease_of(1), steps=1)
    world.now = 6.0
    world.send(Heartbeat, world.lease_of(1), steps=1)
    assert world.to_store == []
    world.now = 6.1
    world.do(ClockTick)
    assert [(c.cause, c.kept_steps) for c in world.lost] == [("closed", 1)]
    world.store(1)
    assert world.committed == [Commit(0, ((0, STEPS), (1, 1)))]
    assert world.send(Pushed, world.lease_of(1), steps=STEPS) is Reply.STALE_ROUND


def test_reissue_never_closes_a_round_early() -> None:
    world = World(needs=(SMALL, SMALL), lease_seconds=1e9)
    world.join("a", "b")
    world.now = 1.0
    world.finish_subnet(0)
    world.now = 1e6
    world.do(ClockTick)
    assert not world.commit_due
    assert world.to_store == []


def test_salvage_goes_by_the_slowest_subnet_of_a_round_not_by_one_that_was_pulled_ahead() -> None:
    world = World(salvage=True, needs=(SMALL,) * 4)
    world.join("a", "b", leases=2)
    first, second, third, fourth = (c.lease.subnet for c in sorted(world.leases, key=lambda c: c.lease.attempt))
    world.now = 3.0
    world.finish_subnet(first)
    world.finish_subnet(second)
    world.now = 4.0
    world.finish_subnet(third)
    world.now = 5.0
    world.do(ClockTick)
    assert world.lost == []
    world.finish_subnet(fourth)
    assert world.commit_due


def test_salvage_waits_longer_after_a_round_in_which_most_subnets_were_cut_short() -> None:
    world = World(salvage=True, needs=(SMALL,) * 3)
    world.join("a", "b", "c")
    world.now = 4.0
    world.finish_subnet(0)
    world.now = 6.1
    world.do(ClockTick)
    assert [c.cause for c in world.lost] == ["closed"] * 2
    world.commit()
    world.end(world.lease_of(1))
    world.end(world.lease_of(2))
    world.now = 10.1
    world.finish_subnet(0)
    world.now = 6.1 + 8.0
    world.send(Heartbeat, world.lease_of(1), steps=1)
    world.do(ClockTick)
    assert [c.cause for c in world.lost] == ["closed"] * 2


def test_salvage_s_patience_with_one_straggler_does_not_grow_from_round_to_round() -> None:
    world = World(salvage=True, needs=(SMALL,) * 4, rounds=6, evaluate_every=9)
    world.join("a", "b", "c", "d")
    lengths = []
    for _ in range(5):
        opened = world.now
        slow = next(c.lease for c in world.running if c.worker == "d")
        world.now += 4.0
        for held in [c for c in world.running if c.worker != "d"]:
            world.finish_subnet(held.lease.subnet)
        while not world.commit_due:
            world.now += 0.5
            world.send(Heartbeat, slow, steps=0)
            world.do(ClockTick)
        lengths.append(world.now - opened)
        world.end(slow)
        world.commit()
        if world.evaluation_due:
            world.evaluate()
    assert lengths == [6.5] * 5
