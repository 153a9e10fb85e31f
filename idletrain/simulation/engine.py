"""Run a fleet through simulated time: a heap of events, and the real rules of rounds, `rounds.state.advance`.

Nodes pull, train, push progress checkpoints and updates, get notices and die. Nothing of the rules is copied here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds import protocol, rolling_rules, state
from idletrain.rounds.table import RoundRules
from idletrain.simulation.fleet import Change, Fleet, changes_of

Policy = Literal["reissue", "salvage", "rolling"]
FOREVER = 10**9  # rounds
HEARTBEAT_SECONDS = 1.0  # until a worker learns that its lease is lost
LANE_NEURONS = 1000  # of each lane, under `rolling`: any number does
TICKS_A_SUBNET = 8


@dataclass(frozen=True, kw_only=True)
class Work:
    """What nodes do.

    Attributes:
        policy: What happens when a node is lost.
        subnets: Subnets in a round; under `rolling` lanes.
        local_steps: Steps of a subnet between two exchanges.
        step_seconds: Seconds of a step on the typical node.
        pull_seconds: Seconds that a subnet takes to a node.
        push_seconds: Seconds that an update, or a progress checkpoint, takes from it.
        pull_bytes: Bytes of a subnet on its way to a node.
        push_bytes: Bytes of an update, or of a progress checkpoint.
        commit_seconds: Seconds of a commit; of a round, or under `rolling` of an update.
        progress_seconds: Time between two progress checkpoints.
        slack: Under `rolling`, neurons that are free, as a part of those that are held.
        leases: Subnets that a node holds at once: it trains one and pulls the next.
    """

    policy: Policy
    subnets: int
    local_steps: int
    step_seconds: float
    pull_seconds: float = 0.0
    push_seconds: float = 0.0
    pull_bytes: int = 0
    push_bytes: int = 0
    commit_seconds: float = 0.0
    progress_seconds: float = 5.0
    slack: float = 0.5
    leases: int = 2


@dataclass(kw_only=True)
class Outcome:
    """What a simulated run came to.

    Attributes:
        seconds: Simulated time.
        alive_seconds: SimulatedNode-seconds that nodes were there.
        useful_seconds: Those of steps that are in the network.
        steps: Local steps that are in the network.
        steps_a_neuron: Of them, those that each neuron had on average.
        rounds: Rounds, or times that neurons had a round's steps.
        transfers: Pulls, updates and progress checkpoints that travelled.
        moved_bytes: Their bytes.
        lost: Nodes that went.
        events: Events that the rules took.
    """

    seconds: float = 0.0
    alive_seconds: float = 0.0
    useful_seconds: float = 0.0
    steps: int = 0
    steps_a_neuron: float = 0.0
    rounds: int = 0
    transfers: int = 0
    moved_bytes: int = 0
    lost: int = 0
    events: int = 0

    @property
    def goodput(self) -> float:
        """Return the share of the nodes' time whose steps are in the network."""
        return self.useful_seconds / self.alive_seconds if self.alive_seconds else 0.0


@dataclass(eq=False)
class SimulatedAttempt:
    """One try of a node at a subnet."""

    lease: LeaseId
    node: SimulatedNode
    base: int
    pulled: bool = False
    began: float | None = None
    over: bool = False

    def steps_at(self, now: float, most: int) -> int:
        """Return the steps that it has made."""
        if self.began is None:
            return self.base
        return min(most, self.base + int((now - self.began) / self.node.step_seconds))


@dataclass(eq=False)
class SimulatedNode:
    """A node that is there."""

    name: str
    since: float
    step_seconds: float
    attempts: list[SimulatedAttempt] = field(default_factory=list)
    training: SimulatedAttempt | None = None
    draining: bool = False
    gone: bool = False


