"""What there is to show, as plain JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_summary import CHURN, committed, ended, event, joined, leased, lost, staged, started, summary_of

from idletrain.observe.status import CURVE_POINTS, PREEMPTION_MARKS, VIEW_STATES, cloud_machine_of, thinned, view_of
from idletrain.observe.summary import Summary


def stamped(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"t": 1000.0 + one["s"], **one} for one in events]


def launched(instance: str, usd: float | None, role: str = "worker") -> dict[str, Any]:
    about = {"type": "m5.large", "zone": "a", "market": "spot", "usd_per_hour": usd, "on_demand_usd_per_hour": 3.6}
    return event("instance_launched", 0.0, instance=instance, role=role, **about)


def test_a_view_is_json_and_holds_the_summary_s_figures() -> None:
    summary = summary_of(stamped(CHURN))
    view = json.loads(json.dumps(view_of(summary, 1010.0), allow_nan=False))
    record = summary.as_record()
    shared = view.keys() & record.keys()
    assert shared >= {"status", "rounds", "accuracy", "loss", "preemptions", "reissues", "salvaged_steps", "lost_steps"}
    for key in shared - {"seconds", "goodput"}:
        assert view[key] == record[key], key
    assert view["goodput"] == pytest.approx(record["goodput"], abs=1e-4)
    assert view["curve"] == [[1, 8.5, 0.8, 0.5]]
    assert view["preempted"] == [[4.0, 0, "notice", "a"], [6.0, 0, "kill", "b"]]
    assert view["lost_by_cause"] == {"notice": 0, "kill": 5}
    assert [[cell["state"] for cell in row["cells"]] for row in view["grid"]] == [["accepted", "accepted"]]


def test_a_view_of_nothing_can_be_shown() -> None:
    view = view_of(Summary(), 0.0)
    assert (view["status"], view["workers"], view["grid"], view["cost"]) == ("starting", [], [], None)


def test_what_is_not_finite_is_not_there() -> None:
    nan = event("evaluated", 1.0, round=1, accuracy=0.1, loss=float("nan"), seconds=0.1)
    view = view_of(summary_of(stamped([started(), nan])), 1001.0)
    assert (view["loss"], view["curve"]) == (None, [[1, 1.0, 0.1, None]])


def evaluated(s: float, round_: int, **metrics: float | None) -> dict[str, Any]:
    scores = {"accuracy": 0.1, "loss": 2.0, "calibration_error": 0.1, "temperature": 1.0}
    return event("evaluated", s, round=round_, **scores, metrics=metrics, seconds=0.1)


def test_metrics_have_a_curve_each_with_the_better_direction_where_it_is_known() -> None:
    better = {"error": "lower", "f1": "higher"}
    events = [{**started(), "better": better}, evaluated(1.0, 1, f1=0.5), evaluated(2.0, 2, f1=None, val_loss=2.0)]
    view = view_of(summary_of(stamped(events)), 1002.0)
    assert view["metrics"] == {"f1": None, "val_loss": 2.0}
    assert view["metric_curves"] == {
        "error": {"better": "lower", "points": []},
        "f1": {"better": "higher", "points": [[1, 1.0, 0.5], [2, 2.0, None]]},
        "val_loss": {"better": "", "points": [[2, 2.0, 2.0]]},
    }


def test_the_clock_goes_on_between_events_and_stands_still_when_the_head_is_silent() -> None:
    summary = summary_of(stamped([started(), joined(1.0, "a")]))
    assert view_of(summary, 1003.0)["seconds"] == 3.0
    assert view_of(summary, 1003.0)["workers"][0]["age_seconds"] == 2.0
    assert view_of(summary, 9001.0)["seconds"] == 61.0
    assert view_of(summary, 9001.0)["heard_seconds"] == 8000.0
    assert view_of(summary_of(stamped(CHURN)), 9000.0)["heard_seconds"] == 0.0  # it has ended


def test_workers_have_a_state_from_joining_to_gone() -> None:
    summary = summary_of(
        stamped(
            [
                started(),
                event("worker_joining", 0.5, worker="tcp://a"),
                event("worker_joining", 0.5, worker="tcp://d"),
                joined(1.0, "a"),
                joined(1.0, "b"),
                joined(1.0, "c"),
                leased(1.0, 1, "a"),
                event("progress_saved", 1.5, round=0, subnet=1, attempt=1, steps=7),
                event("worker_notice", 2.0, worker="tcp://b"),
                event("worker_left", 2.0, worker="tcp://c", name="c", cause="kill"),
            ]
        )
    )
    view = view_of(summary, 1002.0)
    rows = {row["name"]: row for row in view["workers"]}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"a": "training", "b": "draining", "tcp://d": "joining", "c": "gone"}
    assert (rows["a"]["subnet"], rows["a"]["steps"], rows["a"]["memory_bytes"]) == ("0/1", 7, 2**30)
    assert (rows["c"]["cause"], rows["c"]["address"], rows["c"]["age_seconds"]) == ("kill", "", 1.0)
    assert view["states"] == dict.fromkeys(VIEW_STATES, 1)


def test_a_worker_costs_what_its_machine_does_and_a_machine_without_one_is_joining() -> None:
    events = [launched("i-1", 0.5), launched("i-2", None), launched("i-0", 1.0, role="head"), joined(1.0, "i-1-77-0")]
    view = view_of(summary_of(stamped([started(), *events])), 1001.0)
    rows = {row["name"]: (row["state"], row["usd_per_hour"]) for row in view["workers"]}
    assert rows == {"i-1-77-0": ("training", 0.5), "i-2": ("joining", None)}
    reclaimed = event("instance_ended", 2.0, instance="i-2", reason="Server.Spot")
    view = view_of(summary_of(stamped([started(), *events, reclaimed])), 1002.0)
    assert [row["name"] for row in view["workers"]] == ["i-1-77-0"]


def test_the_bill_tells_what_is_left_of_the_budget() -> None:
    with_budget = {**started(), "job": {"nodes": {"budget_usd": 5.0}}}
    view = view_of(summary_of(stamped([with_budget, launched("i-1", 1.0)])), 1000.0 + 3600)
    assert view["cost"]["spent_usd"] == pytest.approx(1.0, abs=0.01)
    assert view["cost"]["left_usd"] == 5.0 - view["cost"]["spent_usd"]
    assert view["cost"]["saving"] == pytest.approx(1 - 1.0 / 3.6, abs=0.01)


def test_a_run_without_machines_has_no_bill_also_after_its_end() -> None:
    assert view_of(summary_of(stamped(CHURN)), 1010.0)["cost"] is None


def test_preemptions_that_are_close_are_one_mark() -> None:
    preemptions = [
        event("worker_left", 50.0 + n / 100, worker=f"tcp://{n}", name=f"{n}", cause="notice") for n in range(3)
    ]
    others = [joined(0.0, f"{n}") for n in range(3)]
    events = [started(), *others, *preemptions, event("waiting", 100.0, reason="")]
    assert view_of(summary_of(stamped(events)), 1100.0)["preempted"] == [[50.0, 0, "notice", "3 workers"]]


def test_marks_stay_where_they_are_while_nobody_is_taken() -> None:
    preemptions = [event("worker_left", 9.0 * n, worker=f"tcp://{n}", name=f"{n}", cause="kill") for n in range(300)]
    events = [started(), *(joined(0.0, f"{n}") for n in range(300)), *preemptions]
    marks = [
        view_of(summary_of(stamped([*events, event("waiting", s, reason="")])), s)["preempted"]
        for s in (3000.0, 3800.0)
    ]
    assert PREEMPTION_MARKS / 2 < len(marks[0]) <= PREEMPTION_MARKS
    assert marks[0] == marks[1]


def test_a_long_run_s_view_stays_small() -> None:
    events: list[dict[str, Any]] = [started()]
    for n in range(3000):
        events += [joined(n, f"{n}"), {**leased(n, 0, f"{n}"), "round": n, "attempt": n}]
        events += [
            event("worker_left", n + 0.5, worker=f"tcp://{n}", name=f"{n}", cause="kill"),
            lost(n, 0, "kill", 0, 1, 0),
        ]
        events += [committed(n + 0.9, n), event("evaluated", n + 0.9, round=n + 1, accuracy=0.5, loss=1.0, seconds=0.1)]
    summary = summary_of(stamped(events))
    view = view_of(summary, 4000.0)
    assert len(view["curve"]) <= CURVE_POINTS + 1
    assert view["curve"][-1][0] == 3000
    assert (view["states"]["gone"], len(view["workers"])) == (3000, 8)
    assert len(json.dumps(view)) < 50_000


def test_the_next_worker_s_view_keeps_its_pace() -> None:
    first = ended(4.0, 1, "a", pull_seconds=1.0, train_seconds=2.0, push_seconds=0.5, pull_bytes=8000, push_bytes=100)
    view = view_of(summary_of(stamped([started(), joined(0.0, "a"), leased(0.0, 0, "a"), first])), 1004.0)
    assert (view["workers"][0]["pace"], view["workers"][0]["link_bytes_per_second"]) == (25.0, 8000.0)
    assert view["link_bytes_per_second"] == 8000.0


@pytest.mark.parametrize(("count", "most"), [(0, 3), (1, 3), (3, 3), (4, 3), (100, 7)])
def test_thinning_keeps_the_first_and_the_last(count: int, most: int) -> None:
    rest = thinned(range(count), most)
    assert len(rest) <= most + 1
    assert rest[:1] + rest[-1:] == ([0, count - 1] if count else [])


def test_a_machine_is_known_from_its_worker_s_name() -> None:
    assert cloud_machine_of("i-0abc-412-0") == "i-0abc"


HOLDERS = [started(), joined(0.0, "a"), joined(0.0, "b"), leased(1.0, 0, "a"), {**leased(1.0, 1, "b"), "attempt": 2}]
DONE = staged(2.0, 1, 1.0)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], ""),
        ([DONE], "subnet 0 on a (0 of 50 steps)"),
        (
            [DONE, event("progress_saved", 2.5, round=0, subnet=0, attempt=1, steps=20)],
            "subnet 0 on a (20 of 50 steps)",
        ),
        ([DONE, event("worker_left", 3.0, worker="tcp://a", name="a", cause="kill")], "a worker for subnet 0"),
        ([DONE, {**DONE, "subnet": 0, "attempt": 1, "worker": "tcp://a"}], "its commit"),
        ([DONE, committed(4.0, 0)], ""),
    ],
    ids=["all train", "one trains", "its steps", "one left", "all staged", "committed"],
)
def test_a_view_tells_what_the_round_waits_for(events: list[dict[str, Any]], expected: str) -> None:
    assert view_of(summary_of(stamped([*HOLDERS, *events])), 1004.0)["waits_for"] == expected


def test_rounds_of_many_subnets_wait_for_a_number_and_rolling_ones_for_nothing() -> None:
    four = [{**one, "subnets": 4, "policy": policy} for policy in ("salvage", "rolling") for one in [started()]]
    waiting = [view_of(summary_of(stamped([one, *HOLDERS[1:], DONE])), 1004.0)["waits_for"] for one in four]
    assert waiting == ["3 of 4 subnets", ""]


def test_a_worker_of_less_than_half_the_others_pace_is_slow() -> None:
    events = [started(), *(joined(0.0, name) for name in "abc")]
    for number, (name, seconds) in enumerate((("a", 1.0), ("b", 1.2), ("c", 3.0))):
        lease = {"round": 0, "subnet": number % 2, "attempt": number, "worker": f"tcp://{name}"}
        events += [event("leased", 1.0, **lease, step=0)]
        events += [event("attempt_ended", 5.0, **lease, ended="done", steps=50, train_seconds=seconds)]
    rows = {row["name"]: row["slow"] for row in view_of(summary_of(stamped(events)), 1005.0)["workers"]}
    assert rows == {"a": False, "b": False, "c": True}
