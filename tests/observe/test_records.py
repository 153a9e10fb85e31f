"""Events in a file, and their sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from idletrain.observe.records import Recorder, Summary, read, summarise

RECORD_KEYS = {
    "status",
    "run",
    "rounds",
    "local_steps",
    "accuracy",
    "loss",
    "seconds",
    "goodput",
    "preemptions",
    "reissues",
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
    )


def lost(s: float, subnet: int, cause: str, kept: int, gone: int, seconds: float) -> dict[str, Any]:
    names = {"round": 0, "subnet": subnet, "attempt": 1, "worker": "tcp://a"}
    return event("lost", s, **names, cause=cause, kept_steps=kept, lost_steps=gone, kept_seconds=seconds)


def leased(s: float, subnet: int, worker: str) -> dict[str, Any]:
    return event("leased", s, round=0, subnet=subnet, attempt=1, worker=f"tcp://{worker}", step=0)


def staged(s: float, subnet: int, seconds: float) -> dict[str, Any]:
    return event("staged", s, round=0, subnet=subnet, attempt=2, worker="tcp://b", steps=50, train_seconds=seconds)


CHURN = [
    started(),
    joined(0.0, "a"),
    joined(0.0, "b"),
    leased(0.0, 0, "a"),
    leased(0.0, 1, "b"),
    event("worker_notice", 3.5, worker="tcp://a"),
    lost(4.0, 0, "notice", 30, 0, 3.0),
    event("worker_left", 4.0, worker="tcp://a", name="a", cause="notice"),
    staged(5.0, 1, 4.0),
    leased(5.0, 0, "b"),
    lost(6.0, 0, "kill", 0, 5, 0.0),
    event("worker_left", 6.0, worker="tcp://b", name="b", cause="kill"),
    joined(6.0, "c"),
    leased(6.0, 0, "c"),
    staged(8.0, 0, 2.0),
    committed(8.0, 0),
    event("evaluated", 8.5, round=1, accuracy=0.8, loss=0.5, seconds=0.1),
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
        "rounds": 1,
        "local_steps": 100,
        "accuracy": 0.8,
        "loss": 0.5,
        "seconds": 10.0,
        "goodput": round((3.0 + 4.0 + 2.0) / (4.0 + 6.0 + 4.0), 4),  # of a, b and c
        "preemptions": {"notice": 1, "kill": 1},
        "reissues": 2,
        "salvaged_steps": 30,
        "lost_steps": 5,
        "bytes_down": 1000,
        "bytes_up": 500,
        "params_sha256": "ab",
        "run_dir": "runs/demo",
    }


def test_a_record_has_the_documented_fields_also_before_anything_happened() -> None:
    assert Summary().as_record().keys() == RECORD_KEYS
    assert Summary().goodput is None


def test_a_worker_that_leaves_at_the_end_is_no_preemption() -> None:
    summary = summary_of(CHURN)
    assert [cause for _, cause in summary.preempted] == ["notice", "kill"]


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


def test_what_is_recorded_is_told_to_sinks_and_read_back(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    recorder = Recorder(tmp_path / "events.jsonl", [seen.append])
    recorder("waiting", reason="for workers")
    recorder("snapshot", round=3, seconds=0.1)
    recorder.close()
    assert list(read(tmp_path / "events.jsonl")) == seen
    assert [e["kind"] for e in seen] == ["waiting", "snapshot"]
    assert all(e.keys() >= {"v", "t", "s"} and e["v"] == 1 for e in seen)


def test_a_line_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in CHURN) + '{"kind": "round_comm')
    assert summarise(path).as_record() == summary_of(CHURN).as_record()


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    recorder = Recorder(full, [seen.append])
    recorder("waiting", reason="for room")
    recorder.close()
    assert len(seen) == 1


def test_a_line_that_a_full_disk_left_half_written_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"waiting","s":0.0,"reason":"a"}\n{"kind":"wai')
    record = Recorder(path)
    record("waiting", reason="b")
    record.close()
    assert [event["reason"] for event in read(path)] == ["a", "b"]
    with path.open("a") as file:
        file.write('{"kind":"wai{"kind":"waiting","reason":"glued"}\n{"kind":"waiting","s":0.0,"reason":"c"}\n')
    assert [event["reason"] for event in read(path)] == ["a", "b", "c"]


def test_a_run_that_failed_says_so_and_keeps_its_last_score() -> None:
    summary = Summary()
    for event in (
        started(),
        {"kind": "evaluated", "s": 1.0, "round": 1, "accuracy": 0.5, "loss": 1.0, "seconds": 0.1},
        {
            "kind": "run_ended",
            "s": 2.0,
            "status": "failed",
            "rounds": 2,
            "accuracy": None,
            "loss": None,
            "params_sha256": None,
            "run_dir": "runs/demo",
            "reason": "the scheduler is gone",
        },
    ):
        summary.add(event)
    assert (summary.status, summary.accuracy, summary.note) == ("failed", 0.5, "the scheduler is gone")
