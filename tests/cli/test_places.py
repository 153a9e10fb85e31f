"""A run's name is enough, wherever the run is; what is ambiguous is asked for."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Literal

import pytest
from rehearsal import RECORD

from idletrain.cli.places import LAUNCHES, Place, directory_of, events_of, find_run, note_launch, noted, seen_until
from idletrain.cloud import record
from idletrain.cloud.aws.account import Account
from idletrain.errors import JobError, RunError
from idletrain.storage import S3Prefix, only_head, state_folder

NIGHT = Place("night", "aws", "eu-west-1")
NO_PROCESS = 4_000_000


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_that_nobody_knows_is_where_the_user_says() -> None:
    assert find_run("night", "sandbox") == Place("night", "sandbox")
    assert find_run("night", region="eu-west-2") == Place("night", "aws", "eu-west-2")
    assert find_run("s3://mine/runs/night") == Place("s3://mine/runs/night", "aws")


def test_a_name_that_nobody_knows_may_be_in_the_configured_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert find_run("night", here="never") == Place("night", "aws")
    with pytest.raises(RunError, match="there is no run night"):
        find_run("night", here="otherwise")


@pytest.mark.parametrize("locally", ["too", "otherwise", "never"])
def test_without_a_place_it_is_refused_with_what_is_there(locally: Literal["too", "otherwise", "never"]) -> None:
    for name, known in (
        ("night", "there is none at all"),
        ("nihgt", "did you mean night?"),
        ("9", "there are: day, night;"),
    ):
        with pytest.raises(RunError, match=rf"there is no run {name} in runs; {re.escape(known)}.* add --cloud"):
            find_run(name, here=locally)
        for other in ("night", "day"):
            Path("runs", other, "wal").mkdir(parents=True, exist_ok=True)
    for n in range(10):
        Path("runs", f"more{n}", "wal").mkdir(parents=True)
    with pytest.raises(RunError, match="there are: day, more0, more1, more2, more3, more4, more5, more6 and 4 more;"):
        find_run("9", here=locally)
    with pytest.raises(RunError, match="there is no run 9 in elsewhere; there is none at all"):
        find_run("elsewhere/9")


def test_a_sweep_s_name_leads_to_its_trials() -> None:
    Path("runs").mkdir()
    Path("runs/rates.sweep.json").touch()
    with pytest.raises(RunError, match="rates is a sweep; `idletrain compare rates` shows its trials"):
        find_run("rates")


def test_a_launched_run_is_found_by_its_name() -> None:
    elsewhere = Place("s3://mine/deep/day/", "aws", "us-east-1")
    for place in (NIGHT, NIGHT, elsewhere):
        note_launch(place)
    assert noted() == [NIGHT, elsewhere]
    assert find_run("night") == find_run("night", "aws") == NIGHT
    assert find_run("day") == find_run("s3://mine/deep/day") == elsewhere
    assert find_run("night", region="eu-west-2") == Place("night", "aws", "eu-west-2")
    assert (state_folder() / LAUNCHES).stat().st_mode & 0o777 == 0o600


def test_a_name_of_several_runs_is_asked_for() -> None:
    note_launch(NIGHT)
    Path("runs/night").mkdir(parents=True)
    with pytest.raises(JobError, match="there is a run night in runs/night and in aws eu-west-1; name its directory"):
        find_run("night")
    assert find_run("runs/night") == Place("runs/night")
    assert find_run("night", here="never") == find_run("night", "aws") == NIGHT
    assert find_run("night", here="otherwise") == NIGHT  # of commands about clouds
    note_launch(Place("night", "aws", "eu-west-2"))
    with pytest.raises(JobError, match="in aws eu-west-1 and in aws eu-west-2"):
        find_run("night", here="never")
    assert find_run("night", region="eu-west-1") == NIGHT


def test_of_a_run_that_no_cloud_has_machines_there_are_none() -> None:
    Path("runs/night").mkdir(parents=True)
    with pytest.raises(
        RunError, match="run night is in runs/night, and no cloud's machine trains it; there is nothing"
    ):
        find_run("night", here="never")
    assert find_run("night", region="eu-west-2", here="never") == Place("night", "aws", "eu-west-2")


def test_what_has_ended_costs_no_more() -> None:
    events = [{"t": 5.0}]
    Path("runs/night").mkdir(parents=True)
    assert seen_until(Place("runs/night"), events) == 5.0
    assert seen_until(NIGHT, events) == pytest.approx(time.time(), abs=60)
    with only_head(Path("runs/night")):
        assert seen_until(Place("runs/night"), events) == pytest.approx(time.time(), abs=60)


def test_a_rehearsal_is_known_as_long_as_it_goes_on(account: Account) -> None:
    going_on = Place("night", "sandbox", rehearsal=os.getpid())  # whose cloud is this process' own
    note_launch(Place("old", "sandbox", rehearsal=NO_PROCESS))
    note_launch(going_on)
    assert noted() == [going_on]
    assert find_run("night") == going_on
    with pytest.raises(RunError, match="there is no run old"):
        find_run("old")
    Path("runs/old").mkdir(parents=True)
    assert find_run("old", here="otherwise") == Place("runs/old")


def test_damaged_notes_and_a_folder_that_cannot_be_written_are_no_trouble(here: Path) -> None:
    note_launch(NIGHT)
    with (state_folder() / LAUNCHES).open("ab") as file:
        file.write(b'\xff\n{"run": 1}\n[]\n{"run": "a", "cloud": "b", "region": null, "rehearsal": -1}\n{"run')
    assert noted() == [NIGHT]
    (here / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(here / "file"))
        note_launch(NIGHT)
        assert noted() == []


def test_of_a_run_in_a_cloud_without_a_network_there_is_no_directory_yet(account: Account) -> None:
    prefix = S3Prefix(account.s3, account.bucket, "runs/young/")
    record.claim(prefix, RECORD)
    young = Place("young", "aws")
    assert events_of(young) == []
    with pytest.raises(RunError, match="young/ holds no network yet; look again after its first round"):
        directory_of(young).__enter__()
    prefix.delete(prefix.names())
