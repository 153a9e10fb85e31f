"""What a local step takes on this machine."""

from __future__ import annotations

from typing import Any

from idletrain.autotune import step_time
from idletrain.job_file import parse_job
from idletrain.nn.prepare import Prepared, from_settings


def prepared(width: int, **training: Any) -> Prepared:
    job = parse_job(
        {
            "name": "t",
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, width, width, 10]}},
            "data": {"name": "digits"},
            "training": {"batch_size": 32, "subnets": 4, **training},
        }
    )
    return from_settings(job.model, job.data, job.training, job.memory)


def test_a_step_of_a_large_network_takes_many_times_one_of_a_small() -> None:
    assert step_time.times_longer(prepared(8192), prepared(16)) > 4


def test_a_step_takes_as_long_as_itself_and_longer_in_two_copies() -> None:
    one, copied = prepared(1024), prepared(1024, copies=2)
    assert 0.6 < step_time.times_longer(one, one) < 1.6
    assert step_time.times_longer(copied, one) > 1.1
