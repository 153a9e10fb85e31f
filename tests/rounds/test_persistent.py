"""Containers that never change behave as plain ones, and what was made before stays as it was."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.rounds import persistent
from idletrain.rounds.persistent import PersistentList, PersistentMap, PersistentOrder, replace
from idletrain.rounds.table import Lease

NAMES = st.sampled_from([f"tcp://10.0.0.{n}:1" for n in range(12)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NAMES, st.one_of(st.none(), st.integers()))))
def test_a_map_is_a_dict_whose_former_states_stay(changes: list[tuple[str, int | None]]) -> None:
    expected: dict[str, int] = {}
    held = PersistentMap[int]()
    past: list[tuple[PersistentMap[int], dict[str, int]]] = []
    for name, value in changes:
        past.append((held, dict(expected)))
        if value is None:
            expected.pop(name, None)
            held = held.drop(name)
        else:
            expected[name] = value
            held = held.put(name, value)
    for was, should in [*past, (held, expected)]:
        assert was == should
        assert (len(was), sorted(was.items())) == (len(should), sorted(should.items()))
        assert bool(was) == bool(should)
        assert all(was[name] == value for name, value in should.items())
        assert "another" not in was
        assert was == PersistentMap.of(should)


def test_the_order_of_a_map_is_the_same_in_every_process() -> None:
    code = "from idletrain.rounds.persistent import PersistentMap as M; print(*M.of({f'w{n}': n for n in range(99)}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(seen) == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 700), st.lists(st.tuples(st.integers(0, 10_000), st.integers()), max_size=20))
def test_a_list_is_a_list(size: int, changes: list[tuple[int, int]]) -> None:
    expected: list[Any] = list(range(size))
    held = first = PersistentList.of(expected)
    for place, value in changes:
        expected[place % size] = value
        held = held.put(place % size, value)
    assert list(held) == expected
    assert [held[k] for k in range(size)] == expected
    assert list(first) == list(range(size))
    assert held == PersistentList.of(expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(0, 2000), max_size=300))
def test_an_order_is_a_sorted_set(seed: int, keys: list[int]) -> None:
    expected = {(n, -n) for n in range(0, 1000 * seed, 2)}
    held = PersistentOrder.of(expected)
    for n in keys:
        key = (n, -n)
        held = held.remove(key) if key in expected else held.add(key)
        expected ^= {key}
        assert len(held) == len(expected)
    assert list(held) == sorted(expected)
    assert all(0 < len(chunk) <= 2 * persistent.CHUNK for chunk in held.chunks)


def test_a_replaced_copy_is_that_of_dataclasses() -> None:
    lease = Lease(attempt=3, worker="a", granted_at=1.0)
    copy = replace(lease, worker="b", queued=True)
    assert copy == dataclasses.replace(lease, worker="b", queued=True)
    assert (lease.worker, lease.queued) == ("a", False)
