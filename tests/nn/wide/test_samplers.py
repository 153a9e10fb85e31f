"""Test draws: their labels, the probabilities, and that the corrected sum estimates the full one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from idletrain.errors import JobError
from idletrain.nn.wide.samplers import (
    SAMPLERS,
    ActiveSet,
    All,
    LogUniform,
    Mixture,
    Retrieved,
    Uniform,
    retrieves,
    sampler_of,
)

C, H = 200, 8
ROWS = torch.randn(C, H, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.randn(4, H, generator=torch.Generator().manual_seed(1))
SMALL: dict[str, dict[str, Any]] = {
    "uniform": {"negatives": 40},
    "log-uniform": {"negatives": 40},
    "simhash": {"k": 4, "tables": 4, "negatives": 20},
    "dwta": {"k": 2, "tables": 4, "negatives": 20},
    "inverted-file": {"lists": 8, "negatives": 20},
}


def estimates(draw: ActiveSet, exponentials_C: np.ndarray) -> float:
    """The sum of all exponentials as a sampled softmax sees it."""
    certain = np.unique(draw.certain)
    drawn = np.setdiff1d(draw.drawn, certain)
    return exponentials_C[certain].sum() + (exponentials_C[drawn] / draw.probability(drawn)).sum()


@pytest.mark.parametrize("name", SMALL)
def test_the_corrected_sum_is_unbiased(name: str) -> None:
    torch.manual_seed(0)
    sampler = sampler_of({"name": name, **SMALL[name]})
    sampler.build(ROWS, np.arange(C)[::-1].copy(), 0)
    exponentials = np.exp(np.random.default_rng(0).normal(size=C))
    seen = [estimates(sampler.draw(HIDDEN, ROWS), exponentials) for _ in range(2000)]
    error = np.std(seen) / len(seen) ** 0.5
    assert np.mean(seen) == pytest.approx(exponentials.sum(), abs=4 * error)
    assert error < 0.01 * exponentials.sum()


def test_log_uniform_draws_frequent_labels_more_often() -> None:
    torch.manual_seed(0)
    sampler = LogUniform(50)
    order = np.random.default_rng(0).permutation(C)
    sampler.build(ROWS, order, 0)
    counts = sum(np.bincount(sampler.draw(HIDDEN, ROWS).drawn, minlength=C) for _ in range(400))
    expected = 400 * 50 * np.log1p(1 / (np.arange(C) + 1)) / np.log(C + 1)
    assert counts[order][:5] == pytest.approx(expected[:5], rel=0.1)
    assert counts[order][100:].sum() == pytest.approx(expected[100:].sum(), rel=0.1)


def test_as_many_draws_as_labels_are_all_labels() -> None:
    assert Uniform(C).draw(HIDDEN, ROWS).everything
    assert All().draw(HIDDEN, ROWS).everything
    assert not Uniform(C - 1).draw(HIDDEN, ROWS).everything
    assert Mixture([Uniform(3), All()]).draw(HIDDEN, ROWS).everything


def test_a_mixture_misses_only_what_all_its_parts_miss() -> None:
    parts = [Uniform(20), LogUniform(10)]
    mixture = Mixture(parts)
    mixture.build(ROWS, None, 0)
    ids = np.arange(C)
    alone = [part.draw(HIDDEN, ROWS).probability(ids) for part in parts]
    together = mixture.draw(HIDDEN, ROWS)
    assert together.probability(ids) == pytest.approx(1 - (1 - alone[0]) * (1 - alone[1]))
    assert len(together.drawn) == 30


class Empty:
    """Tables that find nothing."""

    def nbytes(self, *_: int) -> int:
        return 0

    def build(self, *_: object) -> None:
        pass

    def retrieve(self, *_: object) -> np.ndarray:
        return np.empty(0, np.int64)


def test_where_nothing_is_retrieved_uniform_labels_stand_in() -> None:
    rows = torch.randn(1000, H)
    draw = Retrieved(Empty()).draw(HIDDEN, rows)
    assert draw.fell_back
    assert len(draw.drawn) == 256
    assert draw.probability(np.arange(3)) == pytest.approx(1 - (1 - 1 / 1000) ** 256)
    assert Mixture([Retrieved(Empty()), Uniform(3)]).draw(HIDDEN, rows).fell_back


def test_tables_are_not_built_over_rows_that_are_not_finite() -> None:
    rows = ROWS.clone()
    rows[7, 2] = torch.nan
    rows[9, 0] = torch.inf
    with pytest.raises(ValueError, match="2 of 200 output rows hold NaN or infinity; lower the learning rate"):
        sampler_of("simhash").build(rows, None, 0)


def test_a_job_s_words_make_samplers() -> None:
    assert {name: retrieves(sampler_of(name)) for name in SAMPLERS} == {
        "all": False,
        "uniform": False,
        "log-uniform": False,
        "simhash": True,
        "dwta": True,
        "inverted-file": True,
    }
    both = sampler_of(
        {"name": "mixture", "of": [{"name": "uniform", "negatives": 5}, {"name": "simhash", "negatives": 0}]}
    )
    assert isinstance(both, Mixture)
    assert both.nbytes(1000, H) == sampler_of({"name": "simhash", "negatives": 0}).nbytes(1000, H) > 0


@pytest.mark.parametrize(
    ("sampler", "fault"),
    [
        ("unifrom", r"sampler: 'unifrom' should be one of all, uniform, .*mixture or, as a word alone, auto"),
        ({"negatives": 3}, r"sampler: None should be one of"),
        ({"name": "auto"}, r"sampler: 'auto' should be one of .*or, as a word alone, auto"),
        ({"name": "mixture", "of": ["uniform", "auto"]}, r"sampler: a mixture should be"),
        ({"name": "uniform", "positives": 3}, r"sampler: uniform does not take \{'positives': 3\}"),
        ({"name": "simhash", "lists": 3}, r"sampler: simhash does not take \{'lists': 3\} \(unknown: lists\)"),
        ({"name": "uniform", "negatives": "many"}, r"negatives: 'many' should be whole numbers"),
        ({"name": "uniform", "negatives": -1}, r"negatives: -1 should be whole numbers"),
    ],
)
def test_other_words_are_refused(sampler: Any, fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        sampler_of(sampler)


# --- words of a job --------------------------------------------------------------------------------------------------


def test_a_mixture_of_samplers_that_retrieve_builds_their_tables() -> None:
    """Such a sampler is a mixture itself, with uniform labels beside."""
    mixed = sampler_of({"name": "mixture", "of": [{"name": "simhash", "k": 3, "tables": 4}, "log-uniform"]})
    assert retrieves(mixed)
    rows = torch.randn(200, 8)
    mixed.build(rows, np.arange(200), 0)
    draw = mixed.draw(torch.randn(5, 8), rows)
    assert len(draw.certain)
    assert len(draw.drawn)


@pytest.mark.parametrize(
    "sampler",
    [
        {"name": "mixture"},
        {"name": "mixture", "of": []},
        {"name": "mixture", "of": ["uniform"], "negatives": 3},
        {"name": "inverted-file", "keep": 0},
        {"name": "simhash", "tables": 0},
        {"name": "dwta", "bucket": 0},
    ],
    ids=str,
)
def test_words_that_would_fail_in_a_worker_are_refused(sampler: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"sampler: "):
        sampler_of(sampler)
