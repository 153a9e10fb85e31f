"""Test that indexes retrieve rows with large products, the same for a seed, within their predicted memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from idletrain.errors import JobError
from idletrain.nn.ist.randomness import generator
from idletrain.nn.wide import index_kernels
from idletrain.nn.wide import mips_index as tables_module
from idletrain.nn.wide.mips_index import FLAT, HashTables, InvertedFile, MipsIndex

MAKERS = {
    "simhash": lambda: HashTables("simhash", 6, 20, 32),
    "dwta": lambda: HashTables("dwta", 2, 20, 32),
    "inverted-file": lambda: InvertedFile(16, 2),
}


@pytest.fixture(params=MAKERS)
def tables(request: pytest.FixtureRequest) -> MipsIndex:
    return MAKERS[request.param]()


def rows_and_queries() -> tuple[torch.Tensor, torch.Tensor]:
    """2,000 rows, and 64 queries near a row each."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 32, generator=generator)
    return rows, rows[:64] + 0.1 * torch.randn(64, 32, generator=generator)


def test_a_query_near_a_row_finds_it(tables: MipsIndex) -> None:
    rows, queries = rows_and_queries()
    tables.build(rows, 0)
    retrieved = [q in tables.retrieve(query[None], rows, 5) for q, query in enumerate(queries)]
    assert sum(retrieved) >= 60, "by chance, one in 400 would"


def test_of_its_best_rows_a_query_finds_more_than_by_chance(tables: MipsIndex) -> None:
    rows, queries = rows_and_queries()
    tables.build(rows, 0)
    best = (queries @ rows.T).topk(20).indices
    retrieved = [
        len(np.intersect1d(tables.retrieve(q[None], rows, 20), b.numpy())) for q, b in zip(queries, best, strict=True)
    ]
    assert np.mean(retrieved) > 20 * 5 * 20 / 2000, "five times what 20 random rows would hold"


def test_the_same_seed_gives_the_same_rows(tables: MipsIndex) -> None:
    rows, queries = rows_and_queries()
    retrieved = []
    for seed in (1, 1, 2):
        tables.build(rows, seed)
        retrieved.append(tables.retrieve(queries, rows, 3).tolist())
    assert retrieved[0] == retrieved[1] != retrieved[2]


def test_no_more_than_asked_for_and_within_bounds(tables: MipsIndex) -> None:
    rows, queries = rows_and_queries()
    tables.build(rows, 0)
    retrieved = tables.retrieve(queries, rows, 3)
    assert 0 < len(retrieved) <= 3 * 64
    assert 0 <= retrieved.min() <= retrieved.max() < 2000
    few = rows[:3]
    tables.build(few, 0)
    assert set(tables.retrieve(queries, few, 8).tolist()) <= {0, 1, 2}


def test_queries_of_nan_do_not_break_anything(tables: MipsIndex) -> None:
    rows, queries = rows_and_queries()
    tables.build(rows, 0)
    assert set(tables.retrieve(torch.full_like(queries, torch.nan), rows, 3).tolist()) <= set(range(2000))


def test_hash_tables_take_what_they_say() -> None:
    tables = HashTables("simhash", 6, 20, 32)
    rows, _ = rows_and_queries()
    tables.build(rows, 0)
    held = tables._ids.nbytes + tables._starts.nbytes + tables._counts.nbytes
    assert tables.nbytes(2000, 32) == held


def test_an_inverted_file_takes_what_it_says() -> None:
    tables = InvertedFile(16, 2)
    rows, _ = rows_and_queries()
    tables.build(rows, 0)
    centres = tables._centres_LH.nbytes + tables._heads_GH.nbytes
    held = tables._members.nbytes + tables._starts.nbytes + tables._first_lists.nbytes + centres
    sample = 16 * 8 * 32 * 4
    assert held + sample <= tables.nbytes(2000, 32) <= 2 * held + 4 * 2000 + sample


def test_tables_of_more_rows_than_their_buckets_hold_take_no_more_and_look_at_all_rows_in_time() -> None:
    rows, queries = rows_and_queries()
    tables, seen = HashTables("simhash", 3, 10, 8), set[int]()
    for seed in range(40):
        tables.build(rows, seed)
        assert tables._ids.nbytes == 4 * 10 * 8 * 8
        seen |= set(tables.retrieve(queries, rows, 50).tolist())
    assert len(seen) > 1500, "each build draws an order of its own"


def test_rows_after_those_that_fill_the_buckets_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "FILL_ROWS", 100)
    rows, _ = rows_and_queries()
    tables = HashTables("simhash", 3, 10, 8)
    signs, hashed = index_kernels.sign_codes, []
    monkeypatch.setattr(index_kernels, "sign_codes", lambda x, out: (hashed.append(x.shape[1]), signs(x, out)))
    tables.build(rows, 0)
    assert 100 <= sum(hashed) < 2000
    kept = tables._starts[:, -1]
    assert kept.sum() >= 0.99 * 10 * 8 * 8
    found = set(tables._ids[0, : kept[0]].tolist())
    tables.build(rows, 0)
    assert found == set(tables._ids[0, : kept[0]].tolist()), "a seed gives the same rows"


