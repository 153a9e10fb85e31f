"""Rounds without a barrier: no worker waits, nothing is committed twice, and no neuron stays with a slow node."""

from __future__ import annotations

import random

import pytest
from world import SMALL, STEPS, World

from idletrain.exchange.messages import Reply
from idletrain.rounds import rolling_rules
from idletrain.rounds.protocol import (
    ClockTick,
    Evaluate,
    GrantLease,
    Heartbeat,
    NoticeReceived,
    Persist,
    Pushed,
    WorkerLeft,
)
from idletrain.rounds.table import Phase, RunStage


def rolling(lanes: int = 3, **rules: object) -> World:
    """A run with lanes of 10 neurons each, of a network with 15 for each: a round takes 6 whole subnets of 4 lanes."""
    settings = {"needs": (SMALL,) * lanes, "evaluate_every": 1}
    settings |= {"lane_neurons": (10,) * lanes, "open_neurons": 10 * lanes, "neurons": 15 * lanes}
    world = World(**(settings | rules))
    world.state = rolling_rules.with_lanes(world.state, [0] * lanes, 0)
    return world


def held_by(world: World, worker: str) -> list[GrantLease]:
    return [command for command in world.running if command.worker == worker]


def finish(world: World, worker: str) -> None:
    """Let a worker push the subnet that it was leased first."""
    lease = held_by(world, worker)[0].lease
    assert world.send(Pushed, lease, steps=STEPS) is Reply.ACCEPTED
    world.store(lease.subnet)
    world.end(lease)


def test_a_worker_that_is_done_goes_on_at_once_with_the_subnet_that_waits_longest() -> None:
    world = rolling(lanes=3, rounds=10)
    world.join("a", "b")
    (first,), (second,) = held_by(world, "a"), held_by(world, "b")
    for _ in range(5):
        world.now += 1
        finish(world, "a")
    numbers = [(c.lease.subnet, c.lease.round) for c in world.leases if c.worker == "a"]
    third = ({0, 1, 2} - {first.lease.subnet, second.lease.subnet}).pop()
    mine = first.lease.subnet
    assert numbers == [(mine, 0), (third, 0), (mine, 1), (third, 1), (mine, 2), (third, 2)]
    assert held_by(world, "b") == [second], "b was not waited for"


def test_a_worker_with_room_pulls_the_next_subnet_while_it_trains() -> None:
    world = rolling(lanes=3, rounds=10)
    world.join("a", "b", leases=2)
    held = [len(held_by(world, name)) for name in ("a", "b")]
    assert sorted(held) == [1, 2]


def test_a_round_is_over_once_neurons_have_had_its_steps_and_the_run_with_the_last() -> None:
    world = rolling(lanes=2, rounds=2)
    world.join("a", "b")
    rounds = []
    while not world.commit_due or world.state.round < 2:
        world.now += 1
        for name in ("a", "b"):
            if held_by(world, name) and world.state.stage is RunStage.TRAINING:
                finish(world, name)
        if world.commit_due and world.state.round < 2:
            world.commit()
            assert world.evaluation_due
            world.evaluate(0.5)
            rounds.append(world.state.neuron_steps)
    assert len(rounds) == 1
    assert rounds[0] in (3 * 10 * STEPS, 4 * 10 * STEPS)
    assert world.state.stage is RunStage.COMMITTING
    world.commit()
    assert world.state.stage is RunStage.LAST_EVALUATION
    world.evaluate(0.5)
    assert world.finished == "completed"
    assert world.state.neuron_steps == 2 * 30 * STEPS, "no more than the run needs"


def test_towards_its_end_a_run_leases_no_more_than_it_needs() -> None:
    world = rolling(lanes=3, rounds=1)  # 4.5 subnets, so 5
    world.join("a", "b", "c")
    finish(world, "a")
    assert held_by(world, "a")
    finish(world, "b")
    assert held_by(world, "b")
    finish(world, "c")
    assert not held_by(world, "c")
    assert world.finished is None


def test_a_round_waits_for_the_evaluation_before_and_training_does_not() -> None:
    world = rolling(lanes=2, rounds=5)
    world.join("a", "b")
    for _ in range(3):
        finish(world, "a")
    world.commit()
    assert world.evaluation_due
    for _ in range(3):
        finish(world, "a")
    assert (world.state.round, world.commit_due) == (1, False)
    assert held_by(world, "a")
    world.evaluate()
    assert (world.state.round, world.commit_due) == (2, True)
    assert not [c for c in world.log if isinstance(c, Evaluate) and c.waits]


