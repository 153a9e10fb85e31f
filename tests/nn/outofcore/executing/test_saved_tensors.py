"""Test that saved tensors are counted exactly, by storage, and return in time and unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from idletrain.nn.outofcore.executing.disk import DiskCopy, DiskSwap
from idletrain.nn.outofcore.executing.saved_tensors import SMALL_BYTES, SavedTensors
from idletrain.nn.outofcore.planning.profile import Unit
from idletrain.nn.outofcore.planning.simulate import Footprint
from outofcore.networks import ROOMY

SIZE = 1 << 20


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[DiskSwap]:
    disk_swap = DiskSwap(tmp_path, 64 << 20)
    yield disk_swap
    disk_swap.close()


def saved_in(swap: DiskSwap, budget: int = ROOMY) -> SavedTensors:
    units = tuple(Unit(f"u{i}", 1, 1, 1, SIZE, SIZE, SIZE) for i in range(3))
    return SavedTensors(swap, Footprint(units, "SSS", budget, 0, streamed=False), lambda _tensor: None)


def test_one_storage_counts_once_however_often_it_is_saved(swap: DiskSwap) -> None:
    saved = saved_in(swap)
    tensor = torch.randn(SIZE // 4)
    views = (tensor, tensor.view(4, -1), tensor[10:20], tensor.view(4, -1).t())
    handles = [saved.pack(view, 0, swap=False) for view in views]
    assert saved.live_bytes == SIZE
    assert all(torch.equal(saved.unpack(handle), view) for handle, view in zip(handles, views, strict=True))
    while handles:
        assert saved.live_bytes == SIZE
        handles.pop()
    assert saved.live_bytes == 0


def test_what_is_swapped_is_freed_when_room_is_needed_and_comes_back(
    swap: DiskSwap, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_in(swap, budget=2 * SIZE)
    tensor = torch.randn(SIZE // 4)
    expected = tensor.clone()
    handle = saved.pack(tensor, 0, swap=True)
    del tensor
    with monkeypatch.context() as slow:
        slow.setattr(DiskCopy, "written", lambda _: False)  # on a quick disk it is, by now
        saved.make_room(1)
        assert saved.live_bytes == SIZE  # room for one
    saved._settle(0)
    assert saved.live_bytes == 0
    assert torch.equal(saved.unpack(handle), expected)
    assert saved.live_bytes == SIZE
    del handle
    assert (saved.live_bytes, swap.used_bytes) == (0, 0)


def test_a_new_version_of_a_tensor_is_another_one(swap: DiskSwap) -> None:
    saved = saved_in(swap)
    tensor = torch.zeros(SIZE // 4)
    first = saved.pack(tensor, 0, swap=True)
    tensor.add_(1)
    second = saved.pack(tensor, 1, swap=True)
    assert saved.live_bytes == 2 * SIZE
    assert torch.equal(saved.unpack(second), tensor)
    with pytest.raises(Exception, match="changed in place after it was saved"):
        saved.unpack(first)


def test_a_version_is_checked_also_after_the_tensor_has_gone(swap: DiskSwap) -> None:
    saved = saved_in(swap)
    tensor = torch.zeros(SIZE // 4)
    handle = saved.pack(tensor, 0, swap=True)
    saved._settle(0)
    tensor.add_(1)
    with pytest.raises(Exception, match="changed in place after it was saved"):
        saved.unpack(handle)


def test_small_tensors_stay(swap: DiskSwap) -> None:
    saved = saved_in(swap)
    handle = saved.pack(torch.zeros(SMALL_BYTES // 4 - 1), 0, swap=True)
    assert swap.used_bytes == 0
    assert saved.unpack(handle).numel() == SMALL_BYTES // 4 - 1


def test_an_address_that_is_used_again_is_another_tensor(swap: DiskSwap) -> None:
    saved = saved_in(swap)
    handles, sums = [], []
    for i in range(20):
        tensor = torch.full((SIZE // 4,), float(i))
        handles.append(saved.pack(tensor, 0, swap=True))
        sums.append(float(i))
        del tensor
        saved._settle(0)
    assert [saved.unpack(handle)[0].item() for handle in reversed(handles)] == sums[::-1]
