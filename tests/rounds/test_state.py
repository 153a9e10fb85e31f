"""Every order of events: the run ends, and a subnet of a round is accepted once; and its rounds, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.messages import Reply
from idletrain.rounds.protocol import (
    ClockTick,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Heartbeat,
    KeepProgress,
    NoticeReceived,
    PartArrived,
    Persisted,
    Pushed,
    Respond,
    RoundEvent,
    ScoreKept,
    StopRequested,
    WorkerLeft,
)
from idletrain.rounds.state import IllegalEventError, advance
from idletrain.rounds.table import Phase, RunStage, Watch
from tests.rounds.world import LARGE, SMALL, STEPS, World

FAULTS = (Reply.NOT_FINITE, Reply.CORRUPT, Reply.WRONG_SHAPE)
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
EXCLUSIVE = st.frozensets(st.integers(0, 2))
PHASES = st.dictionaries(
    st.integers(1, 2), st.lists(st.sampled_from((SMALL, LARGE)), min_size=1, max_size=4).map(tuple)
)


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
            world.send(Heartbeat, lease, steps=b % (STEPS + 1))
        case "push" if lease:
            world.send(Pushed, lease, steps=STEPS)
        case "progress" if lease:
            world.send(Pushed, lease, steps=b % STEPS)
        case "part" if lease and world.state.rules.salvage:
            world.send(Pushed, lease, steps=1 + b % STEPS, update=True)
        case "part" if lease:
            world.send(
                PartArrived, lease, steps=1 + b % STEPS, norm_fraction=b / 50 if world.state.rules.salvage else 0.0
            )
        case "fault" if lease:
            world.send(Pushed, lease, steps=1 + b % STEPS, fault=FAULTS[b % 3])
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
            assert world.send(Pushed if b % 4 else Heartbeat, other, steps=STEPS) is not Reply.ACCEPTED
            assert world.state.subnets == before.subnets or world.state.rules.salvage
        case "end" if world.running:
            world.end(world.running[a % len(world.running)].lease, failed=b % 3 == 0, out_of_memory=b % 3 == 1)
        case "tick":
            world.now += b
            world.do(ClockTick)
        case "store" if world.to_store:
            world.store(world.to_store[a % len(world.to_store)])
        case "commit" if world.commit_due:
            world.commit(snapshot_due=bool(b % 2))
        case "evaluate" if world.evaluation_due:
            world.evaluate(None, score=float(b))
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
        if world.state.keeping is None:
            illegal.append(ScoreKept(now=world.now))
    before, workers = world.state, dict(world.state.workers)
    for event in illegal:
        with pytest.raises(IllegalEventError):
            advance(world.state, event)
    assert world.state == before
    assert world.state.workers == workers


def subnets_of(phases: dict[int, tuple[int, ...]], round_: int) -> int:
    """Return how many subnets a round has that begins with three."""
    return next((len(phases[at]) for at in range(round_, 0, -1) if at in phases), 3)


@settings(deadline=None, max_examples=400)
@given(EVENTS, EXCLUSIVE, PHASES)
def test_reissue_ends_and_takes_every_subnet_once_with_all_its_steps(
    events: list[tuple[str, int, int]], exclusive: frozenset[int], phases: dict[int, tuple[int, ...]]
) -> None:
    world = World(exclusive=exclusive, watch=Watch("loss", higher=False), later_needs=phases)
    for event in events:
        play(world, *event)
    world.drive()
    if world.finished == "completed":
        assert world.stored == {(r, k): STEPS for r in range(3) for k in range(subnets_of(phases, r))}
        assert [c.round for c in world.committed] == [0, 1, 2]
    else:
        assert world.finished in ("diverged", "failed")


@settings(deadline=None, max_examples=400)
@given(EVENTS, PHASES)
def test_lockstep_ends_and_takes_all_subnets_of_a_round_at_once(
    events: list[tuple[str, int, int]], phases: dict[int, tuple[int, ...]]
) -> None:
    world = World(lockstep=True, later_needs=phases)
    for event in events:
        stored, together = len(world.stored), len(world.needs)
        play(world, *event)
        assert len(world.stored) - stored in (0, together)
    world.drive()
    if world.finished == "completed":
        assert world.stored == {(r, k): STEPS for r in range(3) for k in range(subnets_of(phases, r))}
    else:
        assert world.finished in ("diverged", "failed")


@settings(deadline=None, max_examples=400)
@given(EVENTS, EXCLUSIVE, PHASES)
def test_salvage_ends_and_takes_every_subnet_at_most_once(
    events: list[tuple[str, int, int]], exclusive: frozenset[int], phases: dict[int, tuple[int, ...]]
) -> None:
    world = World(salvage=True, exclusive=exclusive, later_needs=phases)
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
        assert world.send(Pushed, lease.lease, steps=STEPS) is Reply.STALE_ROUND
        assert world.send(Heartbeat, lease.lease, steps=1) is Reply.STALE_ROUND
    world.do(ClockTick)
    assert world.state.stage is RunStage.DONE


def test_pushes_are_answered_by_what_became_of_their_lease() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("a", "b")
    own, other = world.lease_of(0), world.lease_of(1)
    reply = {
        "another run": world.send(Pushed, replace(own, run="x"), steps=STEPS),
        "another epoch": world.send(Pushed, replace(own, epoch=0), steps=STEPS),
        "another round": world.send(Pushed, replace(own, round=1), steps=STEPS),
        "no such subnet": world.send(Pushed, replace(own, subnet=2), steps=STEPS),
        "a negative subnet": world.send(Pushed, replace(other, subnet=-1), steps=STEPS),
        "another attempt": world.send(Pushed, replace(own, attempt=77), steps=STEPS),
        "mine": world.send(Pushed, own, steps=STEPS),
        "mine again": world.send(Pushed, own, steps=STEPS),
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
    assert world.do(Pushed, lease=world.lease_of(0), steps=3) == (
        Respond(Reply.ACCEPTED),
        KeepProgress(0, world.lease_of(0).attempt),
    )
    assert world.do(Pushed, lease=world.lease_of(0), steps=2) == (Respond(Reply.DUPLICATE),)
    assert world.do(Pushed, lease=world.lease_of(0), steps=0) == (Respond(Reply.DUPLICATE),)
    assert world.state.subnets[0].steps == 3


def test_a_push_while_the_round_commits_is_stale() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    lease = world.lease_of(0)
    world.finish_subnet(0)
    assert world.commit_due
    assert world.send(Pushed, lease, steps=STEPS) is Reply.STALE_ROUND


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


def test_the_network_is_evaluated_after_round_1_every_so_many_rounds_when_a_snapshot_is_due_and_at_the_end() -> None:
    world = World(needs=(SMALL,), rounds=5, evaluate_every=3)
    world.join("a")
    for due in (False, True, False, False, False):
        world.finish_subnet(0)
        world.commit(snapshot_due=due)
        if world.evaluation_due:
            world.evaluate()
    evaluations = [c for c in world.log if isinstance(c, Evaluate)]
    assert evaluations == [
        Evaluate(True, False, False), Evaluate(False, True, False), Evaluate(True, False, False),
        Evaluate(True, True, True),
    ]  # fmt: skip
    assert world.finished == "completed"


@pytest.mark.parametrize("rules", [{"target": 0.9}, {"watch": Watch("loss", False)}], ids=["target", "best"])
def test_commits_wait_for_scores_on_which_the_run_depends(rules: dict[str, Any]) -> None:
    world = World(needs=(SMALL,), rounds=2, evaluate_every=1, **rules)
    world.join("a")
    world.finish_subnet(0)
    world.commit()
    assert [c.waits for c in world.log if isinstance(c, Evaluate)] == [True]


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


def watching(*scores: float | None, higher: bool = False, patience: int | None = 2, **rules: Any) -> World:
    """A world that is evaluated after every round, until the scores or the run end."""
    settings_ = {"needs": (SMALL,), "evaluate_every": 1, "rounds": 20, **rules}
    world = World(watch=Watch("loss", higher, patience), **settings_)
    world.join("a")
    for score in scores:
        world.finish_subnet(0)
        world.commit()
        world.evaluate(score=score)
    return world


def test_each_evaluation_s_score_is_kept_and_the_first_best_one_marked() -> None:
    assert watching(3.0, 2.0, 2.5, 2.0, 1.0, patience=None).kept == [
        (1, 3.0, True),
        (2, 2.0, True),
        (3, 2.5, False),
        (4, 2.0, False),
        (5, 1.0, True),
    ]
    assert [best for _, _, best in watching(0.5, 0.4, 0.6, higher=True).kept] == [True, False, True]


def test_the_run_stops_early_once_as_many_evaluations_were_no_better_as_its_patience() -> None:
    assert watching(3.0, 3.5, 2.0, 2.1).finished is None
    world = watching(3.0, 3.5, 2.0, 2.1, 2.0)
    assert world.finished == "stopped-early"
    assert world.kept[-1] == (5, 2.0, False)
    assert watching(0.5, 0.4, 0.3, higher=True).finished == "stopped-early"


def test_a_score_that_is_no_number_is_no_better_one() -> None:
    world = watching(None, 2.0, None, None)
    assert [best for _, _, best in world.kept] == [False, True, False, False]
    assert world.finished == "stopped-early"
    assert watching(None, None).finished == "stopped-early"


def test_the_network_waits_until_its_score_is_kept_and_then_the_run_ends() -> None:
    world = watching(1.0, rounds=2, patience=1)
    world.finish_subnet(0)
    world.commit()
    world.do(Evaluated, accuracy=None, score=2.0)
    assert world.score_due
    assert world.finished is None
    with pytest.raises(IllegalEventError):
        advance(world.state, Evaluated(now=world.now, accuracy=None, score=2.0))
    world.keep_score()
    assert world.finished == "completed"  # all rounds are done, and nothing is left to stop


def test_a_snapshot_alone_is_no_evaluation() -> None:
    world = watching(evaluate_every=2, patience=1)
    for score, due in ((2.0, False), (1.0, False), (None, True), (0.5, False)):
        world.finish_subnet(0)
        world.commit(snapshot_due=due)
        world.evaluate(score=score)
    assert world.kept == [(1, 2.0, True), (2, 1.0, True), (4, 0.5, True)]
    assert world.finished is None


def test_an_evaluation_that_a_restart_repeats_takes_its_own_place() -> None:
    world = watching(round_=3, patience=2)
    world.state = replace(world.state, scores={1: 1.0, 2: 2.0, 3: 3.0})
    world.state = replace(world.state, rules=replace(world.state.rules, watch=Watch("loss", False, 3)))
    assert world.state.evaluating
    world.evaluate(score=3.0)
    assert world.finished is None  # two evaluations since the best, not three
    assert world.state.scores == {1: 1.0, 2: 2.0, 3: 3.0}


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


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_an_attempt_that_ends_after_a_phase_of_fewer_subnets_began_frees_its_worker(
    lockstep: bool, failed: bool
) -> None:
    world = World(needs=(SMALL, SMALL, SMALL), evaluate_every=9, later_needs={1: (LARGE,)}, lockstep=lockstep)
    world.join("a", "b", "c")
    world.do(ClockTick)
    last = world.lease_of(2)
    for k in range(3):
        assert world.send(Pushed, world.lease_of(k), steps=STEPS) is Reply.ACCEPTED
    for k in range(3):
        world.store(k)
    world.commit()
    world.end(last, failed=failed)
    assert not any(last.attempt in worker.attempts for worker in world.state.workers.values())
    assert world.lease_of(0).round == 1


def test_an_attempt_that_outlives_its_phase_holds_the_memory_that_it_was_leased_with() -> None:
    world = World(needs=(LARGE,), evaluate_every=9, later_needs={1: (SMALL, LARGE, LARGE)})
    world.join("slow", memory_bytes=2 * LARGE - 1, leases=2)
    world.now += 11
    world.do(ClockTick)  # its lease expires, and it does not say that it has ended the attempt
    assert [lost.cause for lost in world.lost] == ["lease"]
    world.join("fast")
    world.finish_subnet(0)
    world.commit()
    assert world.state.workers["slow"].attempts
    granted = {command.worker for command in world.leases if command.lease.round == 1 and command.lease.subnet}
    assert granted == {"fast"}
    assert all(s.lease.worker != "slow" for s in world.state.subnets if s.need_bytes == LARGE)


def test_a_phase_has_its_own_steps_and_subnets_and_knows_no_pace_of_the_last() -> None:
    world = World(workers=("a", "b"), needs=(SMALL, SMALL), evaluate_every=9)
    world.do(ClockTick)
    for k in (0, 1):
        world.now += 1
        world.finish_subnet(k)
    assert world.state.typical_seconds or world.state.slowest_seconds
    assert any(worker.step_seconds for worker in world.state.workers.values())
    world.needs, world.commit_due = (LARGE,), False
    world.do(Committed, needs=world.needs, snapshot_due=False, new_local_steps=2 * STEPS)
    assert (world.state.rules.local_steps, len(world.state.subnets)) == (2 * STEPS, 1)
    assert (world.state.typical_seconds, world.state.slowest_seconds) == (None, None)
    assert not any(worker.step_seconds for worker in world.state.workers.values())
    lease = world.lease_of(0)
    assert lease.round == 1
    assert world.send(Pushed, lease, steps=STEPS, update=False) is Reply.ACCEPTED
    assert world.state.subnets[0].phase is Phase.LEASED
    assert world.send(Pushed, lease, steps=2 * STEPS, update=True) is Reply.ACCEPTED
    assert world.state.subnets[0].phase is Phase.STORING
