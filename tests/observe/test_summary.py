"""The sum of events."""

from __future__ import annotations

from typing import Any

from idletrain.observe.display import final_lines
from idletrain.observe.summary import Summary

RECORD_KEYS = {
    "status",
    "run",
    "method",
    "subnets",
    "rounds",
    "local_steps",
    "epochs",
    "evaluated_rounds",
    "accuracy",
    "loss",
    "calibration_error",
    "temperature",
    "constant_loss",
    "train_loss",
    "least_trained",
    "metrics",
    "best",
    "warnings",
    "seconds",
    "goodput",
    "preemptions",
    "reissues",
    "backups",
    "salvaged_steps",
    "lost_steps",
    "bytes_down",
    "bytes_up",
    "params_sha256",
    "run_dir",
}


def started(s: float = 0.0, resumed_at: int = 0) -> dict[str, Any]:
    return {
        "kind": "run_started",
        "s": s,
        "run": "demo",
        "version": "1",
        "subnets": 2,
        "rounds": 3,
        "policy": "reissue",
        "target": None,
        "method": "ist",
        "local_steps": 50,
        "parameters": 1000,
        "groups": {"1": 8},
        "resumed_at": resumed_at,
        "dashboard": "http://127.0.0.1:1/status",
        "run_dir": "runs/demo",
    }


def joined(s: float, name: str) -> dict[str, Any]:
    return {
        "kind": "worker_joined",
        "s": s,
        "worker": f"tcp://{name}",
        "name": name,
        "memory_bytes": 2**30,
        "device": "cpu",
        "steps_per_second": 100.0,
        "cohort": "c",
        "pid": 5,
    }


def event(kind: str, s: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "s": s, **fields}


def committed(s: float, round_: int, steps: int = 100) -> dict[str, Any]:
    return event(
        "round_committed",
        s,
        round=round_,
        steps=steps,
        seconds=2.0,
        commit_seconds=0.1,
        bytes_down=1000,
        bytes_up=500,
        shares=[0.5, 0.5],
        loss=0.4,
    )


def lost(s: float, subnet: int, cause: str, kept_steps: int, lost_steps: int, seconds: float) -> dict[str, Any]:
    names = {"round": 0, "subnet": subnet, "attempt": 1, "worker": "tcp://a"}
    return event("lost", s, **names, cause=cause, kept_steps=kept_steps, lost_steps=lost_steps, kept_seconds=seconds)


def leased(s: float, subnet: int, worker: str) -> dict[str, Any]:
    return event("leased", s, round=0, subnet=subnet, attempt=1, worker=f"tcp://{worker}", step=0)


def staged(s: float, subnet: int, seconds: float) -> dict[str, Any]:
    return event("staged", s, round=0, subnet=subnet, attempt=2, worker="tcp://b", steps=50, train_seconds=seconds)


CHURN = [
    started(),
    joined(0.0, "a"),
    joined(0.0, "b"),
    leased(0.0, 0, "a"),
    {**leased(0.0, 1, "b"), "attempt": 2},
    event("worker_notice", 3.5, worker="tcp://a"),
    lost(4.0, 0, "notice", 30, 0, 3.0),
    event("worker_left", 4.0, worker="tcp://a", name="a", cause="notice"),
    staged(5.0, 1, 4.0),
    {**leased(5.0, 0, "b"), "attempt": 3},
    {**lost(6.0, 0, "kill", 0, 5, 0.0), "attempt": 3, "worker": "tcp://b"},
    event("worker_left", 6.0, worker="tcp://b", name="b", cause="kill"),
    joined(6.0, "c"),
    {**leased(6.0, 0, "c"), "attempt": 4},
    {**staged(8.0, 0, 2.0), "attempt": 4, "worker": "tcp://c"},
    committed(8.0, 0),
    event(
        "evaluated",
        8.5,
        round=1,
        accuracy=0.8,
        loss=0.5,
        calibration_error=0.02,
        temperature=1.1,
        constant_loss=2.3,
        seconds=0.1,
    ),
    event(
        "run_ended", 10.0, status="completed", rounds=1, accuracy=0.8, loss=0.5, params_sha256="ab", run_dir="runs/demo"
    ),
    event("worker_left", 10.0, worker="tcp://c", name="c", cause="end"),
]


