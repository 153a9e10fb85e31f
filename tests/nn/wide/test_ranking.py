"""Test the metrics against cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from idletrain.nn.data.csr import Csr
from idletrain.nn.wide.ranking import hits, ndcg, precision, propensities, propensity_precision

#            row 0: labels 1, 4     row 1: label 0     row 2: none     row 3: labels 0, 2, 3
TRUTH = Csr(np.array([0, 2, 3, 3, 6]), np.array([1, 4, 0, 0, 2, 3], np.int32))
TOP = np.array(
    [
        [4, 0, 1],  # right, wrong, right
        [2, 0, 3],  # wrong, right, wrong
        [0, 1, -1],  # nothing is right
        [3, 2, 0],  # all right
    ]
)


def test_hits() -> None:
    assert hits(TOP, TRUTH).astype(int).tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]


def test_a_row_s_labels_do_not_count_for_its_neighbour() -> None:
    truth = Csr(np.array([0, 1, 2]), np.array([4, 0], np.int32))
    assert not hits(np.array([[5], [4]]), truth).any()
    assert not hits(np.array([[-1], [-1]]), truth).any()
    assert not hits(TOP, Csr(np.zeros(5, np.int64), np.empty(0, np.int32))).any()


def test_precision() -> None:
    assert precision(TOP, TRUTH) == pytest.approx([2 / 4, (1 + 1 + 0 + 2) / 8, (2 + 1 + 0 + 3) / 12])


def test_ndcg() -> None:
    second, third = 1 / math.log2(3), 1 / math.log2(4)
    rows = [
        (1 + third) / (1 + second),  # two labels: the best is to name them first and second
        second / 1,
        0,
        1,
    ]
    assert ndcg(TOP, TRUTH)[2] == pytest.approx(sum(rows) / 4)
    assert ndcg(TOP, TRUTH)[0] == pytest.approx(2 / 4)


def test_propensity_precision() -> None:
    propensity = np.array([0.5, 0.1, 0.25, 1.0, 0.2])  # weights 2, 10, 4, 1, 5
    ours = [5 + 1, 5 + 2 + 1 + 4, 5 + 10 + 2 + 1 + 4 + 2]
    best = [10 + 2 + 4, (10 + 5) + 2 + (4 + 2), (10 + 5) + 2 + (4 + 2 + 1)]
    assert propensity_precision(TOP, TRUTH, propensity) == pytest.approx(
        [a / b for a, b in zip(ours, best, strict=True)]
    )


def test_propensities_follow_jain_et_al() -> None:
    """Section 4.1 with A = 0.55 and B = 1.5 for 1,000 rows, one label seen 3 times, one never."""
    c = (math.log(1000) - 1) * 2.5**0.55
    expected = [1 / (1 + c * math.exp(-0.55 * math.log(n + 1.5))) for n in (3, 0)]
    assert propensities(np.array([3, 0]), 1000) == pytest.approx(expected)
    assert expected[1] < expected[0] < 1
