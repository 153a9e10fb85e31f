"""Every example runs: the commands of its README in tests/docs/test_docs.py, the notebook here."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = {"notebook"}


def test_every_example_has_commands_in_its_readme_or_a_notebook() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    with_commands = {name for name in folders if "```console" in (EXAMPLES / name / "README.md").read_text()}
    assert folders == with_commands | NOTEBOOKS
    table = (EXAMPLES / "README.md").read_text()
    for name in folders:
        assert f"`{name}`" in table


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "notebook"
    shutil.copytree(EXAMPLES / "notebook", folder)
    monkeypatch.chdir(folder)
    notebook = nbformat.read(folder / "digits.ipynb", as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    *_, accuracy, curve = [cell.outputs[-1]["data"]["text/plain"] for cell in notebook.cells if cell.get("outputs")]
    assert float(accuracy.removeprefix("np.float64(").removesuffix(")")) > 0.5
    assert np.shape(ast.literal_eval(curve)) == (6, 2)  # after the first of ten rounds, and after every other
