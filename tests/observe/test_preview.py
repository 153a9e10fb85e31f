"""`idletrain plan`, before anything runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from idletrain.errors import RunError
from idletrain.job import load_job, parse_job
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.observe.preview import preview

DIGITS = load_job(Path(__file__).parents[2] / "workflows" / "digits.yaml")


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return from_settings(DIGITS.model, DIGITS.data, DIGITS.training)


def shown(prepared: Prepared, memory_bytes: int) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(preview(DIGITS, prepared, memory_bytes))
    return out.getvalue()


def test_the_digits_job_is_four_equal_subnets_that_cover_the_network(prepared: Prepared) -> None:
    text = shown(prepared, 1 << 30)
    assert "digits: 85,514 parameters, ist, 40 x 20 steps" in text
    assert "covers 100% of the neurons" in text
    assert text.count("25.0%") == 4
    assert "64 MiB" not in text
    assert text.count(" of 0.") + text.count(" of 1.0 GiB") + text.count("MiB of") >= 4


def test_groups_are_listed_with_the_tensors_that_they_cut(prepared: Prepared) -> None:
    rows = [line for line in shown(prepared, 1 << 30).splitlines() if ".weight" in line]
    assert [row.count(".weight") for row in rows] == [3, 3]
    assert all("256" in row for row in rows)


def test_workers_too_small_for_any_subnet_are_refused(prepared: Prepared) -> None:
    with pytest.raises(RunError, match="narrowest subnet needs"):
        preview(DIGITS, prepared, 1 << 20)


def test_a_subnet_that_goes_out_of_core_is_shown_with_its_plan() -> None:
    job = parse_job(
        {
            **DIGITS.model_dump(mode="json"),
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 256, 256, 10]}},
            "memory": {"out_of_core": "always"},
        }
    )
    prepared = from_settings(job.model, job.data, job.training, job.memory)
    out = io.StringIO()
    Console(file=out, width=160).print(preview(job, prepared, 1 << 30))
    text = out.getvalue()
    assert text.count("out of core") >= 4
    for words in ("2-4", "recompute all", "compute f", "one step:", "micro-batches: not possible"):
        assert words in text
