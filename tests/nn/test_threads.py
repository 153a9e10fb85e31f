"""Computing with one thread, for a while."""

from __future__ import annotations

import os

import pytest
import torch

from idletrain.nn.threads import as_environment_says, one_thread


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


@pytest.mark.parametrize(("variable", "threads"), [("", len(os.sched_getaffinity(0))), ("1", 1)])
def test_a_fork_of_a_warm_parent_computes_with_all_cores_unless_the_environment_says_otherwise(
    variable: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    with one_thread():
        as_environment_says()
        assert torch.get_num_threads() == threads
