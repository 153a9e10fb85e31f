"""Folders of a run directory that nobody may write to any more, in the middle of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from .helpers import Control, Process, Run

# Root without the right to pass over modes; another user has none.
OBEYING = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()


@pytest.mark.parametrize("folders", [("updates",), ("snapshots",), (".", "updates", "snapshots")], ids="".join)
def test_a_folder_that_becomes_read_only_ends_the_run_by_name_and_it_goes_on_from_there(
    folders: tuple[str, ...],
    make_run: Callable[..., Run],
    control: Control,
    started: list[Process],
    undisturbed: Callable[..., list[str]],
) -> None:
    run = make_run(rounds=6, checkpoint={"every": "1ms"})
    control.pace(0.05)
    command = [*OBEYING, sys.executable, "-m", "idletrain", "launch", run.file]
    head = Process(command, control.environment, run.scratch / "obeying.log", run.scratch)
    started.append(head)
    run.wait("a round", "round_committed")
    closed = [run.dir.resolve() / folder for folder in folders]
    for folder in closed:
        folder.chmod(0o500)
    control.pace(0)
    try:
        code = head.exit_code()
    finally:
        for folder in closed:
            folder.chmod(0o700)
    assert code == 1, head.text
    assert "bug" not in head.text
    assert "cannot be written (Permission denied); fix that and add --resume" in head.text
    end = run.events("run_ended")[-1]
    assert end["status"] == "failed"
    assert end["reason"] in head.text
    assert end["reason"].startswith(tuple(f"{folder}/" for folder in closed))
    assert 1 <= end["rounds"] < 6
    run.resume()
    run.check(undisturbed())
