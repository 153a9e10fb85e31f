"""The table of optimizers: a job can name what it holds, and no more."""

from __future__ import annotations

from typing import get_args

import pytest

from idletrain.job import OptimizerSettings
from idletrain.nn.optim.table import OPTIMIZERS, kind_of


def test_a_job_can_name_every_optimizer_of_the_table_and_no_other() -> None:
    assert set(get_args(OptimizerSettings.model_fields["name"].annotation)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_with_one_number_a_value_come_first(name: str) -> None:
    settings = OptimizerSettings.model_validate({"name": name, "lr": 0.1})
    per_row = [slot.per_row for slot in kind_of(settings).state(settings)]
    assert per_row == sorted(per_row)
