"""The line that says which tests did not run, and why."""

from __future__ import annotations

from skips import skipped_for


def test_skips_are_counted_by_reason_in_one_line_with_the_way_out():
    skipped = [
        ("tests/a.py", 3, "Skipped: there is no CUDA device"),
        ("tests/b.py", 5, "Skipped: mlflow is not installed"),
        ("tests/c.py", 7, "Skipped: there is no CUDA device"),
    ]
    assert skipped_for(skipped) == (
        "did not run here: 2 as there is no CUDA device; 1 as mlflow is not installed "
        "(`make tools peers` installs what can be installed)"
    )


def test_a_run_that_skips_nothing_says_nothing():
    assert skipped_for([]) == ""
