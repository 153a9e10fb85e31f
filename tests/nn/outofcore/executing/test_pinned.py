"""Test swapping a GPU's tensors to pinned memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from idletrain.nn.outofcore.executing.disk import ScratchError
from outofcore.networks import Case, plans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
MIB = 1 << 20


def pinned(size: int) -> Any:
    from idletrain.nn.outofcore.executing.pinned import PinnedSwap

    return PinnedSwap(torch.device("cuda", 0), size)


def test_a_storage_comes_back_as_it_went_and_the_arena_is_bounded() -> None:
    swap = pinned(8 * MIB)
    tensor = torch.randn(MIB, device="cuda")
    expected = tensor.clone()
    copied = swap.put(tensor.untyped_storage())
    copied.wait_written()
    tensor.zero_()
    copied.fetch()
    assert torch.equal(torch.empty(0, device="cuda").set_(copied.fetched()), expected)
    with pytest.raises(ScratchError, match="pinned memory: 4 of 8 MiB are free"):
        swap.put(torch.zeros(2 * MIB, device="cuda").untyped_storage())
    copied.drop()
    assert swap.used_bytes == 0
    assert swap.speed().write_bytes_per_second > 1e8
    swap.close()


@pytest.mark.parametrize("name", ["mlp", "vgg", "transformer"])
def test_every_plan_has_the_bits_of_a_step_in_core(name: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    case, swap = Case(name, "cuda"), pinned(256 * MIB)
    for modes in plans(case, 6):
        module, _, value = case.run(modes, swap)
        torch.cuda.synchronize()
        assert case.differences(module, value) == [], modes
        assert swap.used_bytes == 0
    torch.use_deterministic_algorithms(False)
    swap.close()


def test_swapping_takes_less_of_the_gpu() -> None:
    case, swap = Case("transformer", "cuda"), pinned(256 * MIB)
    peaks = []
    for modes in ("K" * len(case.units), "S" * (len(case.units) - 1) + "K"):
        copy.deepcopy(case.module)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        budget = 1 << 40 if modes[0] == "K" else 1
        case.run(modes, swap, budget)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]
    swap.close()