def summary_of(events: list[dict[str, Any]]) -> Summary:
    summary = Summary()
    for one in events:
        summary.add(one)
    return summary


def test_the_sum_of_a_churned_run() -> None:
    assert summary_of(CHURN).as_record() == {
        "status": "completed",
        "run": "demo",
        "method": "ist",
        "subnets": 2,
        "rounds": 1,
        "local_steps": 100,
        "epochs": None,
        "evaluated_rounds": 1,
        "accuracy": 0.8,
        "loss": 0.5,
        "calibration_error": 0.02,
        "temperature": 1.1,
        "constant_loss": 2.3,
        "train_loss": 0.4,
        "least_trained": None,
        "metrics": {},
        "best": None,
        "warnings": [],
        "seconds": 10.0,
        "goodput": round((3.0 + 4.0 + 2.0) / (4.0 + 6.0 + 4.0), 4),  # of a, b and c
        "preemptions": {"notice": 1, "kill": 1},
        "reissues": 2,
        "backups": 0,
        "salvaged_steps": 30,
        "lost_steps": 5,
        "bytes_down": 1000,
        "bytes_up": 500,
        "params_sha256": "ab",
        "run_dir": "runs/demo",
    }


def test_warnings_are_kept_for_the_end() -> None:
    summary = summary_of([*CHURN, event("warning", 9.0, round=0, reason="the network is worse than its subnets")])
    assert summary.as_record()["warnings"] == ["the network is worse than its subnets"]
    assert "  warning: the network is worse than its subnets" in final_lines(summary, "demo: completed")


def test_a_record_has_the_documented_fields_also_before_anything_happened() -> None:
    assert Summary().as_record().keys() == RECORD_KEYS
    assert Summary().goodput is None


def test_a_worker_that_leaves_at_the_end_is_no_preemption() -> None:
    summary = summary_of(CHURN)
    assert [(p.name, p.cause, p.seconds, p.round) for p in summary.preempted] == [
        ("a", "notice", 4.0, 0),
        ("b", "kill", 6.0, 0),
    ]


def test_goodput_counts_workers_that_are_still_there() -> None:
    summary = summary_of([started(), joined(1.0, "a"), staged(5.0, 0, 3.0)])
    assert summary.alive_seconds == 4.0
    assert summary.goodput == 0.75


def test_a_second_sitting_goes_on_where_the_first_one_ended() -> None:
    """Its clock starts at 0 again, and workers of the dead head are gone, which is no preemption."""
    first = [started(), joined(0.0, "a"), committed(6.0, 0), committed(8.0, 1)]
    second = [started(0.0, resumed_at=2), joined(1.0, "b"), committed(3.0, 2)]
    summary = summary_of([*first, *second])
    assert summary.seconds == 11.0
    assert summary.rounds == 3
    assert summary.local_steps == 300
    assert (summary.workers["tcp://a"].left, summary.workers["tcp://b"].joined) == (8.0, 9.0)
    assert summary.alive_seconds == 8.0 + 2.0
    assert (summary.notices, summary.kills) == (0, 0)


def test_a_note_stays_until_it_is_over() -> None:
    summary = summary_of([started(), event("paused", 1.0, reason="no room")])
    assert summary.note == "no room"
    summary.add(event("resumed", 2.0, reason="room again"))
    assert summary.note == ""


def test_an_event_of_a_later_version_is_passed_over() -> None:
    assert summary_of([started(), event("invented-later", 3.0)]).seconds == 3.0


def ended(s: float, attempt: int, worker: str, **seconds: float) -> dict[str, Any]:
    where = {"round": 0, "subnet": 0, "attempt": attempt, "worker": f"tcp://{worker}"}
    return event("attempt_ended", s, **where, ended="done", steps=50, reply="accepted", **seconds)


