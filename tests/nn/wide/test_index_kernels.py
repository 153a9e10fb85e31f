"""The compiled loops of indexes, against torch and plain Python."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from idletrain.nn.wide import index_kernels

RANDOM = np.random.default_rng(0)


def test_numbers_of_buckets_are_the_signs_of_products() -> None:
    products = RANDOM.normal(size=(5, 6)).astype(np.float32)
    products[2] = np.nan
    numbers = np.full((2, 9), 99, np.uint16)
    index_kernels.sign_codes(np.ascontiguousarray(products.T), numbers[:, 2:7])  # a block of more
    bits = (products > 0).reshape(5, 2, 3)
    assert np.array_equal(numbers[:, 2:7].T, (bits * [1, 2, 4]).sum(2))
    assert (numbers[:, [0, 1, 7, 8]] == 99).all()


def test_numbers_of_buckets_are_which_coordinates_are_largest() -> None:
    x = RANDOM.normal(size=(5, 30)).astype(np.float32)
    compared = np.stack([RANDOM.permutation(30)[:8] for _ in range(6)])
    numbers = np.empty((3, 5), np.uint32)
    index_kernels.winner_codes(x, compared, numbers)
    winners = x[:, compared].argmax(2).reshape(5, 3, 2)
    assert np.array_equal(numbers.T, winners[:, :, 0] * 8 + winners[:, :, 1])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 90])
def test_the_largest_in_a_column_is_the_first_of_equal_ones(rows: int) -> None:
    scores, found = RANDOM.integers(0, 9, (rows, 50)).astype(np.float32), np.full(50, -1, np.int32)
    index_kernels.largest_in_columns(scores, found)
    assert np.array_equal(found, scores.argmax(0))


@pytest.mark.parametrize("number", [np.uint16, np.uint32])
def test_buckets_are_filled_with_the_first_rows_in_order(number: type) -> None:
    codes, order, bucket = RANDOM.integers(0, 8, 60).astype(number), RANDOM.permutation(60).astype(np.int32), 7
    codes[codes == 5] = 4  # an empty bucket
    starts, ids = np.zeros(9, np.int32), np.full(60, -1, np.int32)
    added = [index_kernels.count_in_buckets(part, bucket, starts) for part in (codes[:25], codes[25:])]
    expected = [
        [row for row, own in zip(order.tolist(), codes, strict=True) if own == code][:bucket] for code in range(8)
    ]
    assert np.cumsum(added).tolist() == [
        sum(min(bucket, count) for count in np.bincount(codes[:counted]).tolist()) for counted in (25, 60)
    ]
    index_kernels.fill_buckets(codes, order, starts, ids)
    assert [ids[start:end].tolist() for start, end in itertools.pairwise(starts)] == expected
    assert (ids[starts[-1] :] == -1).all()


@pytest.mark.parametrize("counted", [40, 4000])  # far more rows than are found are set to zero one by one
@pytest.mark.parametrize("keep", [1, 2, 5, 50])
def test_most_hits_keeps_those_in_most_buckets(keep: int, counted: int) -> None:
    tables, rows, buckets, bucket = 6, 40, 8, 5
    starts, ids = np.zeros((tables, buckets + 1), np.int32), np.empty((tables, rows), np.int32)
    for table in range(tables):
        codes, order = RANDOM.integers(0, buckets, rows), RANDOM.permutation(rows).astype(np.int32)
        index_kernels.count_in_buckets(codes, bucket, starts[table])
        index_kernels.fill_buckets(codes, order, starts[table], ids[table])
    query_buckets = RANDOM.integers(0, buckets, (7, tables))
    out, counts = np.empty(7 * keep, np.int64), np.zeros(counted, np.uint8)
    written = index_kernels.most_hits(query_buckets.T.astype(np.uint16), starts, ids, bucket, keep, counts, out)
    assert not counts.any()
    kept_ids = iter(out[:written].tolist())
    for query in query_buckets:
        hits = Counter(int(row) for t in range(tables) for row in ids[t, starts[t, query[t]] : starts[t, query[t] + 1]])
        mine = [next(kept_ids) for _ in range(min(keep, len(hits)))]
        assert len(set(mine)) == len(mine)
        best = sorted(hits.values(), reverse=True)[: len(mine)]
        assert sorted((hits[row] for row in mine), reverse=True) == best
    assert next(kept_ids, None) is None


@pytest.mark.parametrize("keep", [1, 3, 30])
def test_the_best_in_lists_are_those_with_the_largest_products(keep: int) -> None:
    query, rows = (RANDOM.normal(size=size).astype(np.float32) for size in ((7, 10), (40, 10)))
    members, starts = RANDOM.permutation(40).astype(np.int32), np.array([0, 12, 12, 27, 40], np.int32)
    lists = np.stack([RANDOM.permutation(4)[:2] for _ in query])
    best, scores = np.full((7, keep), -1), np.empty((7, keep), np.float32)
    index_kernels.best_in_lists(query, rows, lists, starts, members, best, scores)
    for b, query_buckets in enumerate(lists):
        places = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in query_buckets])
        expected = places[np.argsort(-(rows[members[places]] @ query[b]))][:keep].tolist()
        assert best[b].tolist() == expected + [-1] * (keep - len(expected))
