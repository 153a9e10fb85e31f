"""Passes over the data as rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idletrain.run import RunOptions, compose
from tests.test_run import job


@pytest.mark.parametrize(
    ("epochs", "settings", "rounds"),
    [
        (1, {}, 45),  # of 1,437 digits in 2 x 2 x 8
        (0.1, {}, 5),
        (1, {"subnets": 4}, 23),
        (1, {"batch_size": 1437, "local_steps": 1, "subnets": 1}, 1),
        (2.5, {"method": "local-sgd", "local_steps": 4}, 57),
    ],
)
def test_epochs_are_as_many_rounds_as_all_subnets_need_for_them(
    tmp_path: Path, epochs: float, settings: dict[str, Any], rounds: int
) -> None:
    model = {"factory": "tests.test_run:one_layer"}
    training = {"method": "ist", "subnets": 2, "local_steps": 2, "batch_size": 8, "epochs": epochs, **settings}
    composition = compose(job(tmp_path, model=model, training=training), RunOptions())
    assert composition.job.training.rounds == composition.prepared.program.training.rounds == rounds