class Simulation:
    """One run.

    Args:
        work: What nodes do.
        fleet: When they come and go.
    """

    def __init__(self, work: Work, fleet: Fleet) -> None:
        self._work, self._fleet = work, fleet
        rolling = work.policy == "rolling"
        lanes = (LANE_NEURONS,) * work.subnets if rolling else ()
        rules = RoundRules(
            salvage=work.policy == "salvage",
            local_steps=work.local_steps,
            rounds=FOREVER,
            lease_seconds=float(FOREVER),  # a dead node's connection says so at once
            evaluate_every=FOREVER,
            lane_neurons=lanes,
            open_neurons=sum(lanes),
            neurons=round(sum(lanes) * (1 + work.slack)),
        )
        self._state = state.open_run(rules, "simulated", 1, 0, (1,) * work.subnets, {}, 0.0, {})
        if rolling:
            self._state = rolling_rules.with_lanes(self._state, [0] * work.subnets, 0)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._nodes: dict[str, SimulatedNode] = {}
        self._attempts: dict[int, SimulatedAttempt] = {}
        self._latest: dict[int, SimulatedAttempt] = {}  # at each subnet
        self._changes: Iterator[Change] = changes_of(fleet)
        self._now = 0.0
        self.outcome = Outcome()

    def run(self, seconds: float, most_events: float = math.inf) -> Outcome:
        """Let simulated time pass; return what came of it, in less time if it would take too many events."""
        self._next_change()
        self._later(0.0, self._tick)
        while self._heap and self._heap[0][0] <= seconds:
            if self.outcome.events >= most_events:
                seconds = self._now
                break
            self._now, _, act, arguments = heapq.heappop(self._heap)
            act(*arguments)
        self._now = seconds
        for node in self._nodes.values():
            self.outcome.alive_seconds += seconds - node.since
        self.outcome.seconds = seconds
        self.outcome.steps_a_neuron = self._steps_a_neuron()
        self.outcome.rounds = self._state.round
        return self.outcome

    def _steps_a_neuron(self) -> float:
        rules = self._state.rules
        return self._state.neuron_steps / rules.neurons if rules.rolling else self.outcome.steps / self._work.subnets

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _next_change(self) -> None:
        change = next(self._changes, None)
        if change is None:
            return
        notice = 0.0 if change.comes else self._fleet.notice_seconds
        if notice:
            self._at(max(self._now, change.at - notice), self._warn, change.node)
        self._at(change.at, self._change, change)

    def _change(self, change: Change) -> None:
        self._next_change()
        if change.comes:
            node = SimulatedNode(change.node, self._now, self._work.step_seconds * self._fleet.pace(change.node))
            self._nodes[change.node] = node
            leases = self._work.leases
            self._send(protocol.WorkerJoined, worker=change.node, memory_bytes=leases, leases=leases)
        elif change.node in self._nodes:
            self._leave(self._nodes[change.node])

    def _warn(self, name: str) -> None:
        """Let a node end its step, send its state and leave."""
        node = self._nodes.get(name)
        if node is None or node.draining:
            return
        node.draining = True
        self._send(protocol.NoticeReceived, worker=name)
        if node.training:
            self._checkpoint_now(node.training)
        self._later(self._work.push_seconds, self._leave, node)

    def _leave(self, node: SimulatedNode) -> None:
        if node.gone:
            return
        node.gone = True
        del self._nodes[node.name]
        self.outcome.alive_seconds += self._now - node.since
        self.outcome.lost += 1
        for attempt in node.attempts:
            attempt.over = True
        self._send(protocol.WorkerLeft, worker=node.name)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _grant(self, command: protocol.GrantLease) -> None:
        attempt = SimulatedAttempt(command.lease, self._nodes[command.worker], command.step)
        former = self._latest.get(command.lease.subnet)
        if former and not command.backup:  # it waited behind another subnet
            self._later(HEARTBEAT_SECONDS, self._end, former)
        self._attempts[command.lease.attempt] = self._latest[command.lease.subnet] = attempt
        attempt.node.attempts.append(attempt)
        self._count_transfer(self._work.pull_bytes)
        self._later(self._work.pull_seconds, self._pulled, attempt)

    def _pulled(self, attempt: SimulatedAttempt) -> None:
        attempt.pulled = True
        self._train_next(attempt.node)

    def _train_next(self, node: SimulatedNode) -> None:
        if node.training or node.gone or node.draining:
            return
        ready = next((attempt for attempt in node.attempts if attempt.pulled and attempt.began is None), None)
        if ready is None:
            return
        node.training, ready.began = ready, self._now
        self._send(protocol.Heartbeat, lease=ready.lease, steps=ready.base)
        self._later((self._work.local_steps - ready.base) * node.step_seconds, self._trained, ready)
        self._later(self._work.progress_seconds, self._checkpoint, ready)

    def _checkpoint(self, attempt: SimulatedAttempt) -> None:
        if attempt.over or attempt.node.training is not attempt or attempt.node.draining:
            return
        self._checkpoint_now(attempt)
        self._later(max(self._work.progress_seconds, self._work.push_seconds), self._checkpoint, attempt)

    def _checkpoint_now(self, attempt: SimulatedAttempt) -> None:
        steps = attempt.steps_at(self._now, self._work.local_steps - 1)
        if steps > attempt.base:
            self._later(self._work.push_seconds, self._arrive, attempt, steps)

    def _trained(self, attempt: SimulatedAttempt) -> None:
        node = attempt.node
        if attempt.over or node.training is not attempt or node.draining:
            return
        node.training = None
        self._later(self._work.push_seconds, self._arrive, attempt, self._work.local_steps)
        self._train_next(node)

    def _arrive(self, attempt: SimulatedAttempt, steps: int) -> None:
        if attempt.over or attempt.node.gone:
            return
        self._count_transfer(self._work.push_bytes)
        whole = steps == self._work.local_steps
        reply = self._send(protocol.Pushed, lease=attempt.lease, steps=steps, update=whole)
        if whole or reply is not Reply.ACCEPTED:
            self._end(attempt)

    def _end(self, attempt: SimulatedAttempt) -> None:
        node = attempt.node
        if attempt.over:
            return
        attempt.over = True
        node.attempts.remove(attempt)
        node.training = None if node.training is attempt else node.training
        self._send(protocol.AttemptEnded, lease=attempt.lease, worker=node.name)
        self._train_next(node)

    # --- the head -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._send(protocol.ClockTick)
        self._later(self._work.local_steps * self._work.step_seconds / TICKS_A_SUBNET, self._tick)

    def _send(self, kind: type[protocol.RoundEvent], **fields: Any) -> Reply:
        """Advance the state by an event and carry out what follows; return the reply to a push."""
        self.outcome.events += 1
        before, reply = self._state, Reply.ACCEPTED
        self._state, commands = state.advance(before, kind(now=self._now, **fields))
        for command in commands:
            match command:
                case protocol.Respond(answer):
                    reply = answer
                case protocol.GrantLease():
                    self._grant(command)
                case protocol.Persist():
                    delay = self._work.commit_seconds if self._state.rules.rolling else 0.0
                    self._later(delay, self._store, command)
                case protocol.LeaseLost():
                    self._lost(command)
                case protocol.Commit():
                    self._later(0.0 if self._state.rules.rolling else self._work.commit_seconds, self._committed)
                case protocol.Evaluate():
                    self._send(protocol.Evaluated, accuracy=None, measured=False)
        return reply

    def _store(self, command: protocol.Persist) -> None:
        attempt = self._attempts.get(command.attempt)
        if attempt and command.steps == self._work.local_steps:
            own = command.steps - attempt.base
            self.outcome.steps += own
            self.outcome.useful_seconds += own * attempt.node.step_seconds
        rules = self._state.rules
        of_lane = rules.lane_neurons[command.subnet] * command.steps if rules.rolling else 0
        self._send(protocol.Persisted, subnet=command.subnet, neuron_steps=self._state.neuron_steps + of_lane)

    def _lost(self, command: protocol.LeaseLost) -> None:
        """Count what is kept of a lost lease; its worker, if it lives, learns of it."""
        attempt = self._attempts[command.attempt]
        self.outcome.steps += command.kept_steps
        self.outcome.useful_seconds += command.kept_steps * attempt.node.step_seconds
        if not attempt.node.gone:
            self._later(HEARTBEAT_SECONDS, self._end, attempt)

    def _committed(self) -> None:
        needs = () if self._state.rules.rolling else (1,) * self._work.subnets
        self._send(protocol.Committed, needs=needs, snapshot_due=False)

    def _count_transfer(self, count: int) -> None:
        self.outcome.transfers += 1
        self.outcome.moved_bytes += count

    def _later(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        self._at(self._now + seconds, act, *arguments)

    def _at(self, at: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._order), act, arguments))
