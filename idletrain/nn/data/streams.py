"""Streams: datasets that are read from their beginning, as torch's IterableDataset and Hugging Face's streaming.

A stream is dealt out by the number of subnets: of S subnets, subnet k gets the items k, k + S, k + 2 S, ... Its batch n
holds the n-th B of these, whoever trains it: a worker that goes on with a subnet begins at the position that the worker
before it has sent, if the dataset keeps its state, else the stream anew, and skips what comes before. Where a stream
ends, the next pass begins, also in the middle of a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError, tried_code, user_code
from idletrain.nn.data.batches import named_parts
from idletrain.nn.data.datasets import Loading, MapStyleSource
from idletrain.nn.data.seeding import seed_everything, seeded
from idletrain.nn.data.stream_position import StreamPosition, decoded
from idletrain.nn.data.values import as_array

# Items at the beginning that are kept in memory and can be looked up: what statistics and evaluations are made of.
# 2,048 photographs of 224 x 224 in 8 bits are 300 MB.
LEADING_ITEMS = 2048
COMPARED_ITEMS = 4  # of two readings, to see that they are the same
RESUMED_ITEMS = 32  # before and behind a state: a buffer of two items that is filled anew is seen in one of them


@dataclass(frozen=True)
class StreamPlace:
    """Which batch of a stream a step reads.

    Attributes:
        shard: The subnet's number.
        shards: The number of subnets.
        number: The number of the batch in the shard, from the start of the run.
        size: Items of a batch.
        seed_of: Returns the seed that a batch is read with, from its number.
        position: An earlier batch's position as text, or "".
    """

    shard: int
    shards: int
    number: int
    size: int
    seed_of: Callable[[int], int]
    position: str = ""

    def __len__(self) -> int:
        return self.size

    def from_where(self) -> StreamPosition | None:
        """Return the position from which this batch can be reached, if it was sent one."""
        position = decoded(self.position)
        own = self.shard, self.shards, self.size
        fits = position is not None and (position.shard, position.shards, position.size) == own
        return position if position and fits and position.number <= self.number else None


def known_length(samples: Any) -> int | None:
    """Return how many samples there are; None of a stream that is not read to its end."""
    return None if isinstance(samples, StreamSource) and not samples.is_whole else len(samples)


@dataclass(frozen=True)
class StreamSource:
    """A stream as samples: its leading items by number, and all of it by `StreamPlace`.

    Attributes:
        dataset: What is iterated over, again and again.
        collate: See `MapStyleSource`.
        loading: How it is read.
        names: See `MapStyleSource`.
        integers: Whether 8-bit inputs stay integers.
        resumes: Whether the dataset goes on with the same items from a state that it has returned.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    loading: Loading = field(default_factory=Loading)
    names: frozenset[str] | None = None
    integers: bool = False
    resumes: bool = False
    _shards: dict[tuple[int, int], _Shard] = field(default_factory=dict, init=False, repr=False, compare=False)
    _last: list[_Shard] = field(default_factory=list, init=False, repr=False, compare=False)
    _leading: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without what is read of it."""
        return StreamSource, (self.dataset, self.collate, self.loading, self.names, self.integers, self.resumes)

    def open(self) -> StreamSource:
        return self

    def __len__(self) -> int:
        return len(self.leading())

    @property
    def is_whole(self) -> bool:
        """Return whether the leading items are all that there are."""
        return len(self) < LEADING_ITEMS

    def leading(self) -> list[Any]:
        """Return the first items.

        Raises:
            JobError: the dataset raises something, or has none.
        """
        if not self._leading:
            self._leading.extend(first_items(self.dataset, LEADING_ITEMS))
        if not self._leading:
            raise JobError(f"data: the {type(self.dataset).__name__} yields no items; give one that yields samples")
        return self._leading

    def batch(self, index: NDArray[np.int64] | StreamPlace) -> tuple[Any, Any]:
        items = self._read(index) if isinstance(index, StreamPlace) else [self.leading()[i] for i in index]
        return self.joined(items)

    def joined(self, items: list[Any]) -> tuple[Any, Any]:
        """Return inputs and target of some items."""
        return MapStyleSource(self.dataset, self.collate, names=self.names, integers=self.integers).joined(items)

    def position(self) -> str:
        """Return the position behind the batch of a `StreamPlace` that was read last; "" if it is of no use."""
        if not self.resumes or not self._last:
            return ""
        try:
            return self._last[0].position().encoded()
        except ValueError:  # unlike the state at its beginning, which `state_fault` saw
            return ""

    def _read(self, place: StreamPlace) -> list[Any]:
        key = place.shard, place.shards
        held = self._shards.get(key)
        if held is None or held.next != place.number:
            position = place.from_where() if self.resumes else None
            reached = position.number if position else 0
            if held is None or not reached <= held.next <= place.number:
                held = self._shards[key] = _Shard(self.dataset, place, position)
        self._last[:] = [held]
        return held.read(place)


class _Shard:
    """One subnet's items, batch by batch.

    Args:
        dataset: The stream.
        place: Any batch of the subnet.
        position: Where to begin; None for the beginning.

    Attributes:
        next: The number of the batch that is read next.
    """

    def __init__(self, dataset: Any, place: StreamPlace, position: StreamPosition | None) -> None:
        self._dataset = own_copy(dataset)
        self._own = place.shard, place.shards, place.size
        self.next = position.number if position else 0
        self._epoch, self._read = (position.epoch, position.items) if position else (0, 0)
        self._items = self._dealt(position)

    def read(self, place: StreamPlace) -> list[Any]:
        """Return the items of a batch; those before it are skipped, under the seeds that they are read with."""
        while True:
            seed_everything(place.seed_of(self.next))
            items = list(itertools.islice(self._items, place.size))
            self.next += 1
            if self.next > place.number:
                return items

    def position(self) -> StreamPosition:
        """Return the position behind the last batch."""
        return StreamPosition(*self._own, self.next, self._epoch, self._read, self._dataset.state_dict())

    def _dealt(self, position: StreamPosition | None) -> Iterator[Any]:
        """Yield the items of the shard from a position on, pass after pass without an end."""
        shard, shards, _ = self._own
        while True:
            empty = not self._read
            for item in one_pass(self._dataset, self._epoch, position):
                number, self._read = self._read, self._read + 1
                if number % shards == shard:
                    yield item
                    empty = False
            if empty:
                name = type(self._dataset).__name__
                raise JobError(
                    f"data: the {name} ended before every one of {shards} subnets had an item; its __iter__ should "
                    "begin anew each time and yield one at least for each"
                )
            self._epoch, self._read, position = self._epoch + 1, 0, None


def one_pass(dataset: Any, epoch: int, position: StreamPosition | None = None) -> Iterator[Any]:
    """Begin a pass over a stream, or go on in it; where it has a `set_epoch`, it is told the number of the pass."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    if position is not None:
        dataset.load_state_dict(position.state)
    return iter(dataset)


