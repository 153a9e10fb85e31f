"""What tests of several parts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from idletrain.job import TrainingSettings
from idletrain.nn import data, models
from idletrain.nn.data import MapStyle, as_samples
from idletrain.nn.prepare import Prepared, named_loss, prepare


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of the test's own: the user's is left alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(data, "CACHE", folder)
    return folder


class Given:
    """Samples at hand, as a source."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def open(self) -> Any:
        return as_samples((self.x, self.y))


def flowers(samples: int, features: int, classes: int) -> Given:
    """Random inputs and labels that depend on them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, features)).astype(np.float32)
    return Given(x, (x[:, :classes].argmax(1)).astype(np.int64))


@pytest.fixture
def small_program() -> Callable[..., Prepared]:
    """A small MLP prepared for training; keyword arguments are training settings."""

    def make(
        widths: Sequence[int] = (6, 8, 8, 3),
        norm: str | None = None,
        source: MapStyle | Given | None = None,
        **asked: Any,
    ) -> Prepared:
        settings = {"subnets": 2, "local_steps": 3, "rounds": 2, "batch_size": 4, "optimizer": {"lr": 0.1}} | asked
        training = TrainingSettings.model_validate(settings)
        source = source or flowers(32, widths[0], widths[-1])
        return prepare(models.mlp(widths, norm), source, None, named_loss(training.loss), training)

    return make
