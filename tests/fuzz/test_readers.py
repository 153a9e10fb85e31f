"""Odd bytes end in a sentence or in nothing, whoever reads them; and no reader is left out."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from reader import Reader, mutations
from readers import READERS

import idletrain

MUTATIONS = 12  # for each seed; `make fuzz` makes millions
SLOW_SECONDS = 20.0
PACKAGE = Path(idletrain.__file__).parent
PARSERS = re.compile(
    r"json\.loads|safe_load|np\.load\(|tarfile\.open|Image\.open|safe_open|struct\.unpack|_HEADER\.unpack|fromisoformat"
    r"|strptime|b64decode|load_pem|validate_json|validate_python|urlsplit\("
)
ELSEWHERE = {
    "cli.job_check": "a process of its own answers",
    "cli.schedule": "a job in one guard",
    "cloud.aws.schedules.starter_node": "tags that EventBridge wrote, and a job in one guard",
    "cloud.sandbox.cloud": "user data that a launch refuses where it is not base64",
    "cloud.sandbox.provider": "its own sandbox answers",
    "cluster.dask_scheduler": "its own head writes to it",
    "cluster.fork_server": "its own head writes to it",
    "cluster.forked_processes": "its own process answers",
    "fabric.measuring.collective_process": "its own task writes to it",
    "fabric.measuring.tasks": "its own process answers",
    "nn.outofcore.executing.compiling": "its own process answers",
    "observe.dashboard_feed": "the link of a scheduler that is already trusted",
    "sweeps.trial_process": "its own process answers",
    "worker.process": "an address that was checked before",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers write into the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")  # NumPy and zipfile warn about damaged bytes before they refuse them
@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_odd_bytes_end_in_a_clean_error_or_in_none(reader: Reader) -> None:
    for seed in (*reader.sound, *reader.odd):
        for content in (seed, *mutations(seed, MUTATIONS)):
            began = time.monotonic()
            reader.accepts(content)
            assert time.monotonic() - began < SLOW_SECONDS


@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_sound_bytes_are_taken(reader: Reader) -> None:
    assert reader.sound
    assert [content for content in reader.sound if not reader.accepts(content)] == []


def test_every_module_that_parses_has_a_reader() -> None:
    parsing = {path for path in PACKAGE.rglob("*.py") if PARSERS.search(path.read_text())}
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in parsing}
    covered = {module for reader in READERS.values() for module in reader.modules}
    assert names - covered - ELSEWHERE.keys() == set()
    assert ELSEWHERE.keys() - names == set()
    assert {module for module in covered if not (PACKAGE / f"{module.replace('.', '/')}.py").exists()} == set()
