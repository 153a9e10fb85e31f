"""Every second of every worker is one part of its round's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.observe.time_use import (
    OUTSIDE_ROUNDS,
    TIME_PARTS,
    divided,
    merged_spans,
    round_times,
    time_shares,
    why_low,
)

Event = dict[str, Any]


def event(kind: str, s: float, **fields: Any) -> Event:
    return {"kind": kind, "s": s, **fields}


def committed(s: float, round_: int = 0, seconds: float = 10.0, commit_seconds: float = 0.0) -> Event:
    fields = {"round": round_, "seconds": seconds, "commit_seconds": commit_seconds}
    return event("round_committed", s, bytes_down=10, bytes_up=20, **fields)


def ended(s: float, attempt: int, worker: str = "a", how: str = "done", **seconds: float) -> Event:
    reported = {f"{part}_seconds": seconds.get(part, 0.0) for part in ("pull", "train", "push")}
    return event("attempt_ended", s, round=0, subnet=0, attempt=attempt, worker=worker, ended=how, **reported)


def leased(s: float, attempt: int, worker: str = "a", subnet: int = 0) -> Event:
    return event("leased", s, round=0, subnet=subnet, attempt=attempt, worker=worker, step=0)


def staged(s: float, attempt: int, subnet: int = 0, train: float = 0.0) -> Event:
    return event("staged", s, round=0, subnet=subnet, attempt=attempt, train_seconds=train)


def joined(*workers: str) -> list[Event]:
    return [event("run_started", 0.0), *(event("worker_joined", 0.0, worker=worker) for worker in workers)]


def parts_of(events: list[Event]) -> dict[str, float]:
    (round_,) = round_times(events)
    return {part: pytest.approx(seconds) for part, seconds in round_.worker_seconds.items() if seconds}


def test_without_rounds_a_worker_without_a_subnet_waits_whatever_others_do() -> None:
    """Its lanes' numbers are no rounds."""
    events = [
        event("run_started", 0.0, policy="rolling"),
        *(event("worker_joined", 0.0, worker=worker) for worker in "ab"),
        leased(0.0, 1, "a", 0),
        staged(4.0, 1, 0),
        ended(4.0, 1, "a", train=4.0),
        leased(4.0, 2, "b", 0),
        committed(10.0, commit_seconds=1.0),
        staged(10.0, 2, 0),
        ended(10.0, 2, "b", train=6.0),
    ]
    assert parts_of(events) == {"compute": 10.0, "wait": 10.0}


def test_two_workers_of_which_one_is_slower() -> None:
    events = [
        *joined("a", "b"),
        leased(0.5, 1, "a", 0),
        leased(0.5, 2, "b", 1),
        staged(5.0, 1, 0),
        ended(5.2, 1, "a", pull=0.5, train=3.0, push=0.5),
        staged(8.0, 2, 1),
        committed(10.0, commit_seconds=1.0),
        ended(10.1, 2, "b", pull=1.0, train=5.0, push=1.0),
    ]
    assert parts_of(events) == {
        "compute": 8.0,
        "pull": 1.5,
        "push": 1.5,
        "control": 0.5 + 0.5 + 0.5 + 0.5,  # both wait for their leases, and get ready
        "wait": 3.0,  # a for b
        "evaluate": 2.0,  # both, from 8 to 9
        "commit": 2.0,
    }
    (round_,) = round_times(events)
    assert (round_.bytes_down, round_.bytes_up) == (10, 20)
    assert round_.down_seconds == pytest.approx(1.0)  # a pulled from 1 to 1.5 and b from 1 to 2
    assert round_.up_seconds == pytest.approx(1.5)


def test_a_killed_attempt_is_lost_but_for_what_its_checkpoint_kept() -> None:
    events = [
        *joined("a", "b"),
        leased(0.0, 1, "a"),
        event("worker_left", 4.0, worker="a"),
        event("lost", 4.0, round=0, subnet=0, attempt=1, worker="a", kept_seconds=3.0),
        leased(5.0, 2, "b"),
        event("attempt_ended", 5.0, round=0, subnet=0, attempt=1, worker="a", ended="cancelled"),
        staged(10.0, 2),
        committed(10.0),
        ended(10.0, 2, "b", train=5.0),
    ]
    assert parts_of(events) == {"compute": 3.0 + 5.0, "lost": 1.0, "wait": 4.0, "control": 1.0}


