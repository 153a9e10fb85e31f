"""The compiled loops, against torch and plain Python."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from idletrain.nn.optim import kernels

RANDOM = np.random.default_rng(0)


def test_a_bag_s_gradient_is_torch_s() -> None:
    weight = torch.randn(20, 6, requires_grad=True)
    offsets, indices = np.array([0, 3, 3, 8]), np.array([1, 5, 7, 0, 1, 5, 5, 19])
    values = RANDOM.normal(size=8).astype(np.float32)
    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(indices),
        weight,
        torch.from_numpy(offsets[:-1]),
        mode="sum",
        per_sample_weights=torch.from_numpy(values),
    )
    grad = torch.randn(3, 6)
    expected.backward(grad)
    unique, places = np.unique(indices, return_inverse=True)
    rows = np.zeros((len(unique), 6), np.float32)
    kernels.bag_backward(offsets, places, values, grad.numpy(), rows)
    assert weight.grad is not None
    torch.testing.assert_close(torch.from_numpy(rows), weight.grad[torch.from_numpy(unique)])


def test_distinct_numbers_come_in_the_order_of_their_first_appearance() -> None:
    find = kernels.Distinct(100)
    for _ in range(2):  # what one call leaves does not disturb the next
        ids = RANDOM.integers(0, 100, 60)
        unique, places = find(ids)
        assert unique.tolist() == list(dict.fromkeys(ids.tolist()))
        assert np.array_equal(unique[places], ids)
    assert len(find(np.empty(0, np.int64))[0]) == 0


@pytest.mark.parametrize("odd", [-1, 100])
def test_numbers_beyond_are_refused(odd: int) -> None:
    with pytest.raises(ValueError, match="are not all within 0 to 99"):
        kernels.Distinct(100)(np.array([5, odd]))


def test_rows_move_each_at_its_own_rate_and_others_stay() -> None:
    weight, sums = torch.randn(20, 6), torch.rand(20)
    index, grad = torch.tensor([7, 0, 19]), torch.randn(3, 6)
    summed = sums.index_add(0, index, grad.square().mean(1))
    rates = 0.1 / ((summed[index] + 0.01).sqrt() + 0.001)
    expected = weight.index_add(0, index, -rates[:, None] * grad)
    kernels.adagrad_rows(*(t.numpy() for t in (weight, sums, index, grad)), 0.1, 0.01, 0.001)
    torch.testing.assert_close((weight, sums), (expected, summed))


def test_numbers_of_buckets_are_the_signs_of_products() -> None:
    products = RANDOM.normal(size=(5, 6)).astype(np.float32)
    products[2] = np.nan
    numbers = np.full((2, 9), 99, np.uint16)
    kernels.sign_codes(np.ascontiguousarray(products.T), numbers[:, 2:7])  # a block of more
    bits = (products > 0).reshape(5, 2, 3)
    assert np.array_equal(numbers[:, 2:7].T, (bits * [1, 2, 4]).sum(2))
    assert (numbers[:, [0, 1, 7, 8]] == 99).all()


def test_numbers_of_buckets_are_which_coordinates_are_largest() -> None:
    x = RANDOM.normal(size=(5, 30)).astype(np.float32)
    compared = np.stack([RANDOM.permutation(30)[:8] for _ in range(6)])
    numbers = np.empty((3, 5), np.uint32)
    kernels.winner_codes(x, compared, numbers)
    winners = x[:, compared].argmax(2).reshape(5, 3, 2)
    assert np.array_equal(numbers.T, winners[:, :, 0] * 8 + winners[:, :, 1])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 90])
def test_the_largest_in_a_column_is_the_first_of_equal_ones(rows: int) -> None:
    scores, found = RANDOM.integers(0, 9, (rows, 50)).astype(np.float32), np.full(50, -1, np.int32)
    kernels.largest_in_columns(scores, found)
    assert np.array_equal(found, scores.argmax(0))


@pytest.mark.parametrize("number", [np.uint16, np.uint32])
def test_buckets_are_filled_with_the_first_rows_in_order(number: type) -> None:
    codes, order, bucket = RANDOM.integers(0, 8, 60).astype(number), RANDOM.permutation(60).astype(np.int32), 7
    codes[codes == 5] = 4  # an empty bucket
    starts, ids = np.zeros(9, np.int32), np.full(60, -1, np.int32)
    added = [kernels.count_in_buckets(part, bucket, starts) for part in (codes[:25], codes[25:])]
    expected = [
        [row for row, own in zip(order.tolist(), codes, strict=True) if own == code][:bucket] for code in range(8)
    ]
    assert np.cumsum(added).tolist() == [
        sum(min(bucket, count) for count in np.bincount(codes[:counted]).tolist()) for counted in (25, 60)
    ]
    kernels.fill_buckets(codes, order, starts, ids)
    assert [ids[start:end].tolist() for start, end in itertools.pairwise(starts)] == expected
    assert (ids[starts[-1] :] == -1).all()


@pytest.mark.parametrize("counted", [40, 4000])  # far more rows than are found are set to zero one by one
@pytest.mark.parametrize("keep", [1, 2, 5, 50])
def test_most_hits_keeps_those_in_most_buckets(keep: int, counted: int) -> None:
    tables, rows, buckets, bucket = 6, 40, 8, 5
    starts, ids = np.zeros((tables, buckets + 1), np.int32), np.empty((tables, rows), np.int32)
    for table in range(tables):
        codes, order = RANDOM.integers(0, buckets, rows), RANDOM.permutation(rows).astype(np.int32)
        kernels.count_in_buckets(codes, bucket, starts[table])
        kernels.fill_buckets(codes, order, starts[table], ids[table])
    query_buckets = RANDOM.integers(0, buckets, (7, tables))
    out, counts = np.empty(7 * keep, np.int64), np.zeros(counted, np.uint8)
    written = kernels.most_hits(query_buckets.T.astype(np.uint16), starts, ids, bucket, keep, counts, out)
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
    kernels.best_in_lists(query, rows, lists, starts, members, best, scores)
    for b, query_buckets in enumerate(lists):
        places = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in query_buckets])
        expected = places[np.argsort(-(rows[members[places]] @ query[b]))][:keep].tolist()
        assert best[b].tolist() == expected + [-1] * (keep - len(expected))