def test_the_grid_follows_a_subnet_from_its_lease_to_its_round_s_commit() -> None:
    summary, seen = Summary(), []
    for one in CHURN:
        summary.add(one)
        cells = summary.grid.get(0, [])
        seen.append(" ".join(f"{cell.state}{cell.losses}" for cell in cells))
    states = [state for n, state in enumerate(seen) if state and state != (seen[n - 1] if n else "")]
    assert states == [
        "leased0 waiting0",
        "leased0 leased0",
        "lost1 leased0",
        "lost1 staged0",
        "leased1 staged0",
        "lost2 staged0",
        "leased2 staged0",
        "staged2 staged0",
        "accepted2 accepted0",
    ]
    assert [cell.worker for cell in summary.grid[0]] == ["tcp://c", "tcp://b"]


def test_a_checkpoint_is_a_state_and_its_steps() -> None:
    summary = summary_of([started(), joined(0.0, "a"), leased(0.0, 0, "a"), marked(1.0, 20)])
    assert (summary.grid[0][0].state, summary.grid[0][0].steps) == ("progress_saved", 20)


def marked(s: float, steps: int) -> dict[str, Any]:
    return event("progress_saved", s, round=0, subnet=0, attempt=1, steps=steps)


def test_old_rounds_leave_the_grid() -> None:
    leases = [event("leased", 1.0, round=n, subnet=0, attempt=n, worker="tcp://a", step=0) for n in range(20)]
    assert list(summary_of([started(), *leases]).grid) == list(range(14, 20))


def test_of_an_open_round_only_what_was_staged_survives_the_head() -> None:
    summary = summary_of([started(), joined(0.0, "a"), leased(0.0, 0, "a"), leased(0.0, 1, "a"), staged(1.0, 1, 1.0)])
    summary.add(started(0.0))
    assert [cell.state for cell in summary.grid[0]] == ["waiting", "staged"]


def test_pushes_are_counted_by_what_the_store_replied() -> None:
    refused = event("refused", 3.0, round=0, subnet=0, attempt=1, reply="corrupt")
    twice = {**ended(4.0, 1, "a"), "reply": "duplicate"}
    summary = summary_of(
        [started(), joined(0.0, "a"), leased(0.0, 0, "a"), marked(1.0, 20), staged(2.0, 1, 1.0), refused, twice]
    )
    assert {reply: count for reply, count in summary.puts.items() if count} == {
        "accepted": 2,
        "corrupt": 1,
        "duplicate": 1,
    }


def test_lost_steps_are_reported_by_cause() -> None:
    assert summary_of(CHURN).lost_by_cause == {"notice": 0, "kill": 5}


def test_a_worker_s_pace_and_link_come_from_its_last_and_its_fastest_transfer() -> None:
    first = ended(4.0, 1, "a", pull_seconds=1.0, train_seconds=2.0, push_seconds=0.5, pull_bytes=1000, push_bytes=4000)
    second = {**leased(4.0, 1, "a"), "attempt": 2, "step": 30}
    third = ended(6.0, 2, "a", pull_seconds=0.5, train_seconds=4.0, push_seconds=0.5, pull_bytes=1000, push_bytes=100)
    summary = summary_of([started(), joined(0.0, "a"), leased(0.0, 0, "a"), first, second, third])
    worker = summary.workers["tcp://a"]
    assert worker.pace == 5.0  # 20 of its 50 steps, in 4 s
    assert worker.link_bytes_per_second == summary.link_bytes_per_second == 8000.0


def test_a_worker_that_comes_back_under_its_old_address_is_another_one() -> None:
    left = event("worker_left", 2.0, worker="tcp://a", name="a", cause="kill")
    summary = summary_of([started(), joined(0.0, "a"), left, joined(5.0, "a"), event("waiting", 6.0, reason="")])
    assert summary.alive_seconds == 2.0 + 1.0
    assert [(worker.joined, worker.left) for worker in summary.all_workers] == [(0.0, 2.0), (5.0, None)]


