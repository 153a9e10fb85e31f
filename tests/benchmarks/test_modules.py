"""The trial of other packages' modules: its arithmetic on rows made by hand, and trials where they are installed."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from benchmarks.environment import MODULES
from benchmarks.modules.__main__ import figures_of, longer_rounds, main, table_of, tried
from benchmarks.modules.catalogue import CASES
from benchmarks.modules.data import Generated, words
from benchmarks.modules.settings import ROUNDS
from idletrain.nn.data.arrays import ArraySource

ROWS = [
    {
        "package": "a",
        "name": "One",
        "accept": {"accepted": True, "seconds": 2.0, "method": "ist", "split": 0.5, "parameters": 1000},
        "train": {
            "losses": {"torch": 0.4, "local-sgd": 0.5, "ist": 0.6},
            "seconds": {"torch": 8.0, "local-sgd": 9.0, "ist": 2.5},
        },
        "longer": {"losses": {"ist": 0.505}},
    },
    {
        "package": "a",
        "name": "Two",
        "accept": {"accepted": True, "seconds": 12.0, "method": "local-sgd", "split": 0.0, "parameters": 2000},
        "train": {"losses": {"torch": 0.4, "local-sgd": 0.5}},
    },
    {"package": "b", "name": "Three", "accept": {"accepted": False, "refused": "model: no"}},
    {"package": "b", "name": "Four", "accept": {"hangs": True}},
    {"package": "c", "name": "Five", "accept": {"left_out": "it does not install"}},
]


def test_there_are_at_least_60_modules_each_with_a_name_of_its_own() -> None:
    assert len(CASES) >= 60
    assert max(Counter((case.package, case.name) for case in CASES).values()) == 1
    assert len({case.package for case in CASES}) >= 20


def test_what_is_left_out_counts_for_nothing_and_all_other_ends_are_counted() -> None:
    values = {figure.what: (figure.value, figure.met) for figure in figures_of(ROWS)}
    assert values["modules tried"] == (4, False)
    assert values["accepted as they are, of 60"] == (30, False)
    assert values["ends in a traceback"] == (0, True)
    assert values["does not end"] == (1, False)
    assert values["longest prepared"] == (12.0, False)
    assert values["ist within 1.02 of local SGD's held-out loss after as many passes, of 1"] == (0, None)
    assert values["ist within 1.02 of local SGD's held-out loss after as long, of 1"] == (1, None)


def test_ist_is_trained_once_more_for_as_long_as_local_sgd_takes() -> None:
    assert [longer_rounds(row) for row in ROWS] == [round(ROUNDS * 9.0 / 2.5), None, None, None, None]


def test_the_table_has_a_row_a_module() -> None:
    rows = table_of(ROWS)["rows"]
    assert rows[0] == ["One", "a", "1,000", "ist", "50%", "2.0 s", "0.4", "0.5", "0.6", "0.505"]
    assert rows[2][3] == "refused"
    assert rows[3][3] == "hangs"
    assert rows[4][3] == "left out"


def test_parts_of_generated_data_are_the_same_every_time_and_do_not_overlap() -> None:
    first, again, held_out = (
        Generated(words(8), 16).open(),
        Generated(words(8), 16).open(),
        Generated(words(8), 4, 16).open(),
    )
    assert isinstance(first, ArraySource)
    assert isinstance(again, ArraySource)
    assert isinstance(held_out, ArraySource)
    assert (first.x == again.x).all()
    whole = Generated(words(8), 20).open()
    assert isinstance(whole, ArraySource)
    assert np.array_equal(whole.x[16:].shape, held_out.x.shape)
    assert (whole.y[16:] == held_out.y).all()


needs_packages = pytest.mark.skipif(not MODULES.installed(), reason="the modules' packages are not installed")


@needs_packages
def test_a_module_is_tried_in_a_process_of_its_own() -> None:
    case = next(case for case in CASES if case.package == "torch-geometric")
    result = tried(case, "accept")
    assert result["accepted"], result
    assert result["finite"]


@needs_packages
def test_a_result_is_gone_on_from(tmp_path) -> None:
    known = [{"package": case.package, "name": case.name, "accept": {"hangs": True}} for case in CASES]
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"rows": known}))
    result = main(["--resume", str(before), "--json", str(tmp_path / "after.json")])
    assert json.loads((tmp_path / "after.json").read_text())["rows"] == known == result["rows"]