def test_steps_of_a_lost_worker_are_committed_at_once_and_its_neurons_go_on() -> None:
    world = rolling(lanes=2, rounds=5)
    world.join("a", "b", "idle")
    (lost,) = held_by(world, "a")
    world.send(Pushed, lost.lease, steps=2, update=False)
    world.running.remove(lost)
    world.do(WorkerLeft, worker="a")
    assert not held_by(world, "idle"), "it would train what is about to be committed"
    world.do(ClockTick)
    assert world.log[-1] == Persist(lost.lease.subnet, lost.lease.attempt, 2)
    world.store(lost.lease.subnet)
    assert world.state.neuron_steps == 2 * 10
    opened = world.state.subnets[lost.lease.subnet]
    assert (opened.round, opened.steps) == (1, 0)
    assert held_by(world, "idle")[0].lease.round == 1
    assert world.send(Pushed, lost.lease, steps=STEPS) is Reply.STALE_ROUND


def test_a_lost_worker_without_steps_leaves_its_subnet_to_the_next() -> None:
    world = rolling(lanes=2, rounds=5)
    world.join("a", "b")
    (lost,) = held_by(world, "a")
    world.running.remove(lost)
    world.do(WorkerLeft, worker="a")
    world.join("c")
    assert (held_by(world, "c")[0].lease.subnet, held_by(world, "c")[0].lease.round) == (lost.lease.subnet, 0)


def test_a_subnet_that_a_slow_node_holds_too_long_is_committed_as_it_is() -> None:
    world = rolling(lanes=2, rounds=50)
    world.join("quick", "slow")
    (kept,) = held_by(world, "slow")
    done = 0
    while kept in world.running and world.state.subnets[kept.lease.subnet].phase is Phase.LEASED:
        for _ in range(STEPS):
            world.now += 1
            done += 1
            world.send(Heartbeat, held_by(world, "quick")[0].lease, steps=done % STEPS)
            world.send(Heartbeat, kept.lease, steps=min(1, done // 5))
        if done == 2 * STEPS:
            world.send(Pushed, kept.lease, steps=1, update=False)
        finish(world, "quick")
        world.do(ClockTick)
        assert done < 8 * STEPS, "held for ever"
    assert done >= 4 * STEPS
    assert [c.cause for c in world.lost] == ["closed"]
    world.store(kept.lease.subnet)
    assert world.state.subnets[kept.lease.subnet].round == 1


class Churn:
    """Lets workers of any speed join, leave and fail; messages come twice and late."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.world = rolling(lanes=self.dice.randint(1, 5), rounds=3)
        self._names, self._sent = iter(range(10_000)), []  # type: Iterator[int], list[LeaseId]
        self._actions = [
            self._join,
            self._leave,
            self._push,
            self._push,
            self._push,
            self._repeat,
            self._end,
            self._head,
        ]

    def act(self) -> None:
        self.world.now += self.dice.random()
        if not self.world.state.workers:
            self._join()
        self.dice.choice(self._actions)()

    def _join(self) -> None:
        self.world.join(f"m{next(self._names)}:1", leases=self.dice.choice((1, 2)))

    def _leave(self) -> None:
        gone = self.dice.choice(list(self.world.state.workers))
        self.world.do(NoticeReceived, worker=gone)  # else three in a row would be the job's own fault
        self.world.running = [c for c in self.world.running if c.worker != gone]
        self.world.do(WorkerLeft, worker=gone)

    def _push(self) -> None:
        if self.world.running:
            lease, steps = self.dice.choice(self.world.running).lease, self.dice.randint(1, STEPS)
            reply = self.world.send(Pushed, lease, steps=steps)
            self._sent.append(lease)
            if steps == STEPS and reply in (Reply.ACCEPTED, Reply.DUPLICATE):
                self.world.end(lease)

    def _repeat(self) -> None:
        if self._sent:
            self.world.send(Pushed, self.dice.choice(self._sent), steps=STEPS)

    def _end(self) -> None:
        if self.world.running:
            self.world.end(self.dice.choice(self.world.running).lease)

    def _head(self) -> None:
        """What the head does by itself."""
        if self.world.to_store:
            self.world.store(self.dice.choice(self.world.to_store))
        elif self.world.commit_due:
            self.world.commit(snapshot_due=self.dice.random() < 0.5)
        elif self.world.evaluation_due:
            self.world.evaluate()
        else:
            self.world.do(ClockTick)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_subnet_is_committed_once_and_the_run_ends(seed: int) -> None:
    churn = Churn(seed)
    for _ in range(5000):
        if churn.world.finished:
            break
        churn.act()
    world = churn.world
    assert world.finished == "completed"
    assert world.state.neuron_steps == 10 * sum(world.stored.values())
    assert world.state.neuron_steps >= world.state.rules.rounds * STEPS * world.state.rules.neurons
