"""Groups that train in lockstep, and the step from which they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from idletrain.exchange.messages import LeaseId, LockstepGroup, Reply
from idletrain.rounds import state
from idletrain.rounds.protocol import GrantLease, WorkerJoined, WorkerLeft
from idletrain.rounds.rendezvous import Rendezvous, common_step
from idletrain.rounds.table import RoundRules


def test_a_group_goes_on_from_the_latest_step_that_all_have() -> None:
    assert common_step([{30, 20, 10}, {20, 10}, {35, 20, 10}]) == 20
    assert common_step([{30, 20}, {40}]) == 0  # the round's beginning, which nobody need name
    assert common_step([set(), set()]) == 0


class World:
    """Two subnets in lockstep, and workers that come and go."""

    def __init__(self) -> None:
        rules = RoundRules(salvage=False, local_steps=50, rounds=1, lease_seconds=10, evaluate_every=1, lockstep=True)
        self.state = state.open_run(rules, "run", 1, 0, (1, 1), {}, 0.0, {})
        self.formed: list[int] = []
        self.rendezvous = Rendezvous(self.formed.append)
        self.leases: dict[int, LeaseId] = {}
        for name in "ab":
            self.do(WorkerJoined(now=0.0, worker=name, memory_bytes=10, leases=2))

    def do(self, event: Any) -> None:
        self.state, commands = state.advance(self.state, event)
        self.leases |= {c.lease.subnet: c.lease for c in commands if isinstance(c, GrantLease)}
        self.rendezvous.answer_waiting(self.state)

    def ask(self, subnet: int, *steps: int) -> asyncio.Task[LockstepGroup | Reply]:
        lease = self.leases[subnet]
        return asyncio.ensure_future(self.rendezvous.join(lease, f"tcp://{lease.attempt}", steps, self.state))


def played(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 10))


def test_a_group_is_formed_when_every_subnet_has_a_request() -> None:
    async def scene() -> None:
        world = World()
        first = world.ask(0, 7)
        await asyncio.sleep(0)
        assert not first.done()
        second = world.ask(1, 7, 3)
        assert await first == await second == LockstepGroup(1, 7, ("tcp://1", "tcp://2"))

    played(scene())


def test_the_others_wait_for_a_replacement_and_all_roll_back_to_its_step() -> None:
    async def scene() -> None:
        world = World()
        await asyncio.gather(world.ask(0), world.ask(1))
        world.do(WorkerLeft(now=1.0, worker="b"))
        first = world.ask(0, 31, 20)
        await asyncio.sleep(0)
        assert not first.done()
        world.do(WorkerJoined(now=2.0, worker="c", memory_bytes=10, leases=2))
        assert await world.ask(1, 20) == await first == LockstepGroup(2, 20, ("tcp://1", "tcp://3"))
        assert world.formed == [0, 20]

    played(scene())


def test_a_worker_without_a_lease_does_not_wait() -> None:
    async def scene() -> None:
        world = World()
        waiting = world.ask(0)
        await asyncio.sleep(0)
        world.do(WorkerLeft(now=1.0, worker="a"))
        assert await waiting is Reply.NOT_LEASED
        late = world.ask(1)
        await asyncio.sleep(0)
        world.rendezvous.answer_waiting(None)
        assert await late is Reply.STALE_ROUND

    played(scene())


def test_a_repeated_request_is_counted_once() -> None:
    async def scene() -> None:
        world = World()
        before = world.ask(0, 5)
        await asyncio.sleep(0)
        again = world.ask(0, 5)
        assert await before is Reply.NOT_LEASED
        assert not again.done()
        assert await world.ask(1, 5) == await again

    played(scene())


def test_a_worker_that_was_replaced_does_not_displace_its_replacement() -> None:
    async def scene() -> None:
        world = World()
        old = world.leases[1]
        world.do(WorkerLeft(now=1.0, worker="b"))
        world.do(WorkerJoined(now=2.0, worker="c", memory_bytes=10, leases=2))
        replacement = world.ask(1)
        await asyncio.sleep(0)
        assert await world.rendezvous.join(old, "tcp://b", [9], world.state) is Reply.NOT_LEASED
        assert not replacement.done()
        assert await world.ask(0) == await replacement

    played(scene())
