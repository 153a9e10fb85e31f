"""Where a rehearsal's run is kept, and how it goes on; tests/chaos keeps one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idletrain.cli.kept_rehearsal import free_directory, further
from idletrain.job import Job
from idletrain.job_file import parse_job


def job(**fields: Any) -> Job:
    return parse_job({"name": "night", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}, **fields})


def test_a_taken_name_gets_the_next_free_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        found.append(free_directory("night"))
        found[-1].mkdir(parents=True)
    assert found == [Path("runs/night"), Path("runs/night-2"), Path("runs/night-3")]


def test_a_kept_run_goes_on_by_the_name_that_it_has_here() -> None:
    said = further(job(), Path("my job.yaml"), Path("runs/night-2"))
    assert said == "; go on with it on this machine: idletrain launch 'my job.yaml' --name night-2 --resume"


@pytest.mark.parametrize("to", ["elsewhere/", "s3://bucket/runs"])
def test_no_command_is_told_that_would_look_elsewhere(to: str) -> None:
    assert not further(job(checkpoint={"to": to}), Path("job.yaml"), Path("runs/night-2"))
