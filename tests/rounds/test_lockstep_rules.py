"""Lockstep: all subnets of a round take every step together."""

from __future__ import annotations

from idletrain.exchange.messages import Reply
from idletrain.rounds import lockstep_rules
from idletrain.rounds.protocol import Heartbeat, NoticeReceived, Pushed, WorkerLeft
from tests.rounds.world import LARGE, SMALL, STEPS, World


def test_in_lockstep_each_subnet_has_a_worker_for_itself_and_finished_workers_keep_their_leases() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 3)
    world.join("a", "b", leases=2)
    assert [(c.lease.subnet, c.worker) for c in world.leases] == [(0, "a"), (1, "b")]
    world.join("c", leases=2)
    assert world.leases[-1].worker == "c"
    for k in (0, 1):
        assert world.send(Pushed, world.lease_of(k), steps=STEPS) is Reply.ACCEPTED
        assert world.send(Heartbeat, world.lease_of(k), steps=STEPS) is Reply.ACCEPTED
    assert world.to_store == []
    world.do(WorkerLeft, worker="a")  # its checkpoint of all steps stays
    assert world.send(Pushed, world.lease_of(2), steps=STEPS) is Reply.ACCEPTED
    assert world.to_store == [0, 1, 2]


def test_in_lockstep_machines_that_are_alike_train_together() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 3)
    world.join("a", "b", cohort="Xeon")
    world.join("c", "d", cohort="Epyc")
    assert [(c.lease.subnet, c.worker) for c in world.leases] == [(0, "a"), (1, "b")]
    world.join("e", cohort="Epyc")  # now there are as many of these as it takes
    assert [lost.cause for lost in world.lost] == ["moved", "moved"]
    assert {(c.lease.subnet, c.worker) for c in world.leases[2:]} == {(0, "c"), (1, "d"), (2, "e")}
    world.join("f", cohort="Xeon")  # who is at it stays
    assert len(world.leases) == 5
    world.do(WorkerLeft, worker="e")
    for k in (0, 1):
        world.end(next(c.lease for c in world.leases if c.lease.subnet == k))
    assert {c.worker for c in world.leases[5:]} == {"a", "b", "f"}


def test_in_lockstep_the_cohort_with_enough_memory_trains() -> None:
    world = World(lockstep=True, needs=(LARGE,) * 2)
    world.join("a", "b", "c", memory_bytes=SMALL, cohort="small")
    world.join("d", "e", memory_bytes=LARGE, cohort="large")
    assert {c.worker for c in world.leases} == {"d", "e"}


def test_in_lockstep_a_draining_worker_leaves_its_checkpoint_before_others_take_over() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b", cohort="Xeon")
    world.join("c", "d", cohort="Epyc")
    world.do(NoticeReceived, worker="a")
    assert (world.lost, len(world.leases)) == ([], 2)
    for k in (0, 1):
        assert world.send(Pushed, world.lease_of(k), steps=STEPS - 1) is Reply.ACCEPTED
    world.end(world.lease_of(0))
    assert [lost.kept_steps for lost in world.lost] == [STEPS - 1] * 2
    assert {(c.worker, c.step) for c in world.leases[2:]} == {("c", STEPS - 1), ("d", STEPS - 1)}


def test_checkpoints_after_a_group_s_start_do_not_count() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b")
    assert world.send(Pushed, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED
    assert world.send(Pushed, world.lease_of(1), steps=1) is Reply.ACCEPTED
    world.state = lockstep_rules.rolled_back(world.state, 1, (1, 1))
    assert [subnet.steps for subnet in world.state.subnets] == [1, 1]
    assert world.send(Pushed, world.lease_of(1), steps=STEPS) is Reply.ACCEPTED
    assert world.to_store == []
    assert world.send(Pushed, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED  # again, of this group
    assert world.to_store == [0, 1]


def test_a_group_s_start_counts_as_stored_only_where_it_is() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b")
    assert world.send(Pushed, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED
    world.state = lockstep_rules.rolled_back(world.state, 2, (1, 0))  # the members have step 2
    assert [(subnet.steps, subnet.lease.reported_steps) for subnet in world.state.subnets] == [(1, 2), (0, 0)]
    assert world.send(Pushed, world.lease_of(0), steps=2) is Reply.ACCEPTED


def test_without_lockstep_all_cohorts_train() -> None:
    world = World(needs=(SMALL,) * 2)
    world.join("a", cohort="Xeon")
    world.join("b", cohort="Epyc")
    assert {c.worker for c in world.leases} == {"a", "b"}


def test_in_lockstep_a_finished_worker_that_left_is_replaced_while_others_train() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b", leases=2)
    world.send(Pushed, world.lease_of(0), steps=STEPS)
    world.do(WorkerLeft, worker="a")
    world.join("c")
    assert (world.leases[-1].worker, world.leases[-1].step) == ("c", STEPS)


def test_in_lockstep_a_worker_on_which_attempts_fail_twice_is_tried_again_where_no_other_is_idle() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b")
    for _ in range(3):
        world.end(world.lease_of(1), failed=True)
    assert world.finished == "failed"  # and does not wait for ever


def test_in_lockstep_a_small_subnet_makes_way_for_a_large_one() -> None:
    world = World(lockstep=True, needs=(SMALL, LARGE))
    world.join("a", "b", memory_bytes=LARGE)
    small = world.lease_of(0)
    (other,) = {"a", "b"} - {c.worker for c in world.leases if c.lease == small}
    world.do(WorkerLeft, worker=other)
    world.join("small", memory_bytes=SMALL)
    assert world.lost[-1].cause == "moved"
    world.end(small)
    assert {(c.lease.subnet, c.worker) for c in world.leases[-2:]} == {(0, "small"), (1, ({"a", "b"} - {other}).pop())}
