"""Passes over the data as rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idletrain.run import RunOptions, compose
from tests.test_run import job


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({"local_steps": 2, "batch_size": 8}, 120),  # 1,437 digits in 2 x 2 x 8: fewer than 50 passes
        ({"local_steps": 10, "batch_size": 64}, 57),
        ({"local_steps": 50, "batch_size": 128}, 10),
        ({"local_steps": 50, "batch_size": 128, "rounds": 30}, 30),
        ({"local_steps": 50, "batch_size": 128, "phases": [{"rounds": 20}, {"rounds": 5}]}, 25),
    ],
)
def test_without_rounds_the_data_are_passed_at_most_fifty_times_in_ten_rounds_or_more(
    tmp_path: Path, settings: dict[str, Any], rounds: int
) -> None:
    model = {"factory": "tests.test_run:one_layer"}
    training = {"method": "ist", "subnets": 2, **settings}
    composition = compose(job(tmp_path, model=model, training=training), RunOptions())
    assert composition.job.training.rounds == composition.prepared.program.training.rounds == rounds


@pytest.mark.parametrize(("epochs", "notes"), [(1, 1), (9, 0)])
def test_rounds_that_are_far_more_than_the_epochs_are_told(tmp_path: Path, epochs: float, notes: int) -> None:
    training = {"method": "ist", "subnets": 2, "local_steps": 50, "batch_size": 64, "epochs": epochs}
    composition = compose(job(tmp_path, model={"factory": "tests.test_run:one_layer"}, training=training), RunOptions())
    told = [
        note for note in composition.prepared.notes if note.startswith("training.epochs: whole rounds make 4.45 of 1")
    ]
    assert len(told) == notes


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