def test_a_worker_joins_until_it_has_joined_or_failed_to() -> None:
    summary = summary_of([started(), *(event("worker_joining", 1.0, worker=f"tcp://{name}") for name in "abc")])
    assert list(summary.joining) == ["tcp://a", "tcp://b", "tcp://c"]
    summary.add(joined(2.0, "a"))
    summary.add(event("joining_failed", 2.0, worker="tcp://b"))
    summary.add(event("worker_refused", 2.0, worker="tcp://c", reason="version"))
    assert not summary.joining


def test_a_round_s_record_is_the_sum_so_far() -> None:
    summary = summary_of([started(), committed(2.0, 0)])
    assert summary.round_record(committed(2.0, 0)) == {
        "evaluated_rounds": None,
        "round_seconds": 2.0,
        "rounds": 1,
        "local_steps": 100,
        "epochs": None,
        "lr": None,
        "accuracy": None,
        "loss": None,
        "train_loss": 0.4,
        "seconds": 2.0,
        "goodput": None,
        "preemptions": {"notice": 0, "kill": 0},
    }


def test_a_round_s_record_says_which_network_its_scores_are_of() -> None:
    scored = {**event("evaluated", 2.5, round=1, accuracy=0.5, loss=1.0, seconds=0.1)}
    summary = summary_of([started(), committed(2.0, 0), scored, committed(3.0, 1)])
    record = summary.round_record(committed(3.0, 1))
    assert (record["rounds"], record["evaluated_rounds"], record["accuracy"]) == (2, 1, 0.5)


def test_the_last_lines_say_how_it_was_trained() -> None:
    assert "trained by" not in "\n".join(final_lines(Summary(run="demo"), "failed"))
    assert "  trained by ist: 2 subnets a round" in final_lines(summary_of([started()]), "done")
    job = {"training": {"optimizer": {"name": "sgd", "lr": 0.05}}}
    lines = final_lines(summary_of([{**started(), "job": job}]), "done")
    assert "  trained by ist: 2 subnets a round, sgd, learning rate 0.05" in lines


def test_steps_are_passes_over_the_data_and_samples_a_second() -> None:
    run = {**started(), "samples": 1600, "samples_a_step": 32.0}
    summary = summary_of([run, {**committed(2.0, 0), "lr": 0.05}])
    record = summary.round_record(committed(2.0, 0))
    assert (record["epochs"], record["lr"]) == (100 * 32 / 1600, 0.05)
    assert summary.samples_per_second == 100 / 2.0 * 32
    assert "  100 local steps, 2.0 epochs, in 2 s" in final_lines(summary, "done")


def test_without_rounds_an_update_is_accepted_as_it_comes_and_the_least_trained_neuron_is_told() -> None:
    run = {**started(), "policy": "rolling"}
    last = {**committed(5.0, 0), "least_trained": 0.75}
    summary = summary_of([run, joined(0.0, "a"), leased(0.0, 0, "a"), staged(4.0, 0, 4.0), last])
    assert [cell.state for cell in summary.grid[0]][:1] == ["accepted"]
    assert summary.as_record()["least_trained"] == 0.75
    assert "  each neuron had at least 75% of the mean's steps" in final_lines(summary, "done")


def test_a_phase_has_subnets_and_steps_of_its_own() -> None:
    begun = event("phase_started", 3.0, round=1, phase=2, subnets=4, copies=2, local_steps=20)
    lease = {**leased(3.5, 3, "a"), "round": 1}
    update = {**staged(4.0, 3, 1.0), "round": 1, "steps": 20}
    summary = summary_of([started(), joined(0.0, "a"), committed(2.0, 0), begun, lease, update])
    assert (summary.subnets, summary.local_steps_each) == (4, 20)
    assert [cell.state for cell in summary.grid[1]] == ["waiting", "waiting", "waiting", "staged"]
    assert summary.puts["accepted"] == 1


def test_the_steps_of_each_worker_are_summed() -> None:
    found = {w.name: (w.subnets, w.steps, w.lost_steps) for w in summary_of(CHURN).all_workers}
    assert found == {"a": (0, 30, 0), "b": (1, 50, 5), "c": (1, 50, 0)}
