"""Test the memory that the kernel counts."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from idletrain.nn.outofcore.executing import resident
from idletrain.nn.outofcore.executing.measure import measure_units
from idletrain.nn.outofcore.executing.resident import ResidentPeak, give_back_pages, release_freed_memory
from idletrain.nn.units import pieces_of

MIB = 1 << 20


def _resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture(autouse=True)
def notify() -> None:
    try:
        resident.RESET.write_text("5")
    except OSError:
        pytest.skip("this kernel does not reset a process' peak")


def test_a_peak_is_seen_though_it_is_over() -> None:
    release_freed_memory()
    peak = ResidentPeak()
    torch.ones(16 * MIB)
    assert 60 * MIB < peak.bytes < 80 * MIB  # the kernel counts in batches of pages
    again = ResidentPeak()
    assert again.bytes < 16 * MIB


def test_free_pages_between_small_blocks_are_given_back() -> None:
    release_freed_memory()
    blocks = [torch.ones(4096) for _ in range(4096)]  # of 16 KiB each
    held = blocks[::8]
    del blocks
    before = _resident()
    give_back_pages()
    assert before - _resident() > 40 * MIB
    assert len(held) == 512


def test_freed_blocks_are_given_back() -> None:
    release_freed_memory()
    held = [torch.ones(MIB // 16) for _ in range(256)]  # of 256 KiB each
    peak = ResidentPeak()
    del held
    again = [torch.ones(MIB // 16) for _ in range(256)]
    assert peak.bytes < 16 * MIB  # in the place of those that were freed
    assert len(again) == 256


def test_where_the_kernel_does_not_tell_nothing_is_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident, "RESET", tmp_path / "nowhere" / "clear_refs")
    peak = ResidentPeak()
    torch.ones(4 * MIB)
    assert peak.bytes == 0


def test_a_convolution_s_own_copies_are_seen_if_asked() -> None:
    module = nn.Sequential(nn.Conv2d(96, 192, 1, 2))
    x = torch.randn(12, 96, 32, 32)

    def backward(by_kernel: bool) -> int:
        _, (unit, _) = measure_units(module, pieces_of(module), x, lambda out: out.square().mean(), by_kernel=by_kernel)
        return unit.backward_bytes

    assert backward(by_kernel=True) >= backward(by_kernel=False)
    assert backward(by_kernel=False) == backward(by_kernel=False)
