"""Compiled steps are tried where they may be quicker than a plan within the budget."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from idletrain.nn.compiler import Compiler
from idletrain.nn.outofcore.executing import compiled
from idletrain.nn.outofcore.executing.compiled import (
    COMPILER_BYTES,
    LEAST_PART,
    LIBRARY_BYTES,
    CompiledForward,
    CompiledPlan,
    CompiledSearch,
    NotCompiledError,
    parts_to_try,
)
from idletrain.nn.outofcore.executing.compiling import MeasuredPart, Request
from idletrain.nn.outofcore.planning.plan import make_memory_plan
from outofcore.made_up import made_up

MB = 1 << 20
PROFILE = made_up(8, 3)
BUDGET = 100 * MB
PLAN = make_memory_plan(PROFILE, BUDGET)


def search(free_bytes: int = 1 << 40) -> CompiledSearch:
    batch = (torch.ones(3, 2), None)
    return CompiledSearch(nn.Linear(2, 2), functional.cross_entropy, PROFILE, batch, lambda: False, lambda: free_bytes)


@given(st.integers(-(1 << 40), 1 << 40), st.integers(0, 1 << 40))
def test_at_most_two_parts_are_compiled_for_and_none_without_room(room: int, in_core: int) -> None:
    parts = parts_to_try(room, in_core)
    assert bool(parts) == (room > 0)
    assert len(parts) <= 2
    assert all(LEAST_PART <= part <= 1 for part in parts)
    assert list(parts) == sorted(parts, reverse=True)


@given(st.integers(0, 2 * BUDGET), st.floats(0.01, 100))
def test_a_part_is_proposed_if_and_only_if_it_is_quicker_within_the_budget(peak: int, seconds: float) -> None:
    most, own = BUDGET + LIBRARY_BYTES, search()

    def measured_parts(request: Request, _unwanted: object) -> Iterator[MeasuredPart]:
        assert own.running
        yield MeasuredPart(request.parts[0], seconds, peak)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "measured_parts", measured_parts)
        patch.setattr(compiled, "compiler", lambda: Compiler("made up"))
        found = own(PLAN, most)
    assert not own.running
    assert (found is not None) == (seconds < PLAN.seconds and PLAN.footprint(PROFILE).resident_bytes + peak <= BUDGET)
    if found:
        assert isinstance(found, CompiledPlan)
        assert found.peak_bytes <= most
        assert set(found.unit_modes) == {"K"}
        assert found.shapes == (3, 2)


def test_without_a_compiler_nothing_is_compiled_and_the_worker_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with caplog.at_level(logging.WARNING):
        assert search()(PLAN, BUDGET + LIBRARY_BYTES) is None
    (said,) = caplog.messages
    assert said == (
        "memory.compile: /no/such/compiler cannot be run (No such file or directory), so this worker compiles nothing"
    )


def test_where_memory_is_short_no_compiler_is_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "compiler", lambda: Compiler("made up"))
    monkeypatch.setattr(compiled, "measured_parts", None)
    assert search(COMPILER_BYTES)(PLAN, BUDGET + LIBRARY_BYTES) is None
    (said,) = caplog.messages
    assert said.startswith("memory.compile: nothing is compiled, as that may take 1")
    assert said.endswith("MiB and only 1024 are free")


def test_a_batch_of_other_shapes_does_not_go_through_compiled_code() -> None:
    fields = {name: getattr(PLAN, name) for name in PLAN.__slots__}
    forward = CompiledForward(nn.Linear(2, 2), CompiledPlan(**fields, part=0.5, shapes=(3, 2)))
    with pytest.raises(NotCompiledError, match=re.escape("a batch has the shapes (4, 2), not (3, 2) as the first")):
        forward(torch.ones(4, 2))


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled, "compiler", lambda: Compiler("made up"))
    monkeypatch.setattr(compiled, "measured_parts", lambda *_: iter([MeasuredPart(0.5, fault="torch cannot")]))
    with caplog.at_level(logging.WARNING):
        assert search()(PLAN, BUDGET + LIBRARY_BYTES) is None
    assert caplog.messages == ["memory.compile: not taken for this subnet: torch cannot"]
