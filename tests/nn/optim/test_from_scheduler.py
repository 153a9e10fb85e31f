"""A scheduler of torch gives the factors that it gives torch's own loop, here and on a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.optim.from_scheduler import SchedulerFactors, without_scheduler

STEPS = 30


def made(build: Callable[[Any], LRScheduler]) -> LRScheduler:
    return build(torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.25))


def warmed_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    first, second = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [5])


@pytest.mark.parametrize(
    "build",
    [
        lambda o: lr_scheduler.StepLR(o, 4, 0.5),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 25, 1e-3),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, STEPS),
        warmed_up,
    ],
)
def test_factors_are_those_of_torch(build: Callable[[Any], LRScheduler]) -> None:
    factors = SchedulerFactors(made(build), by_epoch=False)
    sent = cloudpickle.loads(cloudpickle.dumps(factors))
    own = made(build)
    group = own.optimizer.param_groups[0]
    for step in range(STEPS):
        assert factors(step, STEPS) == sent(step, STEPS) == pytest.approx(group["lr"] / group["initial_lr"])
        own.optimizer.step()
        own.step()
    assert factors(2, STEPS) == cloudpickle.loads(cloudpickle.dumps(factors))(2, STEPS)


@pytest.mark.parametrize(("by_epoch", "steps"), [(False, 40), (True, 8)])  # epochs of 5 steps
def test_a_scheduler_that_ends_before_the_run_is_refused_with_the_steps_that_it_needs(
    by_epoch: bool, steps: int
) -> None:
    training = TrainingSettings(batch_size=4, subnets=2, local_steps=20, rounds=2)

    def of_data(total: int) -> SchedulerFactors:
        scheduler = made(lambda o: lr_scheduler.OneCycleLR(o, 1.0, total))
        return SchedulerFactors(scheduler, by_epoch=by_epoch).of_data(40, training)

    said = f"its OneCycleLR has {steps - 1} steps and the run takes {steps}; make it with total_steps={steps}$"
    with pytest.raises(JobError, match=said):
        of_data(steps - 1)
    assert of_data(steps)(39, 40) < 1e-3


def test_an_epoch_is_a_pass_of_all_subnets_together() -> None:
    factors = SchedulerFactors(made(lambda o: lr_scheduler.StepLR(o, 1, 0.5)), by_epoch=True, every=2)
    timed = factors.of_data(101, TrainingSettings(batch_size=5, subnets=4))  # 6 steps of four subnets
    assert [timed(step, 100) for step in (0, 11, 12, 24)] == [1, 1, 0.5, 0.25]


def test_groups_with_factors_of_their_own_are_refused() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [layer.weight]}, {"params": [layer.bias]}], lr=0.1)
    alike = SchedulerFactors(lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), by_epoch=False)
    assert alike(3, 10) == 0.125
    apart = lr_scheduler.LambdaLR(without_scheduler(optimizer), [lambda _step: 1.0, lambda step: 0.5**step])
    factors = SchedulerFactors(apart, by_epoch=False)
    with pytest.raises(ValueError, match="parameter groups have factors of their own"):
        factors(1, 10)


def test_an_optimizer_gets_its_own_learning_rate_back() -> None:
    optimizer = made(lambda o: lr_scheduler.LinearLR(o, 0.1)).optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert without_scheduler(optimizer).param_groups[0]["lr"] == 0.25
