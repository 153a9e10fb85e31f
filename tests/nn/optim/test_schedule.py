"""Schedules are torch's: the same factors as its classes, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from idletrain.nn.optim.schedule import factor
from idletrain.optimizer_settings import OptimizerSettings

STEPS = 40
LIKE_TORCH: list[tuple[dict[str, Any], Callable[[Any], Any]]] = [
    ({"schedule": "constant"}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ({"schedule": "linear", "end_factor": 0.1}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS)),
    ({"schedule": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
    ({"schedule": "cosine", "end_factor": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.05)),
    ({"schedule": "step", "step_every": 7, "step_factor": 0.3}, lambda o: lr_scheduler.StepLR(o, 7, 0.3)),
    ({"schedule": "one-cycle"}, lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS, cycle_momentum=False)),
]


@pytest.mark.parametrize(("fields", "scheduler"), LIKE_TORCH, ids=[str(fields) for fields, _ in LIKE_TORCH])
def test_a_schedule_is_torchs(fields: dict[str, Any], scheduler: Callable[[Any], Any]) -> None:
    settings = OptimizerSettings.model_validate({"name": "sgd", "lr": 0.5, **fields})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = scheduler(optimizer)
    for step in range(STEPS):
        assert factor(settings, step, STEPS) * 0.5 == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step + 1 < STEPS:
            theirs.step()


def test_a_warm_up_rises_to_the_schedules_beginning_and_the_schedule_has_the_other_steps() -> None:
    settings = OptimizerSettings(name="sgd", lr=1.0, schedule="cosine", warmup_steps=4)
    without = OptimizerSettings(name="sgd", lr=1.0, schedule="cosine")
    assert [factor(settings, step, 24) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert [factor(settings, 4 + k, 24) for k in range(20)] == [factor(without, k, 20) for k in range(20)]


def test_a_function_gets_the_step_and_all_steps() -> None:
    settings = OptimizerSettings(name="sgd", lr=1.0, schedule="m:f", warmup_steps=2)
    seen = [factor(settings, step, 6, lambda step, steps: 10 * step + steps) for step in range(6)]
    assert seen == pytest.approx([4 / 3, 8 / 3, 4, 14, 24, 34])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "step", "one-cycle"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0, 1, 9])
def test_a_factor_is_from_0_to_1_in_runs_of_any_length_and_beyond(schedule: str, steps: int, warmup: int) -> None:
    settings = OptimizerSettings(name="sgd", lr=1.0, schedule=schedule, warmup_steps=warmup, step_every=2)
    for step in range(steps + 5):
        found = factor(settings, step, steps)
        assert math.isfinite(found)
        assert 0 <= found <= 1