def test_more_lists_than_a_row_is_compared_with_are_found_by_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(1500, 16, generator=generator), dim=1)
    rows = centres.repeat_interleave(4, 0) + 0.05 * torch.randn(6000, 16, generator=generator)
    tables = InvertedFile(1500, 1)
    tables.build(rows, 0)
    assert FLAT < len(tables._centres_LH) <= 1500
    assert len(tables._heads_GH) > 30
    assert sorted(tables._members.tolist()) == list(range(6000))
    retrieved = tables.retrieve(rows, rows, 1)
    exact = (rows @ rows.T).argmax(1).numpy()
    assert (retrieved == exact).mean() > 0.7, "one list in 1,500 by chance"


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_a_list_however_rows_repeat(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "FLAT", 2)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 4, generator=generator)[torch.randint(9, (70,), generator=generator)]
    tables = InvertedFile(17, 3)
    tables.build(rows, seed)
    assert sorted(tables._members.tolist()) == list(range(70))
    assert len(tables._heads_GH) > 1
    assert len(tables._starts) - 2 == len(tables._centres_LH) <= 17
    retrieved = tables.retrieve(rows, rows, 1)
    assert len(retrieved) == 70


def test_a_group_without_a_row_in_the_sample_gets_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "FLAT", 2)
    monkeypatch.setattr(tables_module, "KMEANS_SAMPLE", 1)
    nearest, rows = tables_module._nearest, torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
    own = []

    def one_apart(x: torch.Tensor, centres: torch.Tensor, among: torch.Tensor | None = None) -> np.ndarray:
        """As found, but all rows are in the first group, except for one outside the sample in the last."""
        found = nearest(x, centres, among)
        if x is rows and among is None:
            found[:] = 0
            found[generator(0, "lists").permutation(70)[-1]] = len(centres) - 1
        elif among is not None:
            own.append(len(among))
        return found

    monkeypatch.setattr(tables_module, "_nearest", one_apart)
    tables = InvertedFile(17, 1)
    tables.build(rows, 0)
    assert own == [69, 1]
    assert len(tables._heads_GH) == 2, "groups without rows are dropped"
    assert sorted(tables._members.tolist()) == list(range(70))
    assert (np.diff(tables._starts)[:-1] > 0).all(), "lists without rows are dropped, too"


def test_lists_grow_with_the_rows_unless_told() -> None:
    rows, _ = rows_and_queries()
    tables = InvertedFile(None, 1)
    tables.build(rows, 0)
    assert len(tables._centres_LH) == 4 * 44, "44 is the root of 2,000"


def test_rows_that_are_all_alike_are_found() -> None:
    tables = InvertedFile(16, 2)
    rows = torch.zeros(300, 8)
    tables.build(rows, 0)
    assert len(tables.retrieve(torch.ones(2, 8), rows, 3)) == 6


@pytest.mark.parametrize(("probes", "keep"), [(1, 2), (3, 5), (16, 40)])
def test_an_inverted_file_finds_the_largest_products_within_the_lists_that_it_looks_through(
    probes: int, keep: int
) -> None:
    tables = InvertedFile(16, probes)
    rows, queries = rows_and_queries()
    tables.build(rows, 0)
    nearest = (queries @ tables._centres_LH.T).topk(probes).indices
    lists = np.split(tables._members, tables._starts[1:-1])
    retrieved = tables.retrieve(queries, rows, keep)
    assert len(retrieved) == len(queries) * keep
    for query, probed, mine in zip(queries, nearest, retrieved.reshape(-1, keep), strict=True):
        within = np.concatenate([lists[one] for one in probed])
        best = within[np.argsort(-(rows[within] @ query).numpy())[:keep]]
        assert mine.tolist() == best.tolist()


def test_an_inverted_file_looks_through_bfloat16() -> None:
    rows, queries = rows_and_queries()
    tables = InvertedFile(16, 2)
    tables.build(rows.bfloat16(), 0)
    retrieved = tables.retrieve(queries, rows.bfloat16(), 1)
    assert (retrieved == np.arange(64)).mean() > 0.9


def test_more_bits_than_buckets_can_have_are_refused() -> None:
    with pytest.raises(JobError, match=r"sampler.k: 7 codes make bucket numbers of 21 bits; use 20 bits at most"):
        HashTables("dwta", 7, 1, 1)


def test_no_lists_or_more_than_can_be_numbered_are_refused() -> None:
    for lists, probes in ((0, 1), (65_536, 1), (8, 0)):
        with pytest.raises(JobError, match=f"lists {lists} should be 1 to 65535, and probes {probes} at least 1"):
            InvertedFile(lists, probes)


def test_a_bucket_gives_no_more_than_its_size() -> None:
    rows = torch.ones(500, 8)  # all in one bucket of every table
    tables = HashTables("simhash", 4, 3, 10)
    tables.build(rows, 0)
    retrieved = tables.retrieve(rows[:1], rows, 500)
    assert 10 <= len(retrieved) <= 30
