"""Containers that never change: a changed copy shares all but a small part with the original.

A state between two events has as many subnets and workers as the run, and an event changes one or two of them. Copying
all of them each time would cost the head seconds a round with thousands, and a simulation of a hundred thousand hours.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

V = TypeVar("V")
SHARDS = 64
CHUNK = 256
Key = tuple[Any, ...]

if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 (to mypy, only this is an export)
else:

    def replace(one: V, **changes: Any) -> V:
        """Return a copy of a dataclass' instance with some fields changed, as `dataclasses.replace`.

        Without calling `__init__` with every field, this takes a tenth of the time. The class must not have slots.
        """
        copy = object.__new__(type(one))
        copy.__dict__.update(one.__dict__)
        copy.__dict__.update(changes)
        return copy


@dataclass(frozen=True, slots=True, eq=False)
class PersistentMap(Mapping[str, V]):
    """A map from names, in the same order in every process.

    Attributes:
        shards: Parts of it, each name in the one that its CRC-32 says.
        size: Number of names.
    """

    shards: tuple[Mapping[str, V], ...] = ({},) * SHARDS
    size: int = 0

    @classmethod
    def of(cls, items: Mapping[str, V]) -> PersistentMap[V]:
        """Return a map of these items."""
        shards: list[dict[str, V]] = [{} for _ in range(SHARDS)]
        for name, value in items.items():
            shards[_shard(name)][name] = value
        return cls(tuple(shards), len(items))

    def put(self, name: str, value: V) -> PersistentMap[V]:
        """Return the map with an item added or replaced."""
        at = _shard(name)
        old = self.shards[at]
        return PersistentMap(
            (*self.shards[:at], {**old, name: value}, *self.shards[at + 1 :]), self.size + (name not in old)
        )

    def drop(self, name: str) -> PersistentMap[V]:
        """Return the map without a name, which need not be in it."""
        at = _shard(name)
        old = self.shards[at]
        if name not in old:
            return self
        left = {other: value for other, value in old.items() if other != name}
        return PersistentMap((*self.shards[:at], left, *self.shards[at + 1 :]), self.size - 1)

    def values(self) -> ValuesView[V]:
        """Return a view of the values, which takes no look-up for each."""
        return _Values(self)

    def items(self) -> ItemsView[str, V]:
        """Return a view of the items, which takes no look-up for each."""
        return _Items(self)

    def __getitem__(self, name: str) -> V:
        return self.shards[_shard(name)][name]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.shards)

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]


class _Values(ValuesView[V]):
    _mapping: PersistentMap[V]

    def __iter__(self) -> Iterator[V]:
        return itertools.chain.from_iterable(shard.values() for shard in self._mapping.shards)


class _Items(ItemsView[str, V]):
    _mapping: PersistentMap[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return itertools.chain.from_iterable(shard.items() for shard in self._mapping.shards)


def _shard(name: str) -> int:
    return zlib.crc32(name.encode()) % SHARDS


@dataclass(frozen=True, slots=True)
class PersistentList(Generic[V]):
    """A list of a fixed length.

    Attributes:
        chunks: Its items, in tuples of `CHUNK`.
    """

    chunks: tuple[tuple[V, ...], ...]

    @classmethod
    def of(cls, items: Iterable[V]) -> PersistentList[V]:
        """Return a list of these items."""
        held = tuple(items)
        return cls(tuple(held[at : at + CHUNK] for at in range(0, len(held), CHUNK)))

    def put(self, k: int, value: V) -> PersistentList[V]:
        """Return the list with item `k` replaced."""
        at, within = divmod(k, CHUNK)
        chunk = self.chunks[at]
        changed = (*chunk[:within], value, *chunk[within + 1 :])
        return PersistentList((*self.chunks[:at], changed, *self.chunks[at + 1 :]))

    def __getitem__(self, k: int) -> V:
        at, within = divmod(k, CHUNK)
        return self.chunks[at][within]

    def __iter__(self) -> Iterator[V]:
        return itertools.chain.from_iterable(self.chunks)


@dataclass(frozen=True, slots=True, eq=False)
class PersistentOrder:
    """A set of keys in ascending order.

    Attributes:
        chunks: Its keys, in tuples of at most twice `CHUNK`, none empty.
        size: Number of keys.
    """

    chunks: tuple[tuple[Key, ...], ...] = ()
    size: int = 0

    @classmethod
    def of(cls, keys: Iterable[Key]) -> PersistentOrder:
        """Return the order of these keys."""
        held = tuple(sorted(keys))
        return cls(tuple(held[at : at + CHUNK] for at in range(0, len(held), CHUNK)), len(held))

    def add(self, key: Key) -> PersistentOrder:
        """Return the order with a key that it does not have."""
        at = self._chunk_of(key)
        chunk = self.chunks[at] if self.chunks else ()
        within = bisect.bisect_left(chunk, key)
        grown = (*chunk[:within], key, *chunk[within:])
        parts = (grown,) if len(grown) <= 2 * CHUNK else (grown[:CHUNK], grown[CHUNK:])
        return PersistentOrder((*self.chunks[:at], *parts, *self.chunks[at + 1 :]), self.size + 1)

    def remove(self, key: Key) -> PersistentOrder:
        """Return the order without a key that it has."""
        at = self._chunk_of(key)
        chunk = self.chunks[at]
        within = bisect.bisect_left(chunk, key)
        left = chunk[:within] + chunk[within + 1 :]
        return PersistentOrder((*self.chunks[:at], *((left,) if left else ()), *self.chunks[at + 1 :]), self.size - 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PersistentOrder) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def _chunk_of(self, key: Key) -> int:
        """Return the number of the chunk that has a key, or that it is added to."""
        return max(0, bisect.bisect_right(self.chunks, key, key=lambda chunk: chunk[0]) - 1)

    def __iter__(self) -> Iterator[Key]:
        return itertools.chain.from_iterable(self.chunks)

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class Ranked(Collection[V]):
    """The last parts of keys, in the order of these."""

    order: PersistentOrder = field(default_factory=PersistentOrder)

    def __iter__(self) -> Iterator[V]:
        return (key[-1] for key in self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, one: object) -> bool:
        return any(one == other for other in self)
