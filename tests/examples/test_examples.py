"""Every example runs, in a tiny preset: its script with --tiny, or its job with two rounds."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import yaml
from nbclient import NotebookClient

from idletrain.cli.main import app
from idletrain.observe.summary import summarise

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("tabular", "text_classifier", "small_gpt")
JOBS = ("own_cnn", "extreme_classification", "nightly_cron", "spot_launch")
NOTEBOOKS = ("notebook",)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies an example to a directory of the test's own, with fewer rounds, and makes that the working directory."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder)
        monkeypatch.chdir(folder)
        if (folder / "job.yaml").exists():
            monkeypatch.syspath_prepend(str(folder))
            tree = yaml.safe_load((folder / "job.yaml").read_text())
            tree["training"] |= {"rounds": 2, "evaluate_every": 2, "local_steps": 5}
            (folder / "job.yaml").write_text(yaml.safe_dump(tree))
        return folder

    return make


def idletrain(*arguments: str) -> str:
    """What a command prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "idletrain", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_readme_and_runs_here() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert folders == {*SCRIPTS, *JOBS, *NOTEBOOKS}
    table = (EXAMPLES / "README.md").read_text()
    for name in folders:
        assert (EXAMPLES / name / "README.md").is_file()
        assert f"`{name}`" in table


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, copy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy(name)
    monkeypatch.setattr(sys, "argv", ["train.py", "--tiny"])
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    assert next(iter(folder.glob("runs/*/wal")))
    shown = capsys.readouterr().out
    assert ("accuracy" in shown) or ("loss" in shown)


def test_own_cnn(copy: Any) -> None:
    folder = copy("own_cnn")
    app(["launch", "job.yaml"], standalone_mode=False)
    assert summarise(folder / "runs/own-cnn/events.jsonl").status == "completed"


def test_extreme_classification(copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("extreme_classification")
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--rows", "2000"])
    runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    app(["launch", "job.yaml"], standalone_mode=False)
    assert summarise(folder / "runs/extreme/events.jsonl").accuracy is not None


def test_nightly_cron(copy: Any, tmp_path: Path) -> None:
    folder = copy("nightly_cron")
    place = ("--directory", str(tmp_path / "schedules"))
    cron = ("--cron", "0 2 * * *", "--tz", "America/Sao_Paulo", "--on", "loop")
    assert "next on" in idletrain("schedule", "add", "nightly", "job.yaml", *cron, *place)
    assert "completed" in idletrain("schedule", "run", "nightly", *place) or list(folder.glob("runs/*/wal"))
    assert "nightly: removed" in idletrain("schedule", "remove", "nightly", *place)


def test_spot_launch(copy: Any) -> None:
    copy("spot_launch")
    assert "completed: spot-example" in idletrain("launch", "job.yaml", "--spot", "--cloud", "sandbox")


def test_notebook(copy: Any) -> None:
    folder = copy("notebook")
    notebook = nbformat.read(folder / "digits.ipynb", as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    *_, accuracy, curve = [cell.outputs[-1]["data"]["text/plain"] for cell in notebook.cells if cell.get("outputs")]
    assert float(accuracy.removeprefix("np.float64(").removesuffix(")")) > 0.5
    assert np.shape(ast.literal_eval(curve)) == (5, 2)
