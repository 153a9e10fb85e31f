"""`idletrain runs` lists what is here, and `idletrain status` needs no name of the only run that trains."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rehearsal import RECORD
from typer.testing import CliRunner

from idletrain.cli import runs
from idletrain.cli.main import app
from idletrain.cli.places import Place, note_launch
from idletrain.cli.runs import RunLine, in_columns
from idletrain.cloud import record
from idletrain.cloud.aws.account import Account
from idletrain.errors import JobError
from idletrain.storage import S3Prefix

STARTED = {
    "v": 2,
    "t": 100.0,
    "s": 0.0,
    "kind": "run_started",
    "run": "night",
    "subnets": 2,
    "target": None,
    "parameters": 10,
    "run_dir": "runs/night",
    "dashboard": "",
    "rounds": 8,
    "resumed_at": 0,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def add(name: str, *events: dict[str, Any]) -> None:
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_runs_are_below_each_other_and_empty_columns_are_left_out() -> None:
    lines = [RunLine("night", "running", 3, 80, "accuracy 0.8960", 100.0), RunLine("b", "completed")]
    assert list(in_columns(lines, 165.0)) == ["night  running    3/80  accuracy 0.8960  65 s ago", "b      completed"]
    (priced,) = in_columns([RunLine("a", "running", usd=0.5)], 0.0)
    assert priced == "a  running  $0.50"
    assert list(in_columns([], 0.0)) == ["no runs are here; `idletrain launch JOB` starts one"]


def test_runs_of_this_folder_are_listed_the_newest_first_with_those_that_cannot_be_read() -> None:
    add("old", STARTED)
    add("new", {**STARTED, "t": 200.0})
    listed = json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)
    assert [line["name"] for line in listed] == ["new", "old"]
    assert all(line["state"].startswith(("unreadable: ", "interrupted")) for line in listed)


def test_status_without_a_name_shows_the_only_run_that_trains_or_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.the_one_that_trains(None, None) is None
    for name in ("a", "b"):
        add(name, STARTED)
    monkeypatch.setattr(runs, "_local_line", lambda folder: RunLine(folder.name, "running"))
    assert runs.the_one_that_trains(None, None) is None
    assert sorted(CliRunner().invoke(app, ["status"]).stdout.splitlines()) == ["a  running", "b  running"]
    monkeypatch.setattr(runs, "_local_line", lambda folder: RunLine(folder.name, {"a": "running"}.get(folder.name, "")))
    assert runs.the_one_that_trains(None, None) == Place("runs/a")


def test_runs_of_clouds_that_were_used_are_in_the_list_and_a_cloud_that_cannot_be_read_is_told(
    monkeypatch: pytest.MonkeyPatch, account: Account
) -> None:
    prefix = S3Prefix(account.s3, account.bucket, "runs/far/")
    record.claim(prefix, RECORD)
    note_launch(Place("far", "aws", account.region))
    note_launch(Place("gone", "another"))
    add("near", STARTED)
    listed = CliRunner().invoke(app, ["runs", "--json"])
    found = {line["name"]: line["place"] for line in json.loads(listed.stdout)}  # beside those of other tests
    assert (found["far"], found["near"]) == (f"aws {account.region}", "")
    assert "another: --cloud: there is no provider another" in listed.stderr
    prefix.delete(prefix.names())


def test_a_cloud_that_there_is_not_is_refused() -> None:
    with pytest.raises(JobError, match="--cloud: there is no provider nope"):
        CliRunner().invoke(app, ["runs", "--cloud", "nope"], catch_exceptions=False, standalone_mode=False)


def test_runs_that_may_not_be_listed_are_no_runs_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    Path("runs").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)  # root may list whatever is forbidden
    with pytest.raises(PermissionError):
        CliRunner().invoke(app, ["runs"], catch_exceptions=False, standalone_mode=False)
