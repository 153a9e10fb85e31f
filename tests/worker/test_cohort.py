"""Machines that compute the same bits share a cohort."""

from __future__ import annotations

import torch

from idletrain.worker.cohort import cpu_model, numeric_cohort


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
