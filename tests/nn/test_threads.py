"""Computing with one thread, for a while."""

from __future__ import annotations

import pytest
import torch

from idletrain.nn.threads import one_thread


def test_one_thread_computes_within_and_as_many_as_before_behind_also_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
