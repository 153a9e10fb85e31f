"""`idletrain init` writes jobs that train at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml
from typer.testing import CliRunner

from idletrain.cli.main import app
from idletrain.cli.start import TEMPLATES, Template
from idletrain.errors import JobError
from idletrain.job_file import load_job

IDLETRAIN = [sys.executable, "-m", "idletrain"]


def init(folder: Path, template: Template) -> None:
    written = warm.run([*IDLETRAIN, "init", str(folder), "--template", template])
    assert (written.returncode, written.stderr) == (0, "")
    assert "README.md says how to train it" in written.stdout


@pytest.mark.parametrize("template", [Template.IMAGE, Template.TEXT, Template.TABULAR, Template.WIDE])
def test_a_job_that_is_written_trains_as_it_is(template: Template, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    init(folder, template)
    if template is Template.WIDE:
        subprocess.run([sys.executable, "make_data.py", "--rows", "4000"], cwd=folder, check=True)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["training"] |= {"rounds": 2, "local_steps": 5, "evaluate_every": 2}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = warm.run([*IDLETRAIN, "launch", "job.yaml", "--json"], folder=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "completed"


def test_a_spot_job_that_is_written_is_sound(tmp_path: Path) -> None:
    init(tmp_path, Template.SPOT)
    planned = warm.run([*IDLETRAIN, "plan", "job.yaml"], folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert load_job(tmp_path / "job.yaml").nodes.budget_usd == 1


def test_nothing_of_one_s_own_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    refused = CliRunner().invoke(app, ["init", str(tmp_path)])
    assert isinstance(refused.exception, JobError)
    assert f"{tmp_path}: has job.yaml already; name an empty folder" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(app, ["init", str(tmp_path / "file" / "mine")])
    assert "cannot be written (Not a directory); name another folder" in str(refused.exception)


def test_the_demo_is_the_repository_s_own_job() -> None:
    assert load_job(TEMPLATES / "demo.yaml").name == "fashion-mnist"


def test_commands_are_in_groups_and_the_internal_one_is_hidden() -> None:
    shown = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "100"}).stdout
    for group in ("Start", "Train", "Watch", "Cloud", "Cluster", "Schedule"):
        assert f"─ {group} ─" in shown
    assert "│ node " not in shown
    assert "Exit codes: 0 done" in shown
    assert "15s" in CliRunner().invoke(app, ["launch", "-h"], env={"COLUMNS": "100"}).stdout
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("idletrain 0.")
