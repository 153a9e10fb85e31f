"""A training goes on where its output is lost; other commands say so, or end where nobody reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from idletrain.observe.summary import summarise

FULL = Path("/dev/full")
JOB = {
    "name": "heard",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "subnets": 2, "rounds": 2, "local_steps": 5},
    "nodes": {"count": 1, "memory": "1GiB"},
    "checkpoint": {"to": "runs"},
}
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def command(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell's command line; `idletrain` in it is this installation's."""
    script = f'set -o pipefail; idletrain() {{ "{sys.executable}" -m idletrain "$@"; }}; {line}'
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "-c", script], check=False, cwd=folder, env=variables, capture_output=True, text=True, timeout=120
    )


def launched(folder: Path, redirection: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    return command(f"idletrain launch job.yaml {redirection}", folder)


@pytest.mark.parametrize(
    ("redirection", "why"),
    [("| head -1", "Broken pipe"), pytest.param(">/dev/full", "No space left on device", marks=needs_full)],
)
def test_training_goes_on_without_its_output_and_says_so(tmp_path: Path, redirection: str, why: str) -> None:
    ended = launched(tmp_path, redirection)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"idletrain: standard output cannot be written ({why}); training goes on") == 1
    assert summarise(tmp_path / "runs/heard/events.jsonl").status == "completed"


def test_training_goes_on_where_all_streams_are_closed(tmp_path: Path) -> None:
    assert launched(tmp_path, "<&- >&- 2>&-").returncode == 0
    assert summarise(tmp_path / "runs/heard/events.jsonl").status == "completed"


def test_a_command_that_nobody_reads_ends_without_a_word(tmp_path: Path) -> None:
    ended = command("idletrain fields | true", tmp_path)
    assert (ended.returncode, ended.stderr) == (1, "")


@needs_full
def test_a_full_disk_is_told_as_that_of_the_output(tmp_path: Path) -> None:
    ended = command("idletrain fields >/dev/full", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "idletrain: standard output: No space left on device; make room there\n"


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    ended = command("idletrain fields nodes", tmp_path, PYTHONIOENCODING="latin-1")
    assert ended.returncode == 0, ended.stderr
    assert "nodes.count: integer \\u2265 1" in ended.stdout
