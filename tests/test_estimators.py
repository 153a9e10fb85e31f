"""The estimators pass scikit-learn's own checks, learn, and train the same network on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from idletrain import IdletrainClassifier, IdletrainRegressor
from idletrain.errors import JobError

SMALL = {"hidden": (32,), "epochs": 20}


@parametrize_with_checks([IdletrainClassifier(**SMALL), IdletrainRegressor(**SMALL)])  # type: ignore[untyped-decorator]
@pytest.mark.filterwarnings("default")  # what scikit-learn's checks try out on purpose
def test_scikit_learn_s_own_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


def test_digits_in_a_pipeline_and_a_search() -> None:
    x, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), IdletrainClassifier(epochs=6, random_state=0))
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.9
    search = GridSearchCV(IdletrainClassifier(epochs=2, random_state=0), {"method": ["ist", "local-sgd"]}, cv=2)
    assert set(search.fit(x[:400], y[:400]).cv_results_["param_method"]) == {"ist", "local-sgd"}


def test_a_regression_of_several_targets_at_any_scale() -> None:
    x, y = load_diabetes(return_X_y=True)
    both = np.stack([y, -1e6 * x[:, 2]], axis=1)
    model = IdletrainRegressor(epochs=60, random_state=0).fit(x[:350], both[:350])
    assert model.predict(x[350:]).shape == (92, 2)
    assert model.score(x[350:], both[350:]) > 0.5


def test_classes_of_any_kind_come_back_with_probabilities() -> None:
    x, y = load_digits(return_X_y=True)
    names = np.array(["even", "odd"])[y % 2]
    model = IdletrainClassifier(epochs=5, random_state=0).fit(x[:1000], names[:1000])
    assert list(model.classes_) == ["even", "odd"]
    probabilities = model.predict_proba(x[1000:])
    assert probabilities.sum(axis=1) == pytest.approx(1)
    assert (model.predict(x[1000:]) == model.classes_[probabilities.argmax(axis=1)]).all()
    assert model.score(x[1000:], names[1000:]) > 0.85


def logistic(features: int, outputs: int) -> nn.Module:
    return nn.Linear(features, outputs)


def test_a_module_or_what_builds_one_is_trained_and_left_as_it_is() -> None:
    x, y = load_digits(return_X_y=True)
    own = nn.Sequential(nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10))
    before = {name: value.clone() for name, value in own.state_dict().items()}
    state = torch.random.get_rng_state()
    settings = {"method": "local-sgd", "epochs": 4, "random_state": 0}
    for module in (own, logistic):
        assert IdletrainClassifier(module, **settings).fit(x, y).score(x, y) > 0.8
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in before.items())
    assert torch.equal(torch.random.get_rng_state(), state)


class Several(nn.Module):
    """Returns its logits with more."""

    def __init__(self, outputs: int, form: type) -> None:
        super().__init__()
        self.last, self.form = nn.Linear(64, outputs), form

    def forward(self, x: Any) -> Any:
        logits = self.last(x)
        return {"x": x, "logits": logits} if self.form is dict else (logits, x)


@pytest.mark.parametrize("form", [dict, tuple])
def test_a_module_that_returns_more_than_its_logits_predicts(form: type) -> None:
    x, y = load_digits(return_X_y=True)
    settings = {"method": "local-sgd", "epochs": 4, "random_state": 0}
    assert IdletrainClassifier(Several(10, form), **settings).fit(x / 16, y).score(x / 16, y) > 0.8
    assert IdletrainRegressor(Several(1, form), **settings).fit(x / 16, y).predict(x / 16).shape == y.shape


@pytest.mark.parametrize("outputs", [10, 2])
def test_a_module_with_another_number_of_outputs_than_classes_is_refused(outputs: int) -> None:
    x, y = load_digits(n_class=3, return_X_y=True)
    fault = rf"module: its outputs are \[2, {outputs}\] for 2 samples of 3 classes; they should be \[2, 3\]: give it an"
    with pytest.raises(JobError, match=fault):
        IdletrainClassifier(nn.Linear(64, outputs)).fit(x, y)


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, float64_by_default])
def test_the_caller_s_modes_of_torch_change_nothing(mode: Any) -> None:
    x, y = load_digits(return_X_y=True)
    expected = IdletrainClassifier(epochs=1, random_state=0).fit(x, y).predict_proba(x)
    with mode():
        assert (IdletrainClassifier(epochs=1, random_state=0).fit(x, y).predict_proba(x) == expected).all()


def test_settings_that_do_not_fit_are_one_sentence() -> None:
    x, y = load_digits(return_X_y=True)
    with pytest.raises(JobError, match=r"training.method: 'sgd' should be 'ist' or 'local-sgd'"):
        IdletrainClassifier(method="sgd").fit(x, y)
    with pytest.raises(ValueError, match="n_samples=1: a network learns from two samples or more"):
        IdletrainRegressor().fit(x[:1], y[:1])


def test_workers_train_the_same_network(tmp_path: Path) -> None:
    x, y = load_digits(return_X_y=True)
    settings: dict[str, Any] = {
        "epochs": 1,
        "random_state": 3,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as on a machine of two cores: the number decides the bits
    try:
        here = IdletrainClassifier(**settings).fit(x, y)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    there = IdletrainClassifier(**settings, workers=2, fit_options={"run_dir": tmp_path, "name": "t"}).fit(x, y)
    assert (tmp_path / "t" / "wal").exists()
    for name, value in here.module_.state_dict().items():
        assert torch.equal(value, there.module_.state_dict()[name]), name
