"""Events in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_summary import CHURN

from idletrain.errors import RunError
from idletrain.observe.record_fields import FIELDS_OF_KIND
from idletrain.observe.records import Recorder, parse, read_records


def test_what_is_recorded_is_reported_to_sinks_and_read_back(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    recorder = Recorder(tmp_path / "events.jsonl", [seen.append])
    recorder("waiting", reason="for workers")
    recorder("snapshot", round=3, seconds=0.1)
    recorder.close()
    assert list(read_records(tmp_path / "events.jsonl")) == seen
    assert [e["kind"] for e in seen] == ["waiting", "snapshot"]
    assert all(e.keys() >= {"v", "t", "s"} and e["v"] == 2 for e in seen)


def test_nothing_follows_the_end_of_a_run(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    recorder = Recorder(tmp_path / "events.jsonl", [seen.append])
    recorder("run_ended", status="stopped", rounds=1, params_sha256="0", run_dir="runs/digits")
    recorder("refused", round=1, subnet=0, attempt=3, reply="stale-round", where="")  # a push that was under way
    recorder.close()
    assert [event["kind"] for event in seen] == ["run_ended"]
    assert list(read_records(tmp_path / "events.jsonl")) == seen


def test_a_line_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in CHURN) + '{"kind": "round_comm')
    assert list(read_records(path)) == CHURN


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    recorder = Recorder(full, [seen.append])
    recorder("waiting", reason="for room")
    recorder.close()
    assert len(seen) == 1


def test_what_a_killed_head_left_of_a_line_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"v": 2, "kind": "snapshot"}\n{"v": 2, "kind": "roun')
    recorder = Recorder(path)
    recorder("waiting", reason="for workers")
    recorder.close()
    assert [event["kind"] for event in read_records(path)] == ["snapshot", "waiting"]


@pytest.mark.parametrize("line", ["", "[]", "7", '{"v": 2}', '{"kind": "a"', "nothing\n"])
def test_what_is_no_event_is_left_out(line: str) -> None:
    assert list(parse([line, b'{"kind": "b"}'])) == [{"kind": "b"}]


@pytest.mark.parametrize(("schema", "which"), [(1, "the older"), (3, "a newer")])
def test_records_of_another_schema_are_refused_by_its_number(schema: int, which: str) -> None:
    message = f"these records are of schema {schema} and this idletrain reads 2; use {which} version"
    with pytest.raises(RunError, match=message):
        list(parse([f'{{"v": {schema}, "kind": "a"}}']))


def test_a_line_whose_schema_is_damaged_does_not_hide_the_others() -> None:
    lines = ['{"v": 3, "kind": "a"}', '{"v": "x", "kind": "a"}', '{"v": 2, "kind": "b"}', '{"v": true, "kind": "c"}']
    assert [event["kind"] for event in parse(lines)] == ["b"]


def test_a_recorder_whose_file_cannot_be_opened_tells_its_sinks(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    seen: list[dict[str, Any]] = []
    recorder = Recorder(tmp_path / "events.jsonl", [seen.append])
    recorder("waiting", reason="for workers")
    recorder.close()
    assert [event["kind"] for event in seen] == ["waiting"]


def test_events_are_completed_before_anyone_gets_them(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    recorder = Recorder(tmp_path / "events.jsonl", [seen.append], lambda event: event.update(more=event["round"] + 1))
    recorder("snapshot", round=3, seconds=0.1)
    recorder.close()
    assert seen[0]["more"] == 4
    assert list(read_records(tmp_path / "events.jsonl")) == seen


@pytest.mark.parametrize("kind", ["leased", "staged", "lost", "round_committed", "worker_joined", "run_started"])
def test_a_record_with_an_altered_key_or_value_is_left_out(kind: str) -> None:
    sound = next(e for e in CHURN if e["kind"] == kind)
    assert list(parse([json.dumps(sound)])) == [sound]
    for field in FIELDS_OF_KIND[kind].split():
        without = {name: value for name, value in sound.items() if name != field}
        assert list(parse([json.dumps(without)])) == []
        for wrong in ({}, [1]):
            assert list(parse([json.dumps({**sound, field: wrong})])) == []


@pytest.mark.parametrize("wrong", ["x", {"training": 1}, {"training": {"optimizer": "sgd"}}, {"nodes": [1]}])
def test_a_start_whose_job_is_no_job_is_left_out(wrong: Any) -> None:
    sound = next(e for e in CHURN if e["kind"] == "run_started") | {"job": {"training": {"optimizer": {"lr": 0.1}}}}
    assert list(parse([json.dumps(sound)])) == [sound]
    assert list(parse([json.dumps({**sound, "job": wrong})])) == []


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "staged", "round": 0, "subnet": 1, "attempt": 2, "worker": None, "steps": 3, "train_seconds": 0.0},
        {
            "kind": "instance_launched",
            "t": 1.0,
            "instance": "i-1",
            "role": "worker",
            "type": "c7a.large",
            "zone": "a",
            "market": "spot",
            "usd_per_hour": None,
            "on_demand_usd_per_hour": None,
        },
    ],
    ids=lambda event: event["kind"],
)
def test_a_record_of_a_worker_that_is_gone_or_a_price_that_is_unknown_is_sound(event: dict[str, Any]) -> None:
    assert list(parse([json.dumps({"s": 0.0, **event})])) == [{"s": 0.0, **event}]
