"""Streams: datasets that are read from their beginning, as torch's IterableDataset and Hugging Face's streaming.

A stream is dealt out by the number of subnets: of S subnets, subnet k gets the items k, k + S, k + 2 S, ... Its batch n
holds the n-th B of these, whoever trains it: a worker that goes on with a subnet begins the stream anew and skips what
comes before. Where a stream ends, the next pass begins, also in the middle of a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn.data.batches import named_parts
from idletrain.nn.data.datasets import Loading, MapStyleSource
from idletrain.nn.data.seeding import seed_everything, seeded
from idletrain.nn.data.values import as_array

# Items at the beginning that are kept in memory and can be looked up: what statistics and evaluations are made of.
# 2,048 photographs of 224 x 224 in 8 bits are 300 MB.
LEADING_ITEMS = 2048
COMPARED_ITEMS = 4  # of two readings, to see that they are the same


@dataclass(frozen=True)
class StreamPlace:
    """Which batch of a stream a step reads.

    Attributes:
        shard: The subnet's number.
        shards: The number of subnets.
        number: The number of the batch in the shard, from the start of the run.
        size: Items of a batch.
        seed_of: Returns the seed that a batch is read with, from its number.
    """

    shard: int
    shards: int
    number: int
    size: int
    seed_of: Callable[[int], int]

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class StreamSource:
    """A stream as samples: its leading items by number, and all of it by `StreamPlace`.

    Attributes:
        dataset: What is iterated over, again and again.
        collate: See `MapStyleSource`.
        loading: How it is read.
        names: See `MapStyleSource`.
        integers: Whether 8-bit inputs stay integers.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    loading: Loading = field(default_factory=Loading)
    names: frozenset[str] | None = None
    integers: bool = False
    _shards: dict[tuple[int, int], _Shard] = field(default_factory=dict, init=False, repr=False, compare=False)
    _leading: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without what is read of it."""
        return StreamSource, (self.dataset, self.collate, self.loading, self.names, self.integers)

    def open(self) -> StreamSource:
        return self

    def __len__(self) -> int:
        return len(self.leading())

    @property
    def is_whole(self) -> bool:
        """Return whether the leading items are all that there are."""
        return len(self) < LEADING_ITEMS

    def leading(self) -> list[Any]:
        """Return the first items."""
        if not self._leading:
            with seeded(0):
                self._leading.extend(itertools.islice(begun(self.dataset, 0), LEADING_ITEMS))
        return self._leading

    def batch(self, index: NDArray[np.int64] | StreamPlace) -> tuple[Any, Any]:
        items = self._read(index) if isinstance(index, StreamPlace) else [self.leading()[i] for i in index]
        return self.joined(items)

    def joined(self, items: list[Any]) -> tuple[Any, Any]:
        """Return inputs and target of some items."""
        return MapStyleSource(self.dataset, self.collate, names=self.names, integers=self.integers).joined(items)

    def _read(self, place: StreamPlace) -> list[Any]:
        key = place.shard, place.shards
        if key not in self._shards or self._shards[key].next > place.number:
            self._shards[key] = _Shard(self.dataset, *key)
        return self._shards[key].read(place)


class _Shard:
    """One subnet's items, batch by batch.

    Attributes:
        next: The number of the batch that is read next.
    """

    def __init__(self, dataset: Any, shard: int, shards: int) -> None:
        self.next = 0
        self._items = _dealt(dataset, shard, shards)

    def read(self, place: StreamPlace) -> list[Any]:
        """Return the items of a batch; those before it are skipped, under the seeds that they are read with."""
        while True:
            seed_everything(place.seed_of(self.next))
            items = list(itertools.islice(self._items, place.size))
            self.next += 1
            if self.next > place.number:
                return items


def _dealt(dataset: Any, shard: int, shards: int) -> Iterator[Any]:
    """Yield the items of a shard, pass after pass without an end."""
    for epoch in itertools.count():
        empty = True
        for item in itertools.islice(begun(dataset, epoch), shard, None, shards):
            yield item
            empty = False
        if empty:
            raise JobError(f"data: the {type(dataset).__name__} ended before every one of {shards} subnets had an item")


def begun(dataset: Any, epoch: int) -> Iterator[Any]:
    """Begin a pass over a stream; where it has a `set_epoch`, it is told the number of the pass."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return iter(dataset)


def _content(item: Any) -> list[Any]:
    """Return the numbers and strings in an item, so that they can be compared."""
    parts = [part for _, part in named_parts(item)]
    arrays = (as_array(part).tobytes() if isinstance(part, Tensor | np.ndarray) else part for part in parts)
    return [part for part in arrays if isinstance(part, bytes | str | int | float)]


def check_stream(stream: StreamSource, subnets: int) -> None:
    """Check that a stream can be dealt out to subnets, by whichever worker.

    Raises:
        JobError: it can be read only once, yields other items every time, or has too few.
    """
    name = type(stream.dataset).__name__
    if iter(stream.dataset) is stream.dataset:
        raise JobError(
            f"data: the {name} can be read only once and by one process; give an IterableDataset whose __iter__ begins "
            "anew, of which every subnet is then given its part"
        )
    if len(stream) < subnets:
        raise JobError(f"data: the {name} ends after {len(stream)} items; {subnets} subnets need at least one each")
    read = []
    for _ in range(2):
        with seeded(0):
            read.append([_content(item) for item in itertools.islice(begun(stream.dataset, 0), COMPARED_ITEMS)])
    if read[0] != read[1]:
        raise JobError(
            f"data: the {name} yields other items each time it is read, though random, numpy and torch are seeded; "
            "seed what it draws from, so that a subnet can go on on another worker"
        )
