"""What a person is told of data before a run starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from idletrain.nn.data.given import as_samples
from idletrain.nn.data_notes import LOOKED_AT, data_notes
from idletrain.nn.program import cross_entropy, mse

X = np.zeros((100, 3), np.float32)


@pytest.mark.parametrize(
    ("mean", "spread", "told"),
    [(0.0, 1.0, False), (5.0, 3.0, False), (1000.0, 300.0, True), (0.0, 1e-3, True), (0.0, 500.0, True)],
)
def test_targets_far_from_unit_scale_are_told(mean: float, spread: float, told: bool) -> None:
    y = (mean + spread * np.random.default_rng(0).normal(size=(100, 1))).astype(np.float32)
    seen = y[:LOOKED_AT]
    for loss in (mse, nn.functional.mse_loss):
        notes = data_notes(as_samples((X, y)), loss, 10)
        assert len(notes) == told
        if told:
            assert f"a mean of {seen.mean():.3g} and a standard deviation of {seen.std(ddof=1):.3g}" in notes[0]


def test_classes_and_few_targets_have_no_scale() -> None:
    assert data_notes(as_samples((X, np.full(100, 90))), cross_entropy, 10) == []
    few = as_samples((X[:9], np.full((9, 1), 900, np.float32)))
    assert data_notes(few, mse, 9) == []


def test_a_batch_larger_than_the_data_is_told() -> None:
    (note,) = data_notes(as_samples((X, torch.zeros(100, dtype=torch.int64))), cross_entropy, 128)
    assert note.startswith("training.batch_size: 128 is more than the 100 samples")