def first_items(dataset: Any, count: int) -> list[Any]:
    """Read items from the beginning, of a copy if the stream keeps its state.

    Raises:
        JobError: the dataset raises something; it names the user's function and the line.
    """
    remedy = "); correct it (no DataLoader iterates over it: get_worker_info() is None)"
    with user_code(f"data: the {type(dataset).__name__} cannot be read (", remedy), seeded(0):
        return list(itertools.islice(one_pass(own_copy(dataset), 0), count))


def _content(item: Any) -> list[Any]:
    """Return the numbers and strings in an item, so that they can be compared."""
    parts = [part for _, part in named_parts(item)]
    arrays = (as_array(part).tobytes() if isinstance(part, Tensor | np.ndarray) else part for part in parts)
    return [part for part in arrays if isinstance(part, bytes | str | int | float)]


def check_stream(stream: StreamSource, subnets: int) -> None:
    """Check that a stream can be dealt out to subnets, by whichever worker.

    Raises:
        JobError: it cannot be read, or only once, yields other items every time, or has too few.
    """
    name = type(stream.dataset).__name__
    once = (
        f"data: the {name} can be read only once and by one process; give an IterableDataset whose __iter__ begins "
        "anew, of which every subnet is then given its part"
    )
    if hasattr(stream.dataset, "__next__"):
        raise JobError(once)
    if len(stream) < subnets:
        raise JobError(f"data: the {name} ends after {len(stream)} items; {subnets} subnets need at least one each")
    first, again = stream.leading()[:COMPARED_ITEMS], first_items(stream.dataset, COMPARED_ITEMS)
    if len(again) < len(first):
        raise JobError(once)
    if [_content(item) for item in first] != [_content(item) for item in again]:
        raise JobError(
            f"data: the {name} yields other items each time it is read, though random, numpy and torch are seeded; "
            "seed what it draws from, so that a subnet can go on on another worker"
        )


def keeps_state(dataset: Any) -> bool:
    """Return whether a stream can be asked for its state and go on from one, as those of Hugging Face."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def own_copy(dataset: Any) -> Any:
    """Return a copy of a stream that keeps its state, which is that of one reading alone; another stream as it is.

    It is copied as it travels to workers: Hugging Face's hold caches of the process, which others fill meanwhile.

    Raises:
        JobError: it cannot be copied.
    """
    if not keeps_state(dataset):
        return dataset
    with user_code(f"data: the {type(dataset).__name__} keeps its state and cannot be copied (", ")"):
        return cloudpickle.loads(cloudpickle.dumps(dataset))


def state_fault(dataset: Any) -> str:
    """Return why a stream that keeps its state cannot go on from it, found on a few items; or ""."""

    def place(number: int) -> StreamPlace:
        return StreamPlace(0, 1, number, RESUMED_ITEMS, lambda seed: seed)

    try:
        with tried_code(), seeded(0):
            shard = _Shard(dataset, place(0), None)
            shard.read(place(0))
            position = shard.position()
        text = position.encoded()
        with tried_code(), seeded(0):
            on = _content(shard.read(place(1)))
            resumed = _content(_Shard(dataset, place(1), decoded(text)).read(place(1)))
    except (JobError, ValueError) as error:
        return str(error)
    return "" if on == resumed else "it goes on from its state with other items than without"
