"""Which rows of a matrix have large products with a query? Found without looking at all of them.

Hash tables over SimHash (Charikar, STOC 2002) or DWTA codes (Chen & Shrivastava, UAI 2018), as SLIDE uses them
(arXiv 1903.03129, section 3), and an inverted file (k-means lists). Letters: R rows, H hidden, B queries, L tables,
K codes a table, S buckets.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn import kernels
from idletrain.nn.randomness import generator

BLOCK_BYTES = 1 << 25  # of scratch while hashing: stays near the cache
BIN = 8  # coordinates that one DWTA code compares (SLIDE's released configuration)
MOST_LISTS = 1 << 16
MOST_BITS = 20  # of a bucket's number: 4 MiB of bucket starts a table
KMEANS_STEPS, KMEANS_SAMPLE = 5, 32  # Lloyd's steps, on this many rows a list (faiss: 25 and 256): rebuilds are often


class Tables(Protocol):
    """Retrieves row numbers for queries."""

    def nbytes(self, rows: int, hidden: int) -> int:
        """Memory that tables over so many rows take."""

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """Take in the rows as they are now; every random choice follows from the seed."""

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """Up to `keep` rows for each query, all in one, repeats included."""


class HashTables:
    """L tables of buckets under K codes each.

    A table is all row numbers sorted by bucket and where each bucket starts: 4 bytes a row and table, where SLIDE's
    fixed buckets take 512 a bucket. Rows enter in random order and a bucket's last `bucket` are seen.

    Args:
        codes: SimHash (bits: signs of random projections) or DWTA (the largest of 8 coordinates, 3 bits).
        k: Codes in a bucket's number.
        tables: How many.
        bucket: The most rows a bucket gives.
    """

    def __init__(self, codes: str, k: int, tables: int, bucket: int) -> None:
        self._bits = k * (1 if codes == "simhash" else BIN.bit_length() - 1)
        if self._bits > MOST_BITS:
            raise JobError(f"sampler.k: {k} codes make buckets' numbers of {self._bits} bits; {MOST_BITS} are the most")
        self._codes, self._k, self._tables, self._bucket = codes, k, tables, bucket
        self._narrowest = (
            np.uint16 if self._bits <= 16 else np.uint32
        )  # 670,000 16-bit codes sort in 43 ms, 32-bit ones in 212
        self._starts = self._ids = np.empty((0, 0), np.int32)

    def nbytes(self, rows: int, hidden: int) -> int:  # noqa: ARG002 (an inverted file needs it)
        """See `Tables`."""
        return 4 * self._tables * (rows + (1 << self._bits) + 1) + 4 * rows

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """See `Tables`."""
        R, H = rows_RH.shape
        random = generator(seed, "tables")
        self._draw(random, H)
        order = random.permutation(R)
        self._ids = np.empty((self._tables, R), np.int32)
        self._starts = np.zeros((self._tables, (1 << self._bits) + 1), np.int32)
        block = max(1, BLOCK_BYTES // (4 * self._k * self._tables * BIN))
        for start in range(0, R, block):
            self._ids[:, start : start + block] = self._hash(rows_RH[start : start + block].float()).T
        for table in range(self._tables):  # each table's codes stand where its ids will
            codes = self._ids[table, order].astype(self._narrowest)
            self._ids[table] = order[np.argsort(codes, kind="stable")]
            self._starts[table, 1:] = np.bincount(codes, minlength=1 << self._bits).cumsum()
        self._counts = np.zeros(R, np.int32)

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """See `Tables`."""
        assert len(rows_RH) == self._ids.shape[1], "the tables were built over other rows"
        codes_BL = self._hash(query_BH.float())
        out = np.empty(len(query_BH) * keep, np.int64)
        bucket = min(self._bucket, len(rows_RH))
        count = kernels.most_hits(codes_BL.astype(np.int64), self._starts, self._ids, bucket, keep, self._counts, out)
        return out[:count]

    def _draw(self, random: np.random.Generator, hidden: int) -> None:
        """Draw the hash functions."""
        count = self._k * self._tables
        if self._codes == "simhash":  # signs on a third of the coordinates (SLIDE's Ratio = 3)
            signs = random.choice(np.array([-1, 0, 0, 0, 0, 1], np.float32), (hidden, count))
            self._projection = torch.from_numpy(signs)
        else:
            needed = -(-count * BIN // hidden)
            permutations = np.concatenate([random.permutation(hidden) for _ in range(needed)])
            self._coordinates = torch.from_numpy(permutations[: count * BIN])

    def _hash(self, x_BH: Tensor) -> NDArray[np.int32]:
        """Bucket numbers, `[B, L]`."""
        if self._codes == "simhash":
            codes, width = (x_BH @ self._projection > 0).int(), 1
        else:
            codes, width = x_BH[:, self._coordinates].view(len(x_BH), -1, BIN).argmax(-1).int(), BIN.bit_length() - 1
        powers = 2 ** (width * torch.arange(self._k, dtype=torch.int32))
        numbers: NDArray[np.int32] = (codes.view(len(x_BH), self._tables, self._k) * powers).sum(-1).int().numpy()
        return numbers


class InvertedFile:
    """Rows in lists around k-means centres; a query looks through the lists of its nearest centres.

    Ours and not faiss': its index keeps a copy of all rows, which would double a wide layer's memory, and goes stale
    with them, while this one scores the rows as they are now.

    Args:
        lists: How many.
        probes: Lists that a query looks through.
    """

    def __init__(self, lists: int, probes: int) -> None:
        if not 1 <= lists <= MOST_LISTS or probes < 1:
            raise JobError(f"sampler: lists {lists} should be 1 to {MOST_LISTS}, and probes {probes} at least 1")
        self._asked, self._probes = lists, probes
        self._members = self._starts = np.empty(0, np.int32)

    def nbytes(self, rows: int, hidden: int) -> int:
        """See `Tables`."""
        return 8 * rows + 4 * self._asked * (hidden + 1)

    def build(self, rows_RH: Tensor, seed: int) -> None:
        """See `Tables`."""
        R = len(rows_RH)
        lists = max(1, min(self._asked, R // 4))
        random = generator(seed, "lists")
        sample_SH = rows_RH[torch.from_numpy(random.permutation(R)[: lists * KMEANS_SAMPLE])].float()
        centres_LH = _unit(sample_SH[:lists].clone())
        for _ in range(KMEANS_STEPS):  # spherical k-means: what matters is the product with a query
            nearest = _nearest(sample_SH, centres_LH)
            sums = torch.zeros_like(centres_LH).index_add_(0, nearest, sample_SH)
            empty = torch.bincount(nearest, minlength=lists) == 0
            centres_LH = torch.where(empty[:, None], centres_LH, _unit(sums))
        self._centres_LH = centres_LH
        list_of_R = _nearest(rows_RH, centres_LH).numpy()
        self._members = np.argsort(list_of_R.astype(np.uint16), kind="stable").astype(np.int32)
        self._starts = np.concatenate([[0], np.bincount(list_of_R, minlength=lists).cumsum()]).astype(np.int32)

    def retrieve(self, query_BH: Tensor, rows_RH: Tensor, keep: int) -> NDArray[np.int64]:
        """See `Tables`."""
        assert len(rows_RH) == len(self._members), "the lists were built over other rows"
        query = query_BH.float()
        probes_BP = (query @ self._centres_LH.T).topk(min(self._probes, len(self._centres_LH))).indices
        out = torch.full((len(query), probes_BP.shape[1], keep), -1)
        scores = torch.full(out.shape, -torch.inf)
        asked = probes_BP.flatten().numpy()
        by_list = asked.argsort(kind="stable")
        lists, firsts = np.unique(asked[by_list], return_index=True)
        # Each list's rows are gathered once, for all queries that look through it.
        for one, places in zip(lists, np.split(by_list, firsts[1:]), strict=True):
            members = torch.from_numpy(self._members[self._starts[one] : self._starts[one + 1]])
            queries, probes = (torch.from_numpy(part) for part in divmod(places, probes_BP.shape[1]))
            best = (query[queries] @ rows_RH[members].float().T).topk(min(keep, len(members)))
            out[queries, probes, : best.values.shape[1]] = members[best.indices].long()
            scores[queries, probes, : best.values.shape[1]] = best.values
        places_BK = scores.flatten(1).topk(keep).indices
        found: NDArray[np.int64] = out.flatten(1).gather(1, places_BK).numpy()
        return found[found >= 0]


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=1)


def _nearest(x_RH: Tensor, centres_LH: Tensor) -> Tensor:
    """The centre with the largest product, `[R]`, in blocks."""
    block = max(1, BLOCK_BYTES // (4 * len(centres_LH)))
    return torch.cat([(part.float() @ centres_LH.T).argmax(1) for part in torch.split(x_RH, block)])
