"""Every order of events: the run ends, and a subnet of a round is accepted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds import lockstep_rules, state
from idletrain.rounds.protocol import (
    AttemptEnded,
    ClockTick,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Finish,
    GrantLease,
    Heartbeat,
    KeepProgress,
    LeaseLost,
    NoticeReceived,
    PartArrived,
    Persist,
    Persisted,
    Pushed,
    Respond,
    RoundEvent,
    StopRequested,
    WorkerJoined,
    WorkerLeft,
)
from idletrain.rounds.state import IllegalEventError, advance
from idletrain.rounds.table import Phase, RoundRules, RoundState, RunStage, SubnetTable, WorkerState

STEPS = 4
SMALL, LARGE = 10, 100
FAULTS = (Reply.NOT_FINITE, Reply.CORRUPT, Reply.WRONG_SHAPE)


class World:
    """A run whose events a test chooses; carries out commands only as the test says, and checks each of them."""

    def __init__(self, **rules: object) -> None:
        settings_ = {"salvage": False, "local_steps": STEPS, "rounds": 3, "lease_seconds": 10.0, "evaluate_every": 2}
        needs = rules.pop("needs", (SMALL, LARGE, SMALL))
        staged, round_ = rules.pop("staged", {}), rules.pop("round_", 0)
        self.needs, self.alone = needs, rules.pop("alone", frozenset())
        self.now = 0.0
        workers = {name: WorkerState(memory_bytes=LARGE, leases=2) for name in rules.pop("workers", ())}
        rules_ = RoundRules(**(settings_ | rules))
        self.state = state.open_run(rules_, "run", 1, round_, needs, staged, self.now, workers, self.alone)
        self.leases: list[GrantLease] = []
        self.running: list[GrantLease] = []  # attempts whose tasks have not ended
        self.to_store: list[int] = []
        self.stored: dict[tuple[int, int], int] = {}
        self.committed: list[Commit] = []
        self.commit_due = self.evaluation_due = False
        self.lost: list[LeaseLost] = []
        self.finished: str | None = None
        self.log: list[state.Command] = []

    def do(self, kind: type[RoundEvent], **fields: object) -> tuple[state.Command, ...]:
        if kind is Pushed:  # of fewer steps than all, a checkpoint, unless the test says otherwise
            fields.setdefault("update", fields["steps"] == STEPS)
        event = kind(now=self.now, **fields)
        before = self.state
        self.state, commands = advance(before, event)
        answers = [c for c in commands if isinstance(c, Respond)]
        assert len(answers) == isinstance(event, Heartbeat | Pushed | PartArrived)
        for command in commands:
            self._check(command)
        self._check_state(before)
        self.log += commands
        return commands

    def tell(self, kind: type[RoundEvent], lease: LeaseId, **fields: object) -> Reply:
        (answer,) = [c for c in self.do(kind, lease=lease, **fields) if isinstance(c, Respond)]
        return answer.reply

    def join(self, *names: str, memory_bytes: int = LARGE, leases: int = 1, cohort: str = "") -> None:
        for name in names:
            self.do(WorkerJoined, worker=name, memory_bytes=memory_bytes, leases=leases, cohort=cohort)

    def lease_of(self, subnet: int) -> LeaseId:
        return next(c.lease for c in reversed(self.leases) if c.lease.subnet == subnet)

    def finish_subnet(self, subnet: int) -> None:
        assert self.tell(Pushed, self.lease_of(subnet), steps=STEPS) is Reply.ACCEPTED
        self.store(subnet)
        self.end(self.lease_of(subnet))

    def store(self, subnet: int) -> None:
        self.to_store.remove(subnet)
        self.do(Persisted, subnet=subnet)

    def end(self, lease: LeaseId, *, failed: bool = False, unfit: bool = False) -> None:
        self.running = [c for c in self.running if c.lease != lease]
        (worker,) = (c.worker for c in self.leases if c.lease == lease)
        self.do(AttemptEnded, lease=lease, worker=worker, failed=failed, out_of_memory=unfit)

    def commit(self, *, snapshot_due: bool = False) -> None:
        self.commit_due = False
        self.do(Committed, needs=self.needs, exclusive=self.alone, snapshot_due=snapshot_due)

    def evaluate(self, accuracy: float | None = None) -> None:
        self.evaluation_due = False
        self.do(Evaluated, accuracy=accuracy)

    def drive(self) -> None:
        """A fair world: new workers come, each lease is finished, every command is carried out."""
        for turn in range(200):
            if self.finished:
                return
            self.now += 1
            self.join(*(f"fresh{turn}-{i}" for i in range(2)))
            for k in list(self.to_store):
                self.store(k)
            if self.commit_due:
                self.commit()
            if self.evaluation_due:
                self.evaluate()
            for given_ in list(self.running):
                self.tell(Pushed, given_.lease, steps=STEPS)
                self.end(given_.lease)
            self.do(ClockTick)
        raise AssertionError(f"stuck in {self.state}")

    def _check(self, command: state.Command) -> None:
        rules = self.state.rules
        match command:
            case GrantLease(lease, _, step):
                assert lease.attempt not in {c.lease.attempt for c in self.leases}
                assert step < rules.local_steps or rules.lockstep
                self.leases.append(command)
                self.running.append(command)
            case Persist(k, _, steps, covered):
                key = (self.state.round, k)
                assert not covered or rules.salvage
                assert key not in self.stored, "accepted twice"
                assert steps == rules.local_steps or rules.salvage
                assert 0 < steps <= rules.local_steps
                self.stored[key] = steps
                self.to_store.append(k)
            case Commit(round_, staged):
                assert round_ not in {c.round for c in self.committed}
                assert staged
                assert not self.state.evaluating
                assert rules.salvage or len(staged) == len(self.needs)
                assert rules.salvage or all(steps == rules.local_steps for _, steps in staged)
                self.committed.append(command)
                self.commit_due = True
            case Evaluate():
                assert not self.evaluation_due
                self.evaluation_due = True
            case LeaseLost():
                assert command.kept_steps >= 0
                assert command.lost_steps >= 0
                self.lost.append(command)
            case Finish(status):
                assert self.finished is None
                self.finished = status

    def _check_state(self, before: RoundState) -> None:
        now = self.state
        if now.round == before.round:
            for old, new in zip(before.subnets, now.subnets, strict=True):
                assert new.steps >= old.steps, "stored steps are gone"
        assert now.subnets == SubnetTable.of(now.subnets)
        if now.stage is RunStage.DONE:
            return
        assert all(s.phase is Phase.LEASED for s in now.subnets if s.queued)
        for name, worker in now.workers.items():
            held = [s for s in now.subnets if s.phase is Phase.LEASED and s.worker == name]
            assert {s.attempt for s in held} <= worker.attempts.keys()
            assert len(worker.attempts) <= worker.leases
            assert sum(s.need_bytes for s in held) <= worker.memory_bytes
            assert len(held) == 1 or not any(s.exclusive for s in held)
            assert len(held) <= 1 or not now.rules.lockstep
            first = next(iter(worker.attempts), None)
            assert all(s.attempt != first for s in held if s.queued), "it trains what it is to train next"


ACTIONS = (
    "join",
    "leave",
    "notice",
    "beat",
    "push",
    "progress",
    "part",
    "part",
    "fault",
    "foreign",
    "end",
    "tick",
    "store",
    "commit",
)
EVENTS = st.lists(
    st.tuples(st.sampled_from((*ACTIONS, "evaluate", "illegal")), st.integers(0, 50), st.integers(0, 50)), max_size=80
)
ALONE = st.frozensets(st.integers(0, 2))


def play(world: World, action: str, a: int, b: int) -> None:  # noqa: C901 (one case an action)
    """Turn a drawn action into an event that the coordinator could send in this state, or one that a zombie could."""
    name = f"w{a % 4}"
    lease = world.leases[-1 - a % min(len(world.leases), 8)].lease if world.leases else None
    match action:
        case "join" if name not in world.state.workers:
            world.join(name, memory_bytes=(2 * LARGE, LARGE, SMALL)[b % 3], leases=1 + b % 2)
        case "leave":
            world.do(WorkerLeft, worker=name)
        case "notice":
            world.do(NoticeReceived, worker=name)
        case "beat" if lease:
            world.tell(Heartbeat, lease, steps=b % (STEPS + 1))
        case "push" if lease:
            world.tell(Pushed, lease, steps=STEPS)
        case "progress" if lease:
            world.tell(Pushed, lease, steps=b % STEPS)
        case "part" if lease and world.state.rules.salvage:
            world.tell(Pushed, lease, steps=1 + b % STEPS, update=True)
        case "part" if lease:
            world.tell(
                PartArrived, lease, steps=1 + b % STEPS, norm_fraction=b / 50 if world.state.rules.salvage else 0.0
            )
        case "fault" if lease:
            world.tell(Pushed, lease, steps=1 + b % STEPS, fault=FAULTS[b % 3])
        case "foreign" if lease:
            other = (
                replace(lease, epoch=lease.epoch - 1),
                replace(lease, run="another"),
                replace(lease, subnet=lease.subnet + 7),
                replace(lease, subnet=-1),
                replace(lease, attempt=lease.attempt + 1000),
                replace(lease, round=lease.round + 1),
            )[b % 6]
            before = world.state
            assert world.tell(Pushed if b % 4 else Heartbeat, other, steps=STEPS) is not Reply.ACCEPTED
            assert world.state.subnets == before.subnets or world.state.rules.salvage
        case "end" if world.running:
            world.end(world.running[a % len(world.running)].lease, failed=b % 3 == 0, unfit=b % 3 == 1)
        case "tick":
            world.now += b
            world.do(ClockTick)
        case "store" if world.to_store:
            world.store(world.to_store[a % len(world.to_store)])
        case "commit" if world.commit_due:
            world.commit(snapshot_due=bool(b % 2))
        case "evaluate" if world.evaluation_due:
            world.evaluate(None)
        case "illegal":
            refuse_illegal(world)


def refuse_illegal(world: World) -> None:
    """Events that cannot happen now are refused and leave the state as it was."""
    illegal: list[RoundEvent] = []
    if world.state.stage is not RunStage.DONE:
        stray = [k for k, s in enumerate(world.state.subnets) if s.phase is not Phase.STORING]
        illegal += [Persisted(now=world.now, subnet=k) for k in stray]
        if world.state.stage is not RunStage.COMMITTING:
            illegal.append(Committed(now=world.now, needs=world.needs, snapshot_due=False))
        if not world.state.evaluating:
            illegal.append(Evaluated(now=world.now, accuracy=1.0))
    before, workers = world.state, dict(world.state.workers)
    for event in illegal:
        with pytest.raises(IllegalEventError):
            advance(world.state, event)
    assert world.state == before
    assert world.state.workers == workers


@settings(deadline=None, max_examples=400)
@given(EVENTS, ALONE)
def test_reissue_ends_and_takes_every_subnet_once_with_all_its_steps(
    events: list[tuple[str, int, int]], alone: frozenset[int]
) -> None:
    world = World(alone=alone)
    for event in events:
        play(world, *event)
    world.drive()
    if world.finished == "completed":
        assert world.stored == {(r, k): STEPS for r in range(3) for k in range(3)}
        assert [c.round for c in world.committed] == [0, 1, 2]
    else:
        assert world.finished in ("diverged", "failed")


@settings(deadline=None, max_examples=400)
@given(EVENTS)
def test_lockstep_ends_and_takes_all_subnets_of_a_round_at_once(events: list[tuple[str, int, int]]) -> None:
    world = World(lockstep=True)
    for event in events:
        stored = len(world.stored)
        play(world, *event)
        assert len(world.stored) - stored in (0, 3)
    world.drive()
    if world.finished == "completed":
        assert world.stored == {(r, k): STEPS for r in range(3) for k in range(3)}
    else:
        assert world.finished in ("diverged", "failed")


@settings(deadline=None, max_examples=400)
@given(EVENTS, ALONE)
def test_salvage_ends_and_takes_every_subnet_at_most_once(
    events: list[tuple[str, int, int]], alone: frozenset[int]
) -> None:
    world = World(salvage=True, alone=alone)
    for event in events:
        play(world, *event)
    world.drive()
    if world.finished == "completed":
        assert [c.round for c in world.committed] == [0, 1, 2]
        for commit in world.committed:
            assert dict(commit.staged) == {k: s for (r, k), s in world.stored.items() if r == commit.round}
    else:
        assert world.finished in ("diverged", "failed")


@settings(deadline=None, max_examples=100)
@given(EVENTS, st.booleans())
def test_a_stop_ends_the_run_at_any_point_and_nothing_is_taken_after_it(
    events: list[tuple[str, int, int]], salvage: bool
) -> None:
    world = World(salvage=salvage)
    for event in events:
        play(world, *event)
    if world.finished:
        return
    world.do(StopRequested)
    if world.commit_due:  # what is being written is written
        world.commit()
    assert world.finished == "stopped"
    for lease in world.leases:
        assert world.tell(Pushed, lease.lease, steps=STEPS) is Reply.STALE_ROUND
        assert world.tell(Heartbeat, lease.lease, steps=1) is Reply.STALE_ROUND
    world.do(ClockTick)
    assert world.state.stage is RunStage.DONE


# --- leases -------------------------------------------------------------------------------------------------------


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
    assert not world.state.subnets[first.subnet].queued
    assert world.state.subnets[second.subnet].queued
    world.finish_subnet(first.subnet)  # who takes the last one is decided by who is done first
    assert world.leases[-1].worker == "a"
    assert not world.state.subnets[second.subnet].queued


def test_in_lockstep_each_subnet_has_a_worker_for_itself_and_finished_workers_keep_their_leases() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 3)
    world.join("a", "b", leases=2)
    assert [(c.lease.subnet, c.worker) for c in world.leases] == [(0, "a"), (1, "b")]
    world.join("c", leases=2)
    assert world.leases[-1].worker == "c"
    for k in (0, 1):
        assert world.tell(Pushed, world.lease_of(k), steps=STEPS) is Reply.ACCEPTED
        assert world.tell(Heartbeat, world.lease_of(k), steps=STEPS) is Reply.ACCEPTED
    assert world.to_store == []
    world.do(WorkerLeft, worker="a")  # its checkpoint of all steps stays
    assert world.tell(Pushed, world.lease_of(2), steps=STEPS) is Reply.ACCEPTED
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
        assert world.tell(Pushed, world.lease_of(k), steps=STEPS - 1) is Reply.ACCEPTED
    world.end(world.lease_of(0))
    assert [lost.kept_steps for lost in world.lost] == [STEPS - 1] * 2
    assert {(c.worker, c.step) for c in world.leases[2:]} == {("c", STEPS - 1), ("d", STEPS - 1)}


def test_checkpoints_after_a_group_s_start_do_not_count() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b")
    assert world.tell(Pushed, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED
    assert world.tell(Pushed, world.lease_of(1), steps=1) is Reply.ACCEPTED
    world.state = lockstep_rules.rolled_back(world.state, 1, (1, 1))
    assert [subnet.steps for subnet in world.state.subnets] == [1, 1]
    assert world.tell(Pushed, world.lease_of(1), steps=STEPS) is Reply.ACCEPTED
    assert world.to_store == []
    assert world.tell(Pushed, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED  # again, of this group
    assert world.to_store == [0, 1]


def test_a_group_s_start_counts_as_stored_only_where_it_is() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b")
    assert world.tell(Pushed, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED
    world.state = lockstep_rules.rolled_back(world.state, 2, (1, 0))  # the members have step 2
    assert [(subnet.steps, subnet.reported_steps) for subnet in world.state.subnets] == [(1, 2), (0, 0)]
    assert world.tell(Pushed, world.lease_of(0), steps=2) is Reply.ACCEPTED


def test_without_lockstep_all_cohorts_train() -> None:
    world = World(needs=(SMALL,) * 2)
    world.join("a", cohort="Xeon")
    world.join("b", cohort="Epyc")
    assert {c.worker for c in world.leases} == {"a", "b"}


def test_in_lockstep_a_finished_worker_that_left_is_replaced_while_others_train() -> None:
    world = World(lockstep=True, needs=(SMALL,) * 2)
    world.join("a", "b", leases=2)
    world.tell(Pushed, world.lease_of(0), steps=STEPS)
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


def test_the_last_subnets_of_a_round_wait_for_the_worker_that_is_done_first() -> None:
    world = World(needs=(SMALL,) * 3, workers=("a", "b"))
    world.do(ClockTick)
    assert Counter(c.worker for c in world.leases) == {"a": 1, "b": 1}
    world.finish_subnet(world.leases[1].lease.subnet)
    assert world.leases[2].worker == world.leases[1].worker


def test_a_joiner_takes_over_what_waits_behind_another_subnet() -> None:
    world = World(needs=(SMALL,) * 2)
    world.join("a", leases=2)
    ahead = world.leases[1].lease
    world.join("b", leases=2)
    assert (world.leases[2].worker, world.leases[2].lease.subnet) == ("b", ahead.subnet)
    assert not world.state.subnets[ahead.subnet].queued
    assert world.tell(Heartbeat, ahead, steps=0) is Reply.NOT_LEASED
    assert world.lost == []


def test_a_second_subnet_must_fit_beside_the_first() -> None:
    world = World(needs=(LARGE,) * 4)
    world.join("a", memory_bytes=2 * LARGE - 1, leases=2)
    assert len(world.leases) == 1


def test_a_subnet_trained_out_of_core_has_its_worker_for_itself() -> None:
    world = World(needs=(SMALL,) * 3, alone=frozenset({0}))
    world.join("a", leases=2)
    assert [c.lease.subnet for c in world.leases] == [0]
    world.finish_subnet(0)
    assert [c.lease.subnet for c in world.leases] == [0, 1, 2]


def test_nothing_is_trained_out_of_core_beside_a_subnet_in_core() -> None:
    world = World(needs=(LARGE, SMALL, SMALL), alone=frozenset({1, 2}))
    world.join("a", leases=2)
    assert [c.lease.subnet for c in world.leases] == [0]
    world.finish_subnet(0)
    assert [c.lease.subnet for c in world.leases] == [0, 1]


def test_a_worker_that_a_subnet_did_not_fit_gets_smaller_ones() -> None:
    world = World(needs=(LARGE, SMALL), alone=frozenset({0}))
    world.join("a")
    assert [c.lease.subnet for c in world.leases] == [0]
    world.end(world.lease_of(0), unfit=True)
    assert [c.lease.subnet for c in world.leases] == [0, 1]
    world.join("b")
    assert (world.leases[-1].worker, world.leases[-1].lease.subnet) == ("b", 0)


def test_a_worker_that_dies_loses_both_its_subnets_but_steps_of_the_first_alone() -> None:
    world = World(needs=(SMALL,) * 2)
    world.join("a", leases=2)
    training, ahead = (c.lease for c in world.leases)
    world.now = 1.0
    assert world.tell(Heartbeat, training, steps=3) is Reply.ACCEPTED
    assert world.tell(Heartbeat, ahead, steps=0) is Reply.ACCEPTED
    world.now = 1.5
    world.do(WorkerLeft, worker="a")
    assert [(c.subnet, c.lost_steps) for c in world.lost] == [(training.subnet, STEPS), (ahead.subnet, 0)]
    world.drive()
    assert world.finished == "completed"


def test_a_subnet_that_no_worker_can_hold_waits_for_one_that_can() -> None:
    world = World(needs=(LARGE,))
    world.join("small", memory_bytes=SMALL)
    assert world.leases == []
    world.join("large")
    assert [c.worker for c in world.leases] == ["large"]


def test_a_lease_without_a_beat_is_over_after_its_seconds_and_goes_on_elsewhere_from_the_checkpoint() -> None:
    world = World(needs=(SMALL,), lease_seconds=10.0)
    world.join("a")
    first = world.lease_of(0)
    world.now = 5.0
    assert world.tell(Pushed, first, steps=2) is Reply.ACCEPTED
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
        assert world.tell(Heartbeat, world.lease_of(0), steps=1) is Reply.ACCEPTED
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
    assert world.tell(Pushed, drained, steps=3) is Reply.ACCEPTED
    world.end(drained)
    assert len(world.leases) == 1
    assert [(c.cause, c.kept_steps, c.lost_steps) for c in world.lost] == [("notice", 3, 0)]
    world.join("b")
    assert {(c.worker, c.step) for c in world.leases[1:]} <= {("b", 3), ("b", 0)}


def test_a_killed_worker_s_steps_since_its_last_beat_are_estimated_at_its_pace() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    world.now = 5.0
    world.tell(Heartbeat, world.lease_of(0), steps=50)
    world.now = 6.0
    world.do(WorkerLeft, worker="a")
    assert [(c.cause, c.kept_steps, c.lost_steps) for c in world.lost] == [("kill", 0, 60)]


def test_a_beat_from_before_the_pull_does_not_make_lost_steps_negative() -> None:
    """A new attempt beats with step 0 until it has pulled the checkpoint that it goes on from."""
    world = World(needs=(SMALL,))
    world.join("a")
    world.tell(Pushed, world.lease_of(0), steps=3)
    world.do(WorkerLeft, worker="a")
    world.join("b")
    world.now = 2.0
    assert world.tell(Heartbeat, world.lease_of(0), steps=0) is Reply.ACCEPTED
    world.now = 3.0
    world.do(WorkerLeft, worker="b")
    assert world.lost[-1].lost_steps == 0


def test_an_attempt_that_ends_without_its_update_is_leased_again() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    world.end(world.lease_of(0))
    assert [c.cause for c in world.lost] == ["error"]
    assert len(world.leases) == 2


def test_a_subnet_whose_attempts_end_in_three_errors_of_the_code_ends_the_run() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    for nth in range(3):
        assert world.finished is None
        world.end(world.lease_of(0), failed=True)
        assert world.finished == (None if nth < 2 else "failed")


def test_a_worker_on_which_attempts_fail_twice_is_passed_over() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("a", "b")
    for _ in range(2):
        world.end(world.lease_of(0), failed=True)
    assert [c.worker for c in world.running] == ["b"]
    world.finish_subnet(1)
    assert [(c.worker, c.lease.subnet) for c in world.running] == [("b", 0)]
    world.finish_subnet(0)
    assert world.commit_due


def test_errors_after_the_update_is_stored_do_not_count() -> None:
    world = World(needs=(SMALL,), rounds=9)
    world.join("a")
    for _ in range(4):
        lease = world.lease_of(0)
        assert world.tell(Pushed, lease, steps=STEPS) is Reply.ACCEPTED
        world.end(lease, failed=True)
        world.store(0)
        world.commit()
        if world.evaluation_due:
            world.evaluate()
    assert world.finished is None


# --- replies ------------------------------------------------------------------------------------------------------


def test_pushes_are_answered_by_what_became_of_their_lease() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("a", "b")
    own, other = world.lease_of(0), world.lease_of(1)
    reply = {
        "another run": world.tell(Pushed, replace(own, run="x"), steps=STEPS),
        "another epoch": world.tell(Pushed, replace(own, epoch=0), steps=STEPS),
        "another round": world.tell(Pushed, replace(own, round=1), steps=STEPS),
        "no such subnet": world.tell(Pushed, replace(own, subnet=2), steps=STEPS),
        "a negative subnet": world.tell(Pushed, replace(other, subnet=-1), steps=STEPS),
        "another attempt": world.tell(Pushed, replace(own, attempt=77), steps=STEPS),
        "mine": world.tell(Pushed, own, steps=STEPS),
        "mine again": world.tell(Pushed, own, steps=STEPS),
    }
    assert reply == {
        "another run": Reply.STALE_EPOCH,
        "another epoch": Reply.STALE_EPOCH,
        "another round": Reply.STALE_ROUND,
        "no such subnet": Reply.STALE_ROUND,
        "a negative subnet": Reply.STALE_ROUND,
        "another attempt": Reply.NOT_LEASED,
        "mine": Reply.ACCEPTED,
        "mine again": Reply.DUPLICATE,
    }


def test_a_checkpoint_that_arrives_after_a_later_one_is_a_duplicate() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    assert world.do(Pushed, lease=world.lease_of(0), steps=3) == (Respond(Reply.ACCEPTED), KeepProgress(0))
    assert world.do(Pushed, lease=world.lease_of(0), steps=2) == (Respond(Reply.DUPLICATE),)
    assert world.do(Pushed, lease=world.lease_of(0), steps=0) == (Respond(Reply.DUPLICATE),)
    assert world.state.subnets[0].steps == 3


def test_a_push_while_the_round_commits_is_stale() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    lease = world.lease_of(0)
    world.finish_subnet(0)
    assert world.commit_due
    assert world.tell(Pushed, lease, steps=STEPS) is Reply.STALE_ROUND


# --- damage and divergence ------------------------------------------------------------------------------------------


def test_three_attempts_at_a_subnet_that_end_in_nan_end_the_run() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    for nth in range(3):
        assert world.finished is None
        assert world.tell(Pushed, world.lease_of(0), steps=STEPS, fault=Reply.NOT_FINITE) is Reply.NOT_FINITE
        if nth < 2:
            world.end(world.lease_of(0))
    assert world.finished == "diverged"


def test_nan_does_not_count_against_the_worker() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    world.tell(Pushed, world.lease_of(0), steps=STEPS, fault=Reply.NOT_FINITE)
    assert world.state.workers["a"].faults == 0


def damage_twice(world: World) -> None:
    for fault in (Reply.CORRUPT, Reply.WRONG_SHAPE):
        assert world.leases[-1].worker == "a"
        assert world.tell(Pushed, world.lease_of(0), steps=STEPS, fault=fault) is fault
        world.end(world.lease_of(0))


def test_after_two_damaged_pushes_a_worker_is_leased_nothing_that_another_can_take() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    damage_twice(world)
    assert world.leases[-1].worker == "a"  # nobody else is there
    world.join("b")
    world.tell(Pushed, world.lease_of(0), steps=STEPS, fault=Reply.CORRUPT)
    assert world.leases[-1].worker == "b"
    world.end(world.leases[-2].lease)
    world.do(WorkerLeft, worker="b")
    assert world.leases[-1].worker == "a"


def test_a_stop_during_a_commit_waits_for_its_end() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    world.finish_subnet(0)
    assert world.state.stage is RunStage.COMMITTING
    world.do(StopRequested)
    assert world.finished is None
    world.do(Committed, needs=(SMALL,), snapshot_due=False)
    assert world.finished == "stopped"
    assert world.state.round == 1


# --- rounds ---------------------------------------------------------------------------------------------------------


def test_a_round_is_committed_when_all_is_staged_and_the_next_opens_with_its_own_needs() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("a", "b")
    world.finish_subnet(0)
    assert not world.commit_due
    world.finish_subnet(1)
    assert world.committed == [Commit(0, ((0, STEPS), (1, STEPS)))]
    world.needs = (LARGE, SMALL)
    world.commit()
    assert world.state.round == 1
    assert [s.need_bytes for s in world.state.subnets] == [LARGE, SMALL]


def test_a_commit_waits_until_the_evaluation_ends() -> None:
    world = World(needs=(SMALL,), evaluate_every=1)
    world.join("a")
    world.finish_subnet(0)
    world.commit()
    assert world.evaluation_due
    world.finish_subnet(0)
    assert not world.commit_due
    world.evaluate(0.5)
    assert world.commit_due


def test_the_network_is_evaluated_every_so_many_rounds_when_a_snapshot_is_due_and_at_the_end() -> None:
    world = World(needs=(SMALL,), rounds=5, evaluate_every=3)
    world.join("a")
    for due in (False, True, False, False, False):
        world.finish_subnet(0)
        world.commit(snapshot_due=due)
        if world.evaluation_due:
            world.evaluate()
    evaluations = [c for c in world.log if isinstance(c, Evaluate)]
    assert evaluations == [Evaluate(False, True), Evaluate(True, False), Evaluate(True, True)]
    assert world.finished == "completed"


def test_the_run_ends_when_the_target_accuracy_is_reached() -> None:
    world = World(needs=(SMALL,), evaluate_every=1, target=0.9)
    world.join("a")
    world.finish_subnet(0)
    world.commit()
    world.evaluate(0.89)
    assert world.finished is None
    world.finish_subnet(0)
    world.commit()
    world.evaluate(0.9)
    assert world.finished == "reached"


def test_a_restart_trains_only_what_is_not_staged() -> None:
    world = World(needs=(SMALL, SMALL), staged={0: STEPS})
    world.join("a", "b")
    assert [c.lease.subnet for c in world.leases] == [1]
    world.finish_subnet(1)
    assert world.committed == [Commit(0, ((0, STEPS), (1, STEPS)))]


def test_a_restart_with_everything_staged_commits_at_the_first_tick() -> None:
    world = World(needs=(SMALL,), staged={0: STEPS})
    world.do(ClockTick)
    assert world.commit_due


@pytest.mark.parametrize("round_", [3, 5])
def test_a_restart_after_the_last_commit_only_evaluates_and_ends(round_: int) -> None:
    """The head may have died after the last commit, and a job may be resumed with fewer rounds."""
    world = World(rounds=3, round_=round_)
    assert world.state.stage is RunStage.LAST_EVALUATION
    world.join("a")
    world.do(ClockTick)
    assert world.leases == []
    world.evaluate(0.5)
    assert world.finished == "completed"


# --- salvage --------------------------------------------------------------------------------------------------------


def test_salvage_closes_a_round_whose_last_subnet_was_lost_with_the_checkpoint_that_it_left() -> None:
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.tell(Pushed, world.lease_of(1), steps=2)
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
    world.tell(Pushed, world.lease_of(1), steps=1)
    world.now = 6.0
    world.tell(Heartbeat, world.lease_of(1), steps=1)
    assert world.to_store == []
    world.now = 6.1
    world.do(ClockTick)
    assert [(c.cause, c.kept_steps) for c in world.lost] == [("closed", 1)]
    world.store(1)
    assert world.committed == [Commit(0, ((0, STEPS), (1, 1)))]
    assert world.tell(Pushed, world.lease_of(1), steps=STEPS) is Reply.STALE_ROUND


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


def test_salvage_waits_longer_after_a_round_that_it_cut_short() -> None:
    world = World(salvage=True, needs=(SMALL, SMALL))
    world.join("a", "b")
    world.now = 4.0
    world.finish_subnet(0)
    world.now = 6.1
    world.do(ClockTick)
    assert [c.cause for c in world.lost] == ["closed"]
    world.commit()
    world.end(world.lease_of(1))
    world.now = 10.1
    world.finish_subnet(0)
    world.now = 6.1 + 8.0
    world.tell(Heartbeat, world.lease_of(1), steps=1)
    world.do(ClockTick)
    assert [c.cause for c in world.lost] == ["closed"]


def test_salvage_stores_the_rows_of_an_update_in_flight_when_its_worker_dies() -> None:
    world = World(salvage=True, needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    lease = world.lease_of(0)
    (holder,) = (c.worker for c in world.leases if c.lease == lease)
    world.tell(Pushed, lease, steps=1)
    world.tell(PartArrived, lease, steps=STEPS, norm_fraction=0.5)
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
    world.tell(Pushed, lease, steps=3)
    world.tell(PartArrived, lease, steps=STEPS, norm_fraction=0.5)
    world.do(WorkerLeft, worker=holder)
    assert [c.kept_steps for c in world.lost] == [3]
    assert world.leases[-1].lease.subnet == 0
    assert world.leases[-1].step == 3
    world.tell(PartArrived, world.lease_of(0), steps=STEPS)  # of the new attempt nothing that is of use has come
    world.do(WorkerLeft, worker=world.leases[-1].worker)
    assert world.lost[-1].norm_fraction == 0


def test_salvage_closes_a_round_with_the_rows_of_an_update_in_flight() -> None:
    world = World(salvage=True, needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    world.now += 1
    world.finish_subnet(0)
    world.now += 0.1
    world.tell(PartArrived, world.lease_of(1), steps=STEPS, norm_fraction=0.25)
    world.now += 10
    world.tell(Heartbeat, world.lease_of(1), steps=STEPS)
    world.do(ClockTick)
    assert [(c.cause, c.norm_fraction) for c in world.lost] == [("closed", 0.25)]
    world.store(1)
    assert dict(world.committed[-1].staged) == {0: STEPS, 1: STEPS}


def test_reissue_takes_nothing_of_an_update_that_is_not_whole() -> None:
    world = World(needs=(SMALL,) * 2, workers=("a", "b"))
    world.do(ClockTick)
    lease = world.lease_of(0)
    (holder,) = (c.worker for c in world.leases if c.lease == lease)
    world.tell(PartArrived, lease, steps=STEPS, norm_fraction=0.9)
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
        assert world.tell(PartArrived, world.lease_of(0), steps=STEPS) is Reply.ACCEPTED
        world.do(ClockTick)
    assert not world.lost