def test_what_a_drained_worker_sent_to_the_head_counts() -> None:
    events = [
        *joined("a"),
        leased(0.0, 1),
        event("lost", 6.0, round=0, subnet=0, attempt=1, worker="a", kept_seconds=4.0),
        ended(6.0, 1, how="drained", pull=1.0, train=4.0, push=1.0),
        event("worker_left", 6.0, worker="a"),
        committed(10.0),
    ]
    assert parts_of(events) == {"pull": 1.0, "compute": 4.0, "push": 1.0}


def test_a_revoked_attempt_reaches_into_the_next_round() -> None:
    events = [
        *joined("a"),
        leased(0.0, 1),
        event("lost", 9.0, round=0, subnet=0, attempt=1, worker="a", kept_seconds=2.0),
        staged(9.0, 1),
        committed(10.0),
        ended(12.0, 1, how="revoked", train=11.0),
        committed(20.0, 1),
    ]
    first, second = (round_.worker_seconds for round_ in round_times(events))
    assert (first["compute"], first["lost"]) == pytest.approx((2.0, 8.0))
    assert (second["lost"], second["wait"]) == pytest.approx((2.0, 8.0))


def test_an_update_whose_report_never_came_still_tells_its_steps() -> None:
    events = [*joined("a"), leased(0.0, 1), staged(10.0, 1, train=7.0), committed(10.0)]
    assert parts_of(events) == {"compute": 7.0, "control": 3.0}


def test_every_head_session_has_a_clock_of_its_own() -> None:
    session = [*joined("a"), leased(0.0, 1), staged(10.0, 1, train=10.0), committed(10.0)]
    assert [round_.worker_seconds["compute"] for round_ in round_times(session + session)] == [10.0, 10.0]


def test_of_two_things_at_once_a_second_is_the_one_that_matters_more() -> None:
    busy = {"compute": [(0.0, 4.0)], "pull": [(3.0, 6.0)], "control": [(0.0, 9.0)]}
    seconds = divided((0.0, 10.0), busy, {"wait": [(0.0, 10.0)]})
    assert [seconds[part] for part in ("compute", "pull", "control", "wait")] == [4.0, 2.0, 3.0, 1.0]


SPANS = st.tuples(st.floats(-10, 10), st.floats(0, 5)).map(lambda span: (span[0], span[0] + span[1]))
BY_PART = st.dictionaries(st.sampled_from(TIME_PARTS), st.lists(SPANS, max_size=4))


@given(SPANS, BY_PART, BY_PART)
def test_the_parts_of_any_worker_s_time_add_up_to_it(
    there: tuple[float, float], busy: dict[str, list[Any]], idle: dict[str, list[Any]]
) -> None:
    seconds = divided(there, busy, idle)
    assert set(seconds) == set(TIME_PARTS)
    assert min(seconds.values()) >= -1e-9
    assert sum(seconds.values()) == pytest.approx(there[1] - there[0], abs=1e-9)


@given(st.lists(SPANS), st.floats(-12, 17))
def test_merged_spans_cover_the_same_and_do_not_overlap(spans: list[tuple[float, float]], at: float) -> None:
    result = merged_spans(spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(result))
    assert any(s <= at <= e for s, e in result) == any(s <= at <= e for s, e in spans)


KINDS = ("join", "leave", "lease", "staged", "lost", "ended", "revoked", "drained", "commit", "resume")
STORIES = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 3),
        st.floats(0, 3),
        st.floats(0, 5),
    ),
    max_size=60,
)


