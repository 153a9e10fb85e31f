"""Take a learning rate scheduler of torch as a job's schedule."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import Any

import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings


class SchedulerFactors:
    """The factors of the learning rate that a scheduler of torch gives, step by step; it travels to workers.

    Args:
        scheduler: A fresh scheduler.
        by_epoch: Whether it steps once an epoch, a pass of all subnets together over the data, else once a step.
        every: Epochs or steps between two of its steps.
    """

    def __init__(self, scheduler: Any, *, by_epoch: bool, every: int = 1) -> None:
        self.__module__, self.__qualname__ = type(scheduler).__module__, type(scheduler).__qualname__
        own = scheduler.optimizer
        alone = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        alone.param_groups = [{**group, "params": []} for group in own.param_groups]
        self._scheduler: Any = copy.deepcopy(scheduler, {id(own): alone})
        self._by_epoch, self._every = by_epoch, every
        self._factors = [self._factor()]

    def of_data(self, samples: int, training: TrainingSettings) -> SchedulerFactors:
        """Return the same for data of so many samples, whose epochs are so many local steps.

        Raises:
            JobError: the scheduler ends before the run.
        """
        found = copy.copy(self)
        if self._by_epoch:
            steps = math.ceil(samples / (training.batch_size * training.subnets))
            found._by_epoch, found._every = False, self._every * steps
        held, taken = getattr(self._scheduler, "total_steps", sys.maxsize), math.ceil(training.steps / found._every)
        if taken > held:
            raise JobError(
                f"optimizer: its {self.__qualname__} has {held} steps and the run takes {taken}; "
                f"make it with total_steps={taken}"
            )
        return found

    def __call__(self, step: int, steps: int) -> float:
        """Return the factor at a step of the run."""
        del steps
        at = min(step // self._every, getattr(self._scheduler, "total_steps", sys.maxsize) - 1)  # of a OneCycleLR
        while len(self._factors) <= at:
            with warnings.catch_warnings(action="ignore"):  # of steps without the optimizer's
                self._scheduler.step()
            self._factors.append(self._factor())
        return self._factors[at]

    def _factor(self) -> float:
        """Return the factor now.

        Raises:
            ValueError: parameter groups have factors of their own.
        """
        first, *others = (
            float(group["lr"]) / float(group["initial_lr"]) for group in self._scheduler.optimizer.param_groups
        )
        if not all(math.isclose(first, other) for other in others):
            raise ValueError("its parameter groups have factors of their own")
        return first


def without_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give an optimizer the learning rates that it had before a scheduler was made for it, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
    return optimizer
