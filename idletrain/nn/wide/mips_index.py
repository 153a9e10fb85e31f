"""Which rows of a matrix have large products with a query? Found without looking at all of them.

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
from idletrain.nn.optim import kernels

HASH_BLOCK_BYTES = 1 << 20  # of scratch while rows are hashed or dealt to lists: stays in a core's cache
CODES_BYTES = 1 << 24  # of bucket numbers that are held at a time
BIN = 8  # coordinates that one DWTA code compares (SLIDE's released configuration)
MOST_LISTS = (1 << 16) - 1
MOST_BITS = 20  # of a bucket's number: 4 MiB of bucket starts a table
LISTS = 4  # times the root of how many rows there are, where it is not said (faiss: 4 to 16)
FLAT = 1280  # lists that a row is compared with; where there are more, it is with groups of them first
GROUPED_LISTS = 8  # LISTS where they are found by groups: so many cost a query hardly more, and each is shorter
KMEANS_STEPS, KMEANS_SAMPLE = 3, 8  # Lloyd's steps, on this many rows a list (faiss: 25 and 256): rebuilds are often


class MipsIndex(Protocol):
    """Retrieves row numbers for queries."""

    def nbytes(self, rows: int, hidden: int) -> int:
        """Memory that tables over so many rows take at most."""

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """Take in the rows as they are now; every random choice follows from the seed."""

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """Up to `keep` rows for each query, all in one, repeats included."""


class HashTables:
    """L tables of buckets under K codes each.

    A bucket holds the first `bucket` of its rows, in an order that every build draws anew: where it holds all, a table
    takes 4 bytes a row, and never more than 4 a place in its buckets.

    Args:
        codes: SimHash (bits: signs of random projections) or DWTA (the largest of 8 coordinates, 3 bits).
        k: Codes in a bucket's number.
        tables: How many.
        bucket: The most rows in a bucket.
    """

    def __init__(self, codes: str, k: int, tables: int, bucket: int) -> None:
        self._bits = k * (1 if codes == "simhash" else BIN.bit_length() - 1)
        if self._bits > MOST_BITS:
            raise JobError(f"sampler.k: {k} codes make buckets' numbers of {self._bits} bits; {MOST_BITS} are the most")
        self._codes, self._k, self._tables, self._bucket = codes, k, tables, bucket
        self._number = np.dtype(np.uint16 if self._bits <= 16 else np.uint32)
        self._hits = np.dtype(np.uint8 if tables < 1 << 8 else np.uint32)
        self._starts = self._ids = np.empty((0, 0), np.int32)
        self._counts = np.empty(0, self._hits)

    def nbytes(self, rows: int, hidden: int) -> int:  # noqa: ARG002 (an inverted file needs it)
        """See `Tables`."""
        return 4 * self._tables * (self._places(rows) + (1 << self._bits) + 1) + self._hits.itemsize * rows

    def _places(self, rows: int) -> int:
        """The most rows that a table holds."""
        return min(rows, self._bucket << self._bits)

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """See `Tables`."""
        R, H = rows_RH.shape
        random = generator(seed, "tables")
        self._draw(random, H)
        order = random.permutation(np.arange(R, dtype=np.int32))
        self._ids = np.empty((self._tables, self._places(R)), np.int32)
        self._starts = np.zeros((self._tables, (1 << self._bits) + 1), np.int32)
        at_once = max(1, CODES_BYTES // (self._number.itemsize * max(1, R)))
        for first in range(0, self._tables, at_once):
            for table, codes in enumerate(self._hash(rows_RH, first, first + at_once), first):
                kernels.fill_buckets(codes, order, self._bucket, self._starts[table], self._ids[table])
        self._counts = np.zeros(R, self._hits)

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """See `Tables`."""
        assert len(rows_RH) == len(self._counts), "the tables were built over other rows"
        codes_LB = self._hash(query_BH, 0, self._tables)
        out = np.empty(len(query_BH) * keep, np.int64)
        count = kernels.most_hits(codes_LB, self._starts, self._ids, keep, self._counts, out)
        return out[:count]

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

    def _hash(self, x_BH: Tensor, first: int, last: int) -> NDArray[Any]:
        """Bucket numbers in tables from `first` on and before `last`, `[L, B]`."""
        last = min(last, self._tables)
        some = slice(first * self._k, last * self._k)
        out = np.empty((last - first, len(x_BH)), self._number)
        block = max(1, HASH_BLOCK_BYTES // (4 * (some.stop - some.start)))
        for start in range(0, len(x_BH), block):
            x, into = x_BH[start : start + block].float(), out[:, start : start + block]
            if self._codes == "simhash":
                kernels.sign_codes((self._projection[some] @ x.T).numpy(), into)
            else:
                kernels.winner_codes(x.contiguous().numpy(), self._coordinates[some], into)
        return out


class InvertedFile:
    """Rows in lists around k-means centres; a query looks through the lists of its nearest centres.

    More than 1,280 lists are found by the nearest of as many groups as a group has lists.

    Ours and not faiss': its index keeps a copy of all rows, which would double a wide layer's memory, and goes stale
    with them, while this one scores the rows as they are now.

    Args:
        lists: How many; None for four times the root of how many rows there are, eight times where that makes groups.
        probes: Lists that a query looks through, of one group.
    """

    def __init__(self, lists: int | None, probes: int) -> None:
        if (lists is not None and not 1 <= lists <= MOST_LISTS) or probes < 1:
            raise JobError(f"sampler: lists {lists} should be 1 to {MOST_LISTS}, and probes {probes} at least 1")
        self._asked, self._probes = lists, probes
        self._members = self._starts = np.empty(0, np.int32)

    def nbytes(self, rows: int, hidden: int) -> int:
        """See `Tables`; with the rows that centres are found from."""
        lists, groups = self._sizes(rows)
        return 8 * rows + 4 * (lists + groups) * (hidden + 1) + 4 * min(rows, lists * KMEANS_SAMPLE) * hidden

    def _sizes(self, rows: int) -> tuple[int, int]:
        """How many lists and groups of them there are for so many rows."""
        root = math.isqrt(rows)
        usual = LISTS * root if LISTS * root <= FLAT else GROUPED_LISTS * root
        lists = max(1, min(self._asked or usual, rows // 4, MOST_LISTS))
        return lists, 1 if lists <= FLAT else math.isqrt(lists)

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """See `Tables`."""
        R = len(rows_RH)
        lists, groups = self._sizes(R)
        sample = torch.from_numpy(generator(seed, "lists").permutation(R)[: lists * KMEANS_SAMPLE])
        sample_SH = rows_RH.index_select(0, sample).float()
        self._heads_GH = _kmeans(sample_SH[: groups * KMEANS_SAMPLE], groups)
        groups, parts, list_of_R = len(self._heads_GH), list[Tensor](), np.empty(R, np.uint16)
        of_S, of_R = (_nearest(x, self._heads_GH).numpy().astype(np.uint16) for x in (sample_SH, rows_RH))
        for group in range(groups):  # each gets a list, and the others by its share of the rows
            own_SH = sample_SH[torch.from_numpy(of_S == group)]
            if not len(own_SH):  # two heads in nearly one direction: which is nearer, may be a matter of rounding
                own_SH = self._heads_GH[group : group + 1]
            parts.append(_kmeans(own_SH, 1 + (lists - groups) * len(own_SH) // len(sample_SH)))
            members = np.flatnonzero(of_R == group)
            nearest = _nearest(rows_RH, parts[-1], torch.from_numpy(members))
            list_of_R[members] = nearest.numpy() + sum(map(len, parts[:-1]))
        self._centres_LH = torch.cat(parts)
        self._first_lists = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        self._members = np.argsort(list_of_R, kind="stable").astype(np.int32)
        counts = np.bincount(list_of_R, minlength=len(self._centres_LH) + 1)  # the last list is empty
        self._starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """See `Tables`."""
        assert len(rows_RH) == len(self._members), "the lists were built over other rows"
        query_BH = query_BH.float().contiguous()
        lists_BP = self._probed(query_BH)
        members, starts = self._members, self._starts
        places = members  # where the members' rows are
        if rows_RH.dtype != torch.float32:  # only the rows of all these lists, in float32
            asked, again_BP = np.unique(lists_BP, return_inverse=True)
            lists_BP = again_BP.reshape(lists_BP.shape)
            parts = [members[starts[one] : starts[one + 1]] for one in asked]
            members, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int32)
            rows_RH, places = rows_RH[torch.from_numpy(members)].float(), np.arange(len(members), dtype=np.int32)
        best_BK = np.full((len(query_BH), keep), -1)
        scores_BK = np.empty(best_BK.shape, np.float32)
        kernels.best_in_lists(query_BH.numpy(), rows_RH.numpy(), lists_BP, starts, places, best_BK, scores_BK)
        found: NDArray[np.int64] = members[best_BK[best_BK >= 0]].astype(np.int64)
        return found

    def _probed(self, query_BH: Tensor) -> NDArray[np.int64]:
        """The nearest lists of each query's nearest group, `[B, P]`; the empty list where that has fewer."""
        centres_LH, probes = self._centres_LH, min(self._probes, len(self._centres_LH))
        if len(self._heads_GH) == 1:
            flat_BP: NDArray[np.int64] = (query_BH @ centres_LH.T).topk(probes).indices.numpy()
            return flat_BP
        lists_BP = np.full((len(query_BH), probes), -1)
        scores_BP = np.empty(lists_BP.shape, np.float32)
        group_B1 = _nearest(query_BH, self._heads_GH)[:, None].numpy()
        every_L = np.arange(len(centres_LH), dtype=np.int32)
        kernels.best_in_lists(
            query_BH.numpy(), centres_LH.numpy(), group_B1, self._first_lists, every_L, lists_BP, scores_BP
        )
        return np.where(lists_BP < 0, len(centres_LH), lists_BP)


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=1)


