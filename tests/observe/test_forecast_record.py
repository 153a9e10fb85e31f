"""A round's record holds what it took, and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from idletrain.observe.forecast_record import ForecastTracker

EXPECTED = {"pull": 1.0, "compute": 5.0, "push": 2.0, "commit": 0.5}


def committed(expectation: ForecastTracker, *events: dict[str, Any], seconds: float = 10.0) -> dict[str, Any]:
    for event in events:
        expectation(event)
    last = {"kind": "round_committed", "round": 0, "seconds": seconds, "commit_seconds": 0.5}
    expectation(last)
    return last


def staged(worker: str, train: float) -> dict[str, Any]:
    return {"kind": "staged", "round": 0, "worker": worker, "train_seconds": train}


def ended(pull: float, push: float) -> dict[str, Any]:
    return {"kind": "attempt_ended", "round": 0, "pull_seconds": pull, "push_seconds": push}


def test_the_parts_of_a_round_add_up_to_it() -> None:
    event = committed(ForecastTracker(EXPECTED), staged("a", 4.0), staged("b", 6.0), ended(1.0, 2.0), ended(1.0, 2.0))
    assert event["expected"] == EXPECTED
    assert event["measured"] == {
        "pull": pytest.approx(3.5 / 3),
        "compute": 6.0,
        "push": pytest.approx(7 / 3),
        "commit": 0.5,
    }
    assert sum(event["measured"].values()) == pytest.approx(10)


def test_a_resumed_run_expects_what_its_first_sitting_did() -> None:
    started = {"kind": "run_started"}
    ForecastTracker(EXPECTED, ["slow links"])(started)
    resumed, again = ForecastTracker(), {"kind": "run_started"}
    resumed.recall(started)
    resumed.recall({"kind": "run_started"})
    resumed(again)
    assert again == started == {"kind": "run_started", "expected": EXPECTED, "why": ["slow links"]}
    assert committed(resumed)["expected"] == EXPECTED
    looked_again = ForecastTracker({part: 2 * seconds for part, seconds in EXPECTED.items()})
    looked_again.recall(started)
    assert committed(looked_again)["expected"]["compute"] == 10.0


def test_rounds_of_a_later_phase_are_not_expected_to_take_what_the_first_one_s_do() -> None:
    began = [{"kind": "phase_started", "phase": number} for number in (1, 2)]
    assert committed(ForecastTracker(EXPECTED), began[0])["expected"] == EXPECTED
    assert "expected" not in committed(ForecastTracker(EXPECTED), *began)
    resumed = ForecastTracker()
    for event in ({"kind": "run_started", "expected": EXPECTED, "why": []}, *began):
        resumed.recall(event)
    assert "expected" not in committed(resumed)


def test_a_worker_s_turns_are_added_up() -> None:
    event = committed(ForecastTracker(), staged("a", 2.0), staged("a", 2.5), staged("b", 3.0))
    assert event["measured"]["compute"] == 4.5
    assert "expected" not in event


def test_without_any_account_pulls_and_pushes_share_the_rest() -> None:
    event = committed(ForecastTracker(), seconds=2.5)
    assert event["measured"] == {"pull": 1.0, "compute": 0.0, "push": 1.0, "commit": 0.5}


def test_an_account_that_comes_behind_its_round_is_of_no_other() -> None:
    expectation = ForecastTracker()
    committed(expectation, staged("a", 4.0))
    late = {**ended(100.0, 1.0)}
    expectation(late)
    assert not expectation._moved
    event = {"kind": "round_committed", "round": 1, "seconds": 5.0, "commit_seconds": 1.0}
    expectation(event)
    assert event["measured"] == {"pull": 2.0, "compute": 0.0, "push": 2.0, "commit": 1.0}


def test_compute_is_never_longer_than_its_round() -> None:
    event = committed(ForecastTracker(), staged("a", 30.0))
    assert event["measured"]["compute"] == 10
    assert event["measured"]["pull"] == 0


def test_a_run_s_first_record_says_why() -> None:
    event: dict[str, Any] = {"kind": "run_started"}
    ForecastTracker(EXPECTED, ["because"])(event)
    assert (event["expected"], event["why"]) == (EXPECTED, ["because"])
    bare: dict[str, Any] = {"kind": "run_started"}
    ForecastTracker()(bare)
    assert "expected" not in bare
