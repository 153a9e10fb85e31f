"""Machines that compute the same bits share a cohort."""

from __future__ import annotations

import pytest
import torch

from idletrain.nn.compiler import compiler, cpu_model
from idletrain.worker.cohort import numeric_cohort


def test_the_cohort_tells_the_processor_and_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = numeric_cohort(torch.device("cpu"))
        torch.set_num_threads(2)
        assert numeric_cohort(torch.device("cpu")) != one
    finally:
        torch.set_num_threads(threads)
    assert cpu_model()
    assert f"/{cpu_model()}/" in one


def test_where_steps_are_compiled_the_cohort_tells_the_compiler_or_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = numeric_cohort(torch.device("cpu"))
    found = compiler()
    assert numeric_cohort(torch.device("cpu"), ["cpu"]) == f"{own}/{found.version or 'no compiler'}"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert numeric_cohort(torch.device("cpu"), ["cpu"]) == f"{own}/no compiler"
    assert numeric_cohort(torch.device("cpu"), ["cuda"]) == own
    assert numeric_cohort(torch.device("cpu")) == own
