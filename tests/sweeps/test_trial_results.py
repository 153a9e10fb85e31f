"""What trials have come to is kept, and a file that holds something else is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from idletrain.errors import DamageError
from idletrain.sweeps.trial_results import ResultsFile, SweepResult


def test_what_is_written_is_read_and_a_new_trial_waits(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "runs" / "x.sweep.json")
    assert file.read(["a"]) == {"a": SweepResult()}
    done = SweepResult(
        "completed", "", True, [(1, 0.5), (2, 0.25)], {"status": "completed"}, 1.5, {"model.factory": "m"}, "x/a", 2
    )
    file.write({"a": done})
    assert file.read(["a", "b"]) == {"a": done, "b": SweepResult()}
    assert (done.value, done.ended) == (0.25, True)
    assert (SweepResult().value, SweepResult("pruned").ended, SweepResult("stopped").ended) == (None, True, False)


def test_trials_that_a_sweep_had_before_stay_in_its_file(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "x.sweep.json")
    file.write({"a": SweepResult("completed", "", True, [(1, 0.5)])})
    changed = ResultsFile(tmp_path / "x.sweep.json")
    changed.write({**changed.read(["b"]), "b": SweepResult("running")})
    assert changed.names() == ["a", "b"]
    assert ResultsFile(tmp_path / "x.sweep.json").read(["a"])["a"].ended


@pytest.mark.parametrize("content", ["", "[]", '{"a": {}}', '{"a": {"state": 1, "values": 3}}'])
def test_a_damaged_file_is_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(DamageError, match="delete it and the runs of its trials to begin the sweep again"):
        ResultsFile(tmp_path / "x").read(["a"])
