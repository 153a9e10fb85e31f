"""The table of optimizers: a job can name what it holds, and no more."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from idletrain.nn.optim.table import OPTIMIZERS, StepSettings, kind_of
from idletrain.optimizer_settings import OptimizerSettings


def test_a_job_can_name_every_optimizer_of_the_table_and_no_other() -> None:
    assert set(get_args(OptimizerSettings.model_fields["name"].annotation)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_with_one_number_a_value_come_first(name: str) -> None:
    settings = OptimizerSettings.model_validate({"name": name, "lr": 0.1})
    per_row = [slot.per_row for slot in kind_of(settings).state(settings)]
    assert per_row == sorted(per_row)


def test_lion_moves_by_the_sign_of_the_mean_and_decays_apart_from_it() -> None:
    settings = OptimizerSettings(name="lion", lr=0.1, betas=(0.5, 0.75))
    parameter, gradient, mean = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]), torch.tensor([-3.0, 0.0])
    move = kind_of(settings).move_dense
    assert move
    move([parameter], [gradient], [[mean]], [torch.zeros(())], StepSettings(settings, lr=0.1, weight_decay=0.5))
    assert parameter.tolist() == pytest.approx([0.95 + 0.1, 0.95 + 0.1])  # signs of (1 - 3) / 2 and (-1 + 0) / 2
    assert mean.tolist() == pytest.approx([-2.0, -0.25])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_cannot_move_by_rows_says_so(name: str) -> None:
    settings = OptimizerSettings.model_validate({"name": name, "lr": 0.1})
    kind = kind_of(settings)
    assert bool(kind.refuse_rows(settings)) == (kind.move_rows is None)
