"""Retrieve the rows of a matrix with large inner products with a query, without scoring all of them.

Hash tables over SimHash (Charikar, STOC 2002) or DWTA codes (Chen & Shrivastava, UAI 2018), as SLIDE uses them
(arXiv 1903.03129, section 3), and an inverted file (k-means lists). Letters: R rows, H hidden, B queries, L tables,
K codes a table, S buckets.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn.ist.randomness import generator
from idletrain.nn.wide import index_kernels

BLOCK_BYTES = (
    1 << 18
)  # scratch memory of one block of rows while it is hashed or assigned to lists: fits a core's cache
LEAST_BLOCK = 256  # rows of a block, however many centres: a product of fewer is slower
FULL = 0.99  # share of the buckets' places after which no more rows are hashed: the last few take most of the time
FILL_ROWS = 1 << 15  # hashed between two looks at that share
CODES_BYTES = 1 << 24  # bucket numbers held in memory at a time
BIN = 8  # coordinates that one DWTA code compares, as in SLIDE's released configuration
MOST_LISTS = (1 << 16) - 1
MOST_BITS = 20  # in a bucket number: 4 MiB of bucket starts per table
LISTS = 4  # default number of lists, times the square root of the number of rows (faiss: 4 to 16)
FLAT = 1280  # most lists that a row is compared with directly; with more lists it is first compared with groups
GROUPED_LISTS = 8  # LISTS when there are groups: so many cost a query hardly more, and each list is shorter
HEADS_SAMPLE = 64  # rows per group that groups are computed from
KMEANS_STEPS, KMEANS_SAMPLE = 2, 8  # Lloyd's steps, and rows per list; few, as rebuilds are frequent (faiss: 25, 256)


class MipsIndex(Protocol):
    """Retrieves row numbers for queries."""

    def nbytes(self, rows: int, hidden: int) -> int:
        """Return the most bytes that an index over R = `rows` rows of H = `hidden` takes."""

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """Index the rows as they are now; every random choice follows from the seed."""

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """Return up to `keep` row numbers for each query, concatenated, repeats included."""


class HashTables:
    """L hash tables; K codes make a bucket number.

    A bucket keeps the first `bucket` of its rows, in an order that every build draws again: a random sample, as SLIDE's
    reservoirs keep, and rows after those that fill the buckets need not be hashed. A table takes 4 bytes for each row
    that it keeps.

    Args:
        codes: SimHash (bits: signs of random projections) or DWTA (the largest of 8 coordinates, 3 bits).
        k: Codes in a bucket number.
        tables: L, the number of tables.
        bucket: The most rows kept in a bucket.
    """

    def __init__(self, codes: str, k: int, tables: int, bucket: int) -> None:
        self._bits = k * (1 if codes == "simhash" else BIN.bit_length() - 1)
        if self._bits > MOST_BITS:
            raise JobError(
                f"sampler.k: {k} codes make bucket numbers of {self._bits} bits; use {MOST_BITS} bits at most"
            )
        self._codes, self._k, self._tables, self._bucket = codes, k, tables, bucket
        self._code_type = np.dtype(np.uint16 if self._bits <= 16 else np.uint32)
        self._hits = np.dtype(np.uint8 if tables < 1 << 8 else np.uint32)
        self._starts = self._ids = np.empty((0, 0), np.int32)
        self._counts = np.empty(0, self._hits)

    def nbytes(self, rows: int, hidden: int) -> int:  # noqa: ARG002 (an inverted file needs it)
        """See `MipsIndex`."""
        return 4 * self._tables * (self._kept_rows(rows) + (1 << self._bits) + 1) + self._hits.itemsize * rows

    def _kept_rows(self, rows: int) -> int:
        """Return the most rows that one table keeps."""
        return min(rows, self._bucket << self._bits)

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """See `MipsIndex`."""
        R, H = rows_RH.shape
        random = generator(seed, "tables")
        self._draw(random, H)
        order = random.permutation(np.arange(R, dtype=np.int32))
        self._ids = np.empty((self._tables, self._kept_rows(R)), np.int32)
        self._starts = np.zeros((self._tables, (1 << self._bits) + 1), np.int32)
        block = max(1, CODES_BYTES // (self._code_type.itemsize * max(1, R)))
        for first in range(0, self._tables, block):
            codes = self._hash_until_full(rows_RH, order, first, min(first + block, self._tables))
            for table, codes_N in enumerate(codes, first):
                index_kernels.fill_buckets(codes_N, order, self._starts[table], self._ids[table])
        self._counts = np.zeros(R, self._hits)

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """See `MipsIndex`."""
        assert len(rows_RH) == len(self._counts), "the tables were built over other rows"
        codes_LB = self._hash(query_BH, 0, self._tables)
        out = np.empty(len(query_BH) * keep, np.int64)
        count = index_kernels.most_hits(codes_LB, self._starts, self._ids, self._bucket, keep, self._counts, out)
        return out[:count]

    def _hash_until_full(self, rows_RH: Tensor, order: NDArray[np.int32], first: int, last: int) -> NDArray[Any]:
        """Return bucket numbers `[L, N]` in some tables of the first N rows in `order`: all, or enough to fill them.

        Counts in the tables' `starts` how many rows each bucket keeps.
        """
        codes = np.empty((last - first, len(order)), self._code_type)
        capacity, kept = (last - first) * (self._bucket << self._bits), 0
        for start in range(0, len(order), FILL_ROWS):
            here = slice(start, start + FILL_ROWS)
            codes[:, here] = self._hash(rows_RH, first, last, torch.from_numpy(order[here]))
            for table, codes_N in enumerate(codes[:, here], first):
                kept += index_kernels.count_in_buckets(codes_N, self._bucket, self._starts[table])
            if kept >= FULL * capacity:
                return codes[:, : here.stop]
        return codes

    def _draw(self, random: np.random.Generator, hidden: int) -> None:
        """Draw the hash functions."""
        count = self._k * self._tables
        if self._codes == "simhash":  # signs on a third of the coordinates (SLIDE's Ratio = 3)
            signs = random.choice(np.array([-1, 0, 0, 0, 0, 1], np.float32), (count, hidden))
            self._projection = torch.from_numpy(signs)
        else:
            needed = -(-count * BIN // hidden)
            permutations = np.concatenate([random.permutation(hidden) for _ in range(needed)])
            self._coordinates = permutations[: count * BIN].reshape(count, BIN)

    def _hash(self, x_BH: Tensor, first: int, last: int, among: Tensor | None = None) -> NDArray[Any]:
        """Return bucket numbers `[L, B]` in tables `first` to `last` (exclusive) of all vectors or those `among`."""
        count, codes = len(x_BH) if among is None else len(among), slice(first * self._k, last * self._k)
        out = np.empty((last - first, count), self._code_type)
        block = max(LEAST_BLOCK, BLOCK_BYTES // (4 * (codes.stop - codes.start)))
        for start in range(0, count, block):
            here = slice(start, start + block)
            x = (x_BH[here] if among is None else x_BH.index_select(0, among[here])).float()
            if self._codes == "simhash":
                index_kernels.sign_codes((self._projection[codes] @ x.T).numpy(), out[:, here])
            else:
                index_kernels.winner_codes(x.contiguous().numpy(), self._coordinates[codes], out[:, here])
        return out


class InvertedFile:
    """Lists of rows around k-means centres; a query scores the rows in the lists of its nearest centres.

    More than 1,280 lists are grouped, about as many groups as lists in a group; a query then probes the lists of its
    nearest group. faiss' own index would keep a copy of all rows, which doubles a wide layer's memory, and score those
    stale values; this one scores the rows as they are now.

    Args:
        lists: Their number; None for four times the square root of the number of rows, or eight times if grouped.
        probes: Lists that a query scores, all of one group.
    """

    def __init__(self, lists: int | None, probes: int) -> None:
        if (lists is not None and not 1 <= lists <= MOST_LISTS) or probes < 1:
            raise JobError(f"sampler: lists {lists} should be 1 to {MOST_LISTS}, and probes {probes} at least 1")
        self._lists, self._probes = lists, probes
        self._members = self._starts = np.empty(0, np.int32)

    def nbytes(self, rows: int, hidden: int) -> int:
        """See `MipsIndex`; includes the sample of rows that the centres are computed from."""
        lists, groups = self._sizes(rows)
        return 8 * rows + 4 * (lists + groups) * (hidden + 1) + 4 * min(rows, lists * KMEANS_SAMPLE) * hidden

    def _sizes(self, rows: int) -> tuple[int, int]:
        """Return the number of lists and of groups for so many rows."""
        root = math.isqrt(rows)
        default = LISTS * root if LISTS * root <= FLAT else GROUPED_LISTS * root
        lists = max(1, min(self._lists or default, rows // 4, MOST_LISTS))
        return lists, 1 if lists <= FLAT else math.isqrt(lists)

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """See `MipsIndex`."""
        R = len(rows_RH)
        lists, groups = self._sizes(R)
        sample = torch.from_numpy(generator(seed, "lists").permutation(R)[: lists * KMEANS_SAMPLE])
        heads_GH = _kmeans(rows_RH.index_select(0, sample[: groups * HEADS_SAMPLE]).float(), groups)
        nearest_R = _nearest(rows_RH, heads_GH)
        used_G = np.bincount(nearest_R, minlength=len(heads_GH)) > 0
        self._heads_GH = heads_GH[torch.from_numpy(used_G)]
        of_R = (used_G.cumsum(dtype=np.uint16) - np.uint16(1))[nearest_R]
        of_S = of_R[sample]
        by_group_SH = rows_RH.index_select(0, sample[torch.from_numpy(np.argsort(of_S, kind="stable"))]).float()
        groups, parts, sizes = len(self._heads_GH), list[Tensor](), list[NDArray[Any]]()
        self._members = np.argsort(of_R, kind="stable").astype(np.int32)
        ends_of_S, ends_of_R = (np.bincount(of, minlength=groups).cumsum() for of in (of_S, of_R))
        for first_of_S, end_of_S, members in zip(
            [0, *ends_of_S], ends_of_S, np.split(self._members, ends_of_R[:-1]), strict=False
        ):  # each group gets one list, and a share of the others by its rows in the sample
            own_SH = by_group_SH[first_of_S:end_of_S]
            if not len(own_SH):  # no row of the sample is in this group
                own_SH = self._heads_GH[len(parts) : len(parts) + 1]
            centres = _kmeans(own_SH, 1 + (lists - groups) * len(own_SH) // len(sample))
            nearest = _nearest(rows_RH, centres, torch.from_numpy(members))
            members[:] = members[np.argsort(nearest.astype(np.uint16), kind="stable")]
            counts = np.bincount(nearest, minlength=len(centres))
            parts.append(centres[torch.from_numpy(counts > 0)])
            sizes.append(counts[counts > 0])
        self._centres_LH = torch.cat(parts)
        self._first_lists = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        self._starts = np.cumsum([0, *np.concatenate(sizes), 0], dtype=np.int32)  # the last list is empty

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """See `MipsIndex`."""
        assert len(rows_RH) == len(self._members), "the lists were built over other rows"
        query_BH = query_BH.float().contiguous()
        lists_BP = self._probed(query_BH)
        members, starts = self._members, self._starts
        row_of = members  # the row in rows_RH of each member
        if rows_RH.dtype != torch.float32:  # convert only the rows of the probed lists to float32
            probed, index_BP = np.unique(lists_BP, return_inverse=True)
            lists_BP = index_BP.reshape(lists_BP.shape)
            parts = [members[starts[i] : starts[i + 1]] for i in probed]
            members, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int32)
            rows_RH, row_of = rows_RH[torch.from_numpy(members)].float(), np.arange(len(members), dtype=np.int32)
        best_BK = np.full((len(query_BH), keep), -1)
        scores_BK = np.empty(best_BK.shape, np.float32)
        index_kernels.best_in_lists(query_BH.numpy(), rows_RH.numpy(), lists_BP, starts, row_of, best_BK, scores_BK)
        retrieved: NDArray[np.int64] = members[best_BK[best_BK >= 0]].astype(np.int64)
        return retrieved

    def _probed(self, query_BH: Tensor) -> NDArray[np.int64]:
        """Return the nearest lists of each query's nearest group `[B, P]`, padded with the empty last list."""
        centres_LH, probes = self._centres_LH, min(self._probes, len(self._centres_LH))
        if len(self._heads_GH) == 1:
            flat_BP: NDArray[np.int64] = (query_BH @ centres_LH.T).topk(probes).indices.numpy()
            return flat_BP
        lists_BP = np.full((len(query_BH), probes), -1)
        scores_BP = np.empty(lists_BP.shape, np.float32)
        group_B1 = _nearest(query_BH, self._heads_GH)[:, None].astype(np.int64)
        identity_L = np.arange(len(centres_LH), dtype=np.int32)
        index_kernels.best_in_lists(
            query_BH.numpy(), centres_LH.numpy(), group_B1, self._first_lists, identity_L, lists_BP, scores_BP
        )
        return np.where(lists_BP < 0, len(centres_LH), lists_BP)


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=1)


def _kmeans(x_SH: Tensor, count: int) -> Tensor:
    """Return at most `count` unit-length centres (spherical, as queries take products)."""
    centres = _unit(x_SH[:count].clone())
    for _ in range(KMEANS_STEPS):
        nearest = torch.from_numpy(_nearest(x_SH, centres))
        sums = torch.zeros_like(centres).index_add_(0, nearest, x_SH)
        centres = _unit(sums[torch.bincount(nearest, minlength=len(centres)) > 0])
    return centres


def _nearest(x_RH: Tensor, centres_LH: Tensor, among: Tensor | None = None) -> NDArray[np.int32]:
    """Return the index of the centre with the largest product for each row, or for the rows `among`, in blocks."""
    rows = len(x_RH) if among is None else len(among)
    nearest_R = np.empty(rows, np.int32)  # allocated before the blocks: parts between would fragment memory
    block = max(1, BLOCK_BYTES // (4 * len(centres_LH)))
    for first in range(0, rows, block):
        here = slice(first, first + block)
        x = x_RH[here] if among is None else x_RH.index_select(0, among[here])  # takes a sixth of x_RH[among]'s time
        index_kernels.largest_in_columns((centres_LH @ x.float().T).numpy(), nearest_R[here])
    return nearest_R
