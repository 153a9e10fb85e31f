"""A job's model and data are read in a process that says what is wrong with them, and that never stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from idletrain.cli import job_check
from idletrain.cluster import forked_processes
from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.job_file import parse_job


def job(factory: str = "idletrain.nn.models:mlp", first: int = 64) -> Job:
    model = {"factory": factory, "args": {"widths": [first, 8, 10]}}
    return parse_job({"name": "t", "model": model, "data": {"name": "digits"}})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the user's own modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(
        "print('imported')\n\ndef net(widths):\n    from idletrain.nn.models import mlp\n    return mlp(widths)\n"
    )
    (tmp_path / "deadly.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    (tmp_path / "endless.py").write_text("import pathlib, time\npathlib.Path('at-work').touch()\ntime.sleep(600)\n")
    return tmp_path


def test_a_job_that_fits_has_no_faults_whatever_its_code_prints() -> None:
    with job_check.checking(job("loud:net")) as check:
        assert check.faults() == ()


def test_faults_are_those_that_a_launch_here_would_tell() -> None:
    with job_check.checking(job(first=63)) as check:
        (fault,) = check.faults()
    assert fault.startswith("model: does not take inputs of shape [64]: ")


def test_a_check_that_is_killed_is_a_sentence() -> None:
    with job_check.checking(job("deadly:net")) as check, pytest.raises(RunError) as raised:
        check.faults()
    assert str(raised.value) == "the check of the model and the data was killed by signal 9; is there memory enough?"


def test_nobody_has_to_wait_for_it(here: Path) -> None:
    def checks() -> list[Any]:
        there = psutil.process_iter(["cwd"])  # a fork has its warm parent's command line
        return [p for p in there if p.info["cwd"] == str(here) and p.pid != os.getpid()]

    with job_check.checking(job("endless:net")):
        while not (here / "at-work").exists():
            time.sleep(0.05)
        (process,) = checks()
        assert process.is_running()
    assert not checks()


def test_nobody_has_to_wait_for_a_fork_either(here: Path) -> None:
    os.chdir("/")  # where the warm parent stays
    forked_processes.warm_up(os.environ)
    os.chdir(here)
    test_nobody_has_to_wait_for_it(here)