def events_of(story: list[tuple[str, int, float, float]]) -> tuple[list[Event], list[float]]:
    """Events of any story, likely or not, and the worker-seconds of each of its rounds."""
    events, expected, there = [event("run_started", 0.0)], [], {}
    now = opened = 0.0
    attempts = round_ = 0
    for kind, number, later, seconds in story:
        now += later
        worker, attempt = f"w{number}", max(1, attempts - number)
        names = {"round": round_, "subnet": number, "attempt": attempt, "worker": worker}
        match kind:
            case "join" if worker not in there:
                events.append(event("worker_joined", now, worker=worker))
                there[worker] = [now, float("inf")]
            case "leave" if worker in there and there[worker][1] > now:
                events.append(event("worker_left", now, worker=worker))
                there[worker][1] = now
            case "lease":
                attempts += 1
                events.append(event("leased", now, **names | {"attempt": attempts}))
            case "staged":
                events.append(event("staged", now, **names, train_seconds=seconds))
            case "lost":
                events.append(event("lost", now, **names, kept_seconds=seconds))
            case "ended" | "revoked" | "drained":
                spent = {"pull_seconds": seconds, "train_seconds": later, "push_seconds": 0.1}
                events.append(event("attempt_ended", now, **names, ended=kind, **spent))
            case "commit":
                fields = {"round": round_, "seconds": now - opened, "commit_seconds": min(seconds, now - opened)}
                events.append(event("round_committed", now, bytes_down=0, bytes_up=0, **fields))
                expected.append(sum(max(0.0, min(now, b) - max(opened, a)) for a, b in there.values()))
                opened, round_ = now, round_ + 1
            case "resume":
                events.append(event("run_started", 0.0))
                there, now, opened, attempts = {}, 0.0, 0.0, 0
    return events, expected


@given(STORIES)
def test_the_parts_of_any_story_s_rounds_add_up_to_the_workers_seconds(
    story: list[tuple[str, int, float, float]],
) -> None:
    events, expected = events_of(story)
    result = round_times(events)
    assert [sum(r.worker_seconds.values()) for r in result] == pytest.approx(expected, abs=1e-6)
    for round_ in result:
        assert min(round_.worker_seconds.values()) >= -1e-9
        assert 0 <= round_.down_seconds <= round_.seconds + 1e-9


def test_all_of_the_workers_time_has_its_share_also_outside_rounds() -> None:
    events = [
        event("run_started", 0.0),
        event("worker_joined", 2.0, worker="a"),
        leased(12.0, 1),
        staged(18.0, 1, train=5.0),
        ended(18.0, 1, train=5.0),
        committed(20.0),
    ]
    shares = time_shares(events, alive_seconds=20.0)  # to 22 s
    assert {part: share for part, share in shares.items() if share} == pytest.approx(
        {"compute": 5 / 20, "control": 3 / 20, "evaluate": 2 / 20, OUTSIDE_ROUNDS: 10 / 20}
    )


def test_nobody_s_time_went_nowhere() -> None:
    assert time_shares([], alive_seconds=0.0) == {}


def test_a_push_that_waits_for_another_s_pull_is_no_push_yet() -> None:
    done = {**ended(7.0, 1, pull=1.0, train=3.0, push=1.0), "push_wait_seconds": 2.0}
    events = [*joined("a"), leased(0.0, 1), staged(7.0, 1), done, committed(10.0, commit_seconds=3.0)]
    assert parts_of(events) == {"pull": 1.0, "compute": 3.0, "wait": 2.0, "push": 1.0, "commit": 3.0}


def test_low_goodput_has_a_reason() -> None:
    shares = {"compute": 0.5, "wait": 0.31, "push": 0.19}
    assert why_low(shares) == "31% waiting for other workers"
    assert why_low(shares, workers=4, cores=2) == "31% waiting for other workers: 4 workers on 2 cores"
    assert why_low(shares, workers=2, cores=2) == "31% waiting for other workers"
    assert why_low({OUTSIDE_ROUNDS: 1.0}) == "100% before the first round and after the last"
    assert why_low({"compute": 0.9, "wait": 0.1}) == why_low({}) == ""