def _kmeans(x_SH: Tensor, count: int) -> Tensor:
    """Centres that each have a row, unit vectors, at most `count`. Spherical: what matters is the product with a
    query.
    """
    centres = _unit(x_SH[:count].clone())
    for _ in range(KMEANS_STEPS):
        used, nearest = torch.unique(_nearest(x_SH, centres), return_inverse=True)
        centres = _unit(x_SH.new_zeros(len(used), x_SH.shape[1]).index_add_(0, nearest, x_SH))
    return centres[torch.unique(_nearest(x_SH, centres))]


def _nearest(x_RH: Tensor, centres_LH: Tensor, among: Tensor | None = None) -> Tensor:
    """The centre with the largest product, of all rows or of some, in blocks."""
    rows = len(x_RH) if among is None else len(among)
    found_R = torch.empty(rows, dtype=torch.int64)  # before all blocks: parts between them would hold memory apart
    block = max(1, HASH_BLOCK_BYTES // (4 * len(centres_LH)))
    for first in range(0, rows, block):
        some = slice(first, first + block)
        x = x_RH[some] if among is None else x_RH.index_select(0, among[some])  # in a sixth of x_RH[among]'s time
        scores = x.float() @ centres_LH.T
        found_R[some] = torch.from_numpy(scores.numpy().argmax(1))  # in two thirds of torch's time
    return found_R
