"""Compute what the learning rate is multiplied by at each step of a run. Knows no tensors.

Steps count from the start of the run: J in each round, the same for all subnets.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from idletrain.optimizer_settings import OptimizerSettings

Schedule = Callable[[int, int], float]  # (step, steps of the run) -> factor of the learning rate
# torch.optim.lr_scheduler.OneCycleLR's defaults
RISING = 0.3  # the part of the steps in which the learning rate rises
FIRST_FACTOR = 1 / 25
LAST_FACTOR = FIRST_FACTOR / 1e4


def factor(settings: OptimizerSettings, step: int, steps: int, function: Schedule | None = None) -> float:
    """Return the factor of the learning rate at a step by the job's learning-rate schedule.

    Args:
        settings: The job's optimizer.
        step: The step, from 0.
        steps: Steps of the whole run.
        function: The schedule, if the job names a function.
    """
    after, rest = max(0, step - settings.warmup_steps), max(1, steps - settings.warmup_steps)
    value = float(function(after, rest)) if function else _named(settings, after, rest)
    if step < settings.warmup_steps:
        value *= (step + 1) / (settings.warmup_steps + 1)  # not 0 at the first step, which would be lost
    return value


def _named(settings: OptimizerSettings, step: int, steps: int) -> float:
    if settings.schedule == "step":
        assert settings.step_every  # checked with the job
        return settings.step_factor ** (step // settings.step_every)
    if settings.schedule == "one-cycle":
        return _one_cycle(step, steps)
    done = min(1.0, step / steps)
    if settings.schedule == "linear":
        return 1 - (1 - settings.end_factor) * done
    if settings.schedule == "cosine":
        return settings.end_factor + (1 - settings.end_factor) * (1 + math.cos(math.pi * done)) / 2
    return 1.0


def _one_cycle(step: int, steps: int) -> float:
    """Return the factor of the 1cycle policy with two phases of cosines, as torch's OneCycleLR."""
    peak, last = RISING * steps - 1, steps - 1
    if step <= peak:
        return _between(FIRST_FACTOR, 1.0, step / peak)
    return _between(1.0, LAST_FACTOR, min(1.0, (step - peak) / max(1.0, last - peak)))


def _between(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))
