"""The user's own code is told from a package's, and a change of it is noticed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import idletrain
from idletrain.fit_result import FitResult
from idletrain.nn.data.known import digits
from idletrain.own_code import changed_imports, changes, own_code

SOURCE = """
import torch
from torch import nn

def loss(outputs, labels):
    return {scale} * nn.functional.cross_entropy(outputs, labels)

class Scaled(nn.Module):
    def forward(self, x):
        return {scale} * x

class Loss:
    def __call__(self, outputs, labels):
        return loss(outputs, labels)
"""


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The module of a user's file, before and after a change."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the workers
    for scale in (1, 2):
        (tmp_path / f"scaled_by_{scale}.py").write_text(SOURCE.format(scale=scale))
    return importlib.import_module("scaled_by_1"), importlib.import_module("scaled_by_2")


def net(own: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), own.Scaled(), nn.Linear(32, 10))


def test_only_the_user_s_own_code_counts(both: tuple[Any, Any]) -> None:
    one, two = both
    of_one = own_code(net(one), (one.loss, None))
    assert set(of_one) == {"Scaled", "loss"}
    assert own_code(net(one), (one.Loss(), nn.functional.cross_entropy, nn.CrossEntropyLoss())).keys() == {
        "Scaled",
        "Loss",
    }
    assert own_code(nn.Linear(2, 2), (one.Loss().__call__,)).keys() == {"Loss.__call__"}
    assert own_code(nn.Linear(2, 2), ()) == {}
    assert changes(of_one, own_code(net(two), (two.loss, None))) == ["Scaled", "loss"]
    assert changes(of_one, own_code(net(one), (two.loss, None))) == ["loss"]
    assert changes(of_one, {**of_one, "more": "0"}) == ["more"]
    assert not changes(of_one, dict(of_one))


def test_what_has_no_source_is_left_out() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Hidden(nn.Module): pass", space)  # as in a console
    assert own_code(space["Hidden"](), (len,)) == {}


def test_a_run_that_goes_on_with_other_code_says_so(
    both: tuple[Any, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (one, two), (train, _) = both, digits()

    def fit(own: Any, rounds: int, *, resume: bool) -> FitResult:
        return idletrain.fit(
            net(own), train, loss=own.loss, method="ist", subnets=2, local_steps=2, rounds=rounds, workers=1, name="r",
            run_dir=tmp_path / "runs", resume=resume,
        )  # fmt: skip

    assert not fit(one, 1, resume=False).summary["warnings"]
    assert not fit(one, 2, resume=True).summary["warnings"]
    capfd.readouterr()
    (warning,) = fit(two, 3, resume=True).summary["warnings"]
    assert warning == "the code of Scaled, loss has changed since the run began; further rounds train what is new"
    assert warning in capfd.readouterr().out
    (tmp_path / "runs" / "r" / "events.jsonl").unlink()
    assert fit(two, 4, resume=True).rounds == 4


def test_of_a_run_that_is_read_only_imported_code_has_changed(both: tuple[Any, Any]) -> None:
    one, two = both
    before = own_code(net(one), (one.loss, one.Loss()))
    assert not changed_imports(before, net(one), (one.loss, one.Loss().__call__, None))
    assert changed_imports(before, net(two), (two.loss, two.Loss())) == ["Scaled", "loss"]
    assert not changed_imports({}, net(two), (two.loss,))
    module, loss = net(two), two.loss
    del two.Scaled, two.loss  # as of code that was pickled whole
    assert not changed_imports(before, module, (loss,))
