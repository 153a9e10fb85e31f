"""Leases end by silence, notice and death: what is kept of their steps, and what is lost."""

from __future__ import annotations

from idletrain.exchange.messages import Reply
from idletrain.rounds.protocol import (
    ClockTick,
    Heartbeat,
    LeaseLost,
    NoticeReceived,
    PartArrived,
    Persist,
    Pushed,
    WorkerLeft,
)
from tests.rounds.world import SMALL, STEPS, World


def test_a_worker_that_dies_loses_both_its_subnets_but_steps_of_the_first_alone() -> None:
    world = World(needs=(SMALL,) * 2)
    world.join("a", leases=2)
    training, queued = (c.lease for c in world.leases)
    world.now = 1.0
    assert world.send(Heartbeat, training, steps=3) is Reply.ACCEPTED
    assert world.send(Heartbeat, queued, steps=0) is Reply.ACCEPTED
    world.now = 1.5
    world.do(WorkerLeft, worker="a")
    assert [(c.subnet, c.lost_steps) for c in world.lost] == [(training.subnet, STEPS), (queued.subnet, 0)]
    world.drive()
    assert world.finished == "completed"


def test_a_lease_without_a_beat_is_over_after_its_seconds_and_goes_on_elsewhere_from_the_checkpoint() -> None:
    world = World(needs=(SMALL,), lease_seconds=10.0)
    world.join("a")
    first = world.lease_of(0)
    world.now = 5.0
    assert world.send(Pushed, first, steps=2) is Reply.ACCEPTED
    world.now = 15.0
    world.do(ClockTick)
    assert world.lost == []
    world.now = 15.1
    world.join("b")
    world.do(ClockTick)
    assert [(c.worker, c.cause, c.kept_steps) for c in world.lost] == [("a", "lease", 2)]
    assert (world.leases[-1].worker, world.leases[-1].step) == ("b", 2)


def test_a_beat_prolongs_a_lease() -> None:
    world = World(needs=(SMALL,), lease_seconds=10.0)
    world.join("a")
    for world.now in (9.0, 18.0, 27.0):
        assert world.send(Heartbeat, world.lease_of(0), steps=1) is Reply.ACCEPTED
        world.do(ClockTick)
    assert world.lost == []


def test_the_worker_of_an_expired_lease_gets_no_other_before_its_task_has_ended() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    world.now = 11.0
    world.do(ClockTick)
    assert len(world.leases) == 1
    world.end(world.lease_of(0))
    assert [c.worker for c in world.leases] == ["a", "a"]


def test_a_draining_worker_gets_no_lease_and_its_end_counts_as_a_notice() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("a")
    world.do(NoticeReceived, worker="a")
    drained = world.leases[0].lease
    assert world.send(Pushed, drained, steps=3) is Reply.ACCEPTED
    world.end(drained)
    assert len(world.leases) == 1
    assert [(c.cause, c.kept_steps, c.lost_steps) for c in world.lost] == [("notice", 3, 0)]
    world.join("b")
    assert {(c.worker, c.step) for c in world.leases[1:]} <= {("b", 3), ("b", 0)}


def test_a_killed_worker_s_steps_since_its_last_beat_are_estimated_at_its_pace() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    world.now = 5.0
    world.send(Heartbeat, world.lease_of(0), steps=50)
    world.now = 6.0
    world.do(WorkerLeft, worker="a")
    assert [(c.cause, c.kept_steps, c.lost_steps) for c in world.lost] == [("kill", 0, 60)]


def test_a_beat_from_before_the_pull_does_not_make_lost_steps_negative() -> None:
    """A new attempt beats with step 0 until it has pulled the checkpoint that it goes on from."""
    world = World(needs=(SMALL,))
    world.join("a")
    world.send(Pushed, world.lease_of(0), steps=3)
    world.do(WorkerLeft, worker="a")
    world.join("b")
    world.now = 2.0
    assert world.send(Heartbeat, world.lease_of(0), steps=0) is Reply.ACCEPTED
    world.now = 3.0
    world.do(WorkerLeft, worker="b")
    assert world.lost[-1].lost_steps == 0


def test_an_attempt_that_ends_without_its_update_is_leased_again() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    world.end(world.lease_of(0))
    assert [c.cause for c in world.lost] == ["error"]
    assert len(world.leases) == 2


def test_salvage_stores_the_rows_of_an_update_in_flight_when_its_worker_dies() -> None:
    world = World(salvage=True, needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    lease = world.lease_of(0)
    (holder,) = (c.worker for c in world.leases if c.lease == lease)
    world.send(Pushed, lease, steps=1)
    world.send(PartArrived, lease, steps=STEPS, norm_fraction=0.5)
    commands = world.do(WorkerLeft, worker=holder)
    (lost,) = (c for c in commands if isinstance(c, LeaseLost))
    assert (lost.kept_steps, lost.lost_steps, lost.norm_fraction) == (STEPS, 0, 0.5)
    assert Persist(0, lease.attempt, STEPS, 0.5) in commands
    world.store(0)
    world.finish_subnet(1)
    assert world.committed[-1].staged == ((0, STEPS), (1, STEPS))


def test_salvage_goes_on_from_a_checkpoint_that_holds_more_than_the_update_in_flight() -> None:
    world = World(salvage=True, needs=(SMALL,) * 2, workers=("a", "b", "c"))
    world.do(ClockTick)
    lease = world.lease_of(0)
    (holder,) = (c.worker for c in world.leases if c.lease == lease)
    world.send(Pushed, lease, steps=3)
    world.send(PartArrived, lease, steps=STEPS, norm_fraction=0.5)
    world.do(WorkerLeft, worker=holder)
    assert [c.kept_steps for c in world.lost] == [3]
    assert world.leases[-1].lease.subnet == 0
    assert world.leases[-1].step == 3
    world.send(PartArrived, world.lease_of(0), steps=STEPS)  # of the new attempt nothing that is of use has come
    world.do(WorkerLeft, worker=world.leases[-1].worker)
    assert world.lost[-1].norm_fraction == 0


def test_salvage_closes_a_round_with_the_rows_of_an_update_in_flight() -> None:
    world = World(salvage=True, needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    world.now += 1
    world.finish_subnet(0)
    world.now += 0.1
    world.send(PartArrived, world.lease_of(1), steps=STEPS, norm_fraction=0.25)
    world.now += 10
    world.send(Heartbeat, world.lease_of(1), steps=STEPS)
    world.do(ClockTick)
    assert [(c.cause, c.norm_fraction) for c in world.lost] == [("closed", 0.25)]
    world.store(1)
    assert dict(world.committed[-1].staged) == {0: STEPS, 1: STEPS}


def test_reissue_takes_nothing_of_an_update_that_is_not_whole() -> None:
    world = World(needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    lease = world.lease_of(0)
    (holder,) = (c.worker for c in world.leases if c.lease == lease)
    world.send(PartArrived, lease, steps=STEPS, norm_fraction=0.9)
    world.do(WorkerLeft, worker=holder)
    assert not world.to_store
    assert [c.kept_steps for c in world.lost] == [0]


def test_an_update_of_fewer_steps_is_the_subnet_s_under_salvage() -> None:
    world = World(salvage=True, needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    assert Persist(0, world.lease_of(0).attempt, 2) in world.do(Pushed, lease=world.lease_of(0), steps=2, update=True)


def test_parts_prolong_a_lease() -> None:
    world = World(needs=(SMALL,), workers=("a",))
    world.do(ClockTick)
    for _ in range(3):
        world.now += 8
        assert world.send(PartArrived, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED
        world.do(ClockTick)
    assert not world.lost
