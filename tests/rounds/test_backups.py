"""A slow subnet is leased a second time."""

from __future__ import annotations

from idletrain.exchange.messages import Reply
from idletrain.rounds.protocol import ClockTick, Heartbeat, Pushed, WorkerLeft
from tests.rounds.world import SMALL, STEPS, World


def slow_and_quick(**rules: object) -> World:
    """Return a world of two subnets in which `b` is done after 1 s and `a` has done a step."""
    world = World(needs=(SMALL, SMALL), **rules)
    world.join("a", "b")
    world.now += 1
    slow = next(c.lease.subnet for c in world.leases if c.worker == "a")
    world.send(Heartbeat, world.lease_of(slow), steps=0, doing="train")
    world.finish_subnet(1 - slow)
    return world


def slow_subnet(world: World) -> int:
    return next(c.lease.subnet for c in world.leases if c.worker == "a")


def test_a_slow_subnet_is_leased_again_to_an_idle_worker_and_the_first_update_wins() -> None:
    world = slow_and_quick()
    slow, first = slow_subnet(world), world.lease_of(slow_subnet(world))
    world.send(Pushed, first, steps=1)
    world.now += 3
    world.send(Heartbeat, first, steps=1)
    second = world.lease_of(slow)
    assert (world.leases[-1].worker, world.leases[-1].step) == ("b", 1)
    assert second.attempt != first.attempt
    assert world.send(Heartbeat, first, steps=1) is Reply.ACCEPTED  # it goes on
    assert world.send(Pushed, second, steps=STEPS) is Reply.ACCEPTED
    assert [(c.cause, c.worker, c.kept_steps) for c in world.lost] == [("overtaken", "a", 1)]
    assert world.send(Heartbeat, first, steps=2) is Reply.DUPLICATE
    assert world.send(Pushed, first, steps=STEPS) is Reply.DUPLICATE
    world.store(slow)
    assert world.committed[-1].staged == ((0, STEPS), (1, STEPS))


def test_the_first_attempt_may_win_against_its_backup() -> None:
    world = slow_and_quick()
    first = world.lease_of(slow_subnet(world))
    world.now += 3
    world.send(Heartbeat, first, steps=1)
    assert world.leases[-1].worker == "b"
    assert world.send(Pushed, first, steps=STEPS) is Reply.ACCEPTED
    assert [(c.cause, c.worker, c.kept_steps) for c in world.lost] == [("overtaken", "b", 0)]


def test_when_one_of_two_attempts_is_lost_the_other_goes_on_alone() -> None:
    world = slow_and_quick()
    slow, first = slow_subnet(world), world.lease_of(slow_subnet(world))
    world.now += 3
    world.send(Heartbeat, first, steps=1)
    second = world.lease_of(slow)
    world.do(WorkerLeft, worker="a")
    assert [c.cause for c in world.lost] == ["kill"]
    assert world.send(Heartbeat, second, steps=1) is Reply.ACCEPTED
    assert world.send(Pushed, second, steps=STEPS) is Reply.ACCEPTED


def test_no_backup_where_it_would_not_pay_or_the_policy_forbids_it() -> None:
    world = slow_and_quick()
    first = world.lease_of(slow_subnet(world))
    world.now += 0.2
    world.send(Heartbeat, first, steps=3)  # nearly done
    assert len(world.leases) == 2
    world = slow_and_quick(salvage=True)
    world.now += 0.4
    world.send(Heartbeat, world.lease_of(slow_subnet(world)), steps=0)
    assert len(world.leases) == 2


def test_a_worker_known_to_be_slow_gets_a_backup_as_soon_as_the_rest_is_done() -> None:
    world = slow_and_quick(rounds=2)
    slow, first = slow_subnet(world), world.lease_of(slow_subnet(world))
    world.now += 9
    world.send(Heartbeat, first, steps=1)
    world.send(Pushed, first, steps=STEPS)
    world.store(slow)
    world.end(first)
    world.end(world.leases[-1].lease)  # the backup
    world.commit()
    (again,) = (c.lease for c in world.running if c.worker == "a")
    quick = next(c.lease for c in world.running if c.worker == "b")
    world.now += 0.1
    world.finish_subnet(quick.subnet)
    world.now += 0.25
    world.do(ClockTick)
    assert world.lease_of(again.subnet) != again
