"""Computing with one thread, for a while."""

from __future__ import annotations

import psutil
import pytest
import torch

from idletrain.nn.threads import one_thread, use_threads_of_environment


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


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 0),
    ],
)
def test_a_fork_computes_with_as_many_threads_as_its_environment_says_or_else_with_all_cores(
    variables: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with one_thread():
        use_threads_of_environment()
        cores = min(psutil.cpu_count(logical=False), len(psutil.Process().cpu_affinity()))
        assert torch.get_num_threads() == (threads or cores)
