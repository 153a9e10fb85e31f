"""Train one subnet for J local steps of SGD, AdamW or Adagrad (IST, arXiv 1910.02120, algorithm 1).

Weights and optimizer state are views of one flat buffer, which is trained in place and pushed without a copy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.job import OptimizerSettings, TrainingSettings
from idletrain.nn.data.arrays import Samples
from idletrain.nn.ist.randomness import generator, key
from idletrain.nn.ist.subnets import ScaledInputs, Subnet, views
from idletrain.nn.optim.table import StepSettings, kind_of
from idletrain.nn.program import Program

Update = Callable[[int, nn.Parameter, list[Tensor]], None]  # (place, parameter with .grad, its state) -> moved in place


class Planned(Protocol):
    """Runs steps of a module that does not fit into memory as a whole."""

    def step(self, inputs: Tensor, labels: Tensor, *, last: bool) -> Tensor:
        """Do one step on a batch and return the batch's loss `[]`; move each parameter when its gradient is ready.

        Args:
            inputs: The batch's inputs `[B, ...]`.
            labels: The batch's labels `[B, ...]`.
            last: It is the last step of the round.
        """


class BatchOrder:
    """Choose each step's samples: shuffle anew in every epoch, and give the subnets batches in turn.

    All subnets together make one pass over the data in an epoch (as in data parallel training), not one each.
    """

    def __init__(self, seed: int, samples: int, batch_size: int, subnets: int) -> None:
        self._seed, self._samples, self._subnets = seed, samples, subnets
        self._batch_size = min(batch_size, samples)
        self._per_epoch = samples // self._batch_size
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, subnet: int, step: int) -> NDArray[np.int64]:
        """Return the sample numbers `[B]` of a subnet's step; steps count from the start of the run."""
        epoch, slot = divmod(step * self._subnets + subnet, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, generator(self._seed, "order", epoch).permutation(self._samples)
        return self._order[slot * self._batch_size : (slot + 1) * self._batch_size]


class LocalSteps:
    """Train one subnet of one round, step by step.

    Args:
        program: The run's program.
        subnet: The positions of its tensors in the network.
        flat: Its flat buffer, trained in place; or the storage of the parameters that `planned` trains.
        number: The subnet's number.
        round_: The round.
        device: The device to train on; the buffer's if None.
        planned: Makes, from the module and the function that moves a parameter, a runner of steps for a subnet that
            does not fit into memory; None for one that does.
    """

    def __init__(
        self,
        program: Program,
        subnet: Subnet,
        flat: Tensor,
        number: int,
        round_: int,
        device: torch.device | None = None,
        planned: Callable[[nn.Module, Update], Planned] | None = None,
    ) -> None:
        self._training, self._loss = program.training, program.loss
        self._number, self._round, self._device = number, round_, device or flat.device
        tensors = program.layout.tensors
        self.module = assemble(program.module, subnet, flat[: subnet.parameters]).to(self._device)
        self._parameters = list(self.module.parameters())
        self._trained = [i for i, t in enumerate(tensors) if t.trainable]
        _, *state = subnet.slots(flat, len(program.slots), len(program.row_slots))
        self._slots = [list(views(slot, of_slot.shapes)) for of_slot, slot in state]
        shared = [all(positions is None for positions in at) for at in subnet.positions]
        # Where the changes of all subnets are added to a shared parameter, each applies its part of the weight decay.
        part = 1 / program.training.subnets if program.layout.common == "sum" else 1.0
        decays = [program.training.optimizer.weight_decay * (part if is_shared else 1.0) for is_shared in shared]
        self._optimizer = LocalOptimizer(program.training.optimizer, [t.name for t in tensors], decays)
        self._lr = 0.0
        self.planned = planned(self.module, self._update) if planned else None

    def step(self, samples: Samples, order: BatchOrder, step: int) -> Tensor:
        """Do one of this round's J steps and return the loss `[]` of its batch, computed before the step."""
        seed_torch(key(self._training.seed, "step", self._round, self._number, step), self._device)
        since_start = self._round * self._training.local_steps + step
        is_persistent = self._training.optimizer.state == "travel"
        self._optimizer.counted(since_start if is_persistent else step)
        index = order.batch(self._number, since_start)
        inputs, labels = samples.batch(index)
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        self._lr = learning_rate(self._training, since_start)
        if self.planned:
            return self.planned.step(inputs, labels, last=step + 1 == self._training.local_steps)
        self.module.zero_grad(set_to_none=True)
        loss = self._loss(self.module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        moved = [i for i in self._trained if self._parameters[i].grad is not None]
        self._optimizer.move(
            moved, [self._parameters[i] for i in moved], [[slot[i] for i in moved] for slot in self._slots], self._lr
        )
        return loss.detach()

    def _update(self, number: int, parameter: nn.Parameter, state: list[Tensor]) -> None:
        self._optimizer.move([number], [parameter], [[values] for values in state], self._lr)


class LocalOptimizer:
    """Move parameters with the optimizer that the job names; the caller holds the parameters and their state."""

    def __init__(self, settings: OptimizerSettings, names: Sequence[str], decays: Sequence[float]) -> None:
        self._settings, self._kind = settings, kind_of(settings)
        self._names, self._decays = names, decays
        self._steps = [torch.zeros(()) for _ in names]

    def counted(self, steps: int) -> None:
        """Set how many steps the state has seen, for AdamW's bias correction.

        Steps without a gradient count, too, so that an attempt resumed from a checkpoint counts the same.
        """
        for count in self._steps:
            count.fill_(steps)

    @torch.no_grad()
    def move(
        self, numbers: Sequence[int], parameters: Sequence[Tensor], state: Sequence[Sequence[Tensor]], lr: float
    ) -> None:
        """Move parameters by their gradients.

        Args:
            numbers: The parameters' places in the module's order.
            parameters: With a gradient each.
            state: For each state slot, one tensor for each parameter.
            lr: The learning rate.
        """
        dense: dict[float, list[int]] = {}  # by their weight decay
        for at, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
            assert parameter.grad is not None
            decay = self._decays[number]
            if parameter.grad.is_sparse or self._kind.move_dense is None:
                own = [slot[at] for slot in state]
                step = StepSettings(self._settings, lr, decay)
                self._kind.move_rows(self._names[number], parameter, parameter.grad, own, self._steps[number], step)
            else:
                dense.setdefault(decay, []).append(at)
        for decay, places in dense.items():
            moved = [parameters[at] for at in places]
            gradients = [p.grad for p in moved if p.grad is not None]
            slots = [[slot[at] for at in places] for slot in state]
            steps = [self._steps[numbers[at]] for at in places]
            assert self._kind.move_dense is not None
            self._kind.move_dense(moved, gradients, slots, steps, StepSettings(self._settings, lr, decay))


def learning_rate(training: TrainingSettings, step: int) -> float:
    """Return the learning rate of a step; steps count from the start of the run."""
    optimizer = training.optimizer
    if optimizer.schedule == "constant":
        return optimizer.lr
    return optimizer.lr * (1 + math.cos(math.pi * step / (training.rounds * training.local_steps))) / 2


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers (dropout) on one device; `torch.manual_seed` would seed every backend each step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def assemble(meta: nn.Module, subnet: Subnet, values: Tensor) -> nn.Module:
    """Return a copy of a meta module whose parameters are the subnet's, as views of `values` `[P]`."""
    module = copy.deepcopy(meta)
    aliases: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append((owner, name))
    parameters = list(module.named_parameters())
    assert math.prod(values.shape) == subnet.parameters
    for (_, parameter), view in zip(parameters, views(values, subnet.shapes), strict=True):
        real = nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad)
        real.data = view  # so that it has a version counter of its own: views share one
        for owner, name in aliases[id(parameter)]:
            setattr(owner, name, real)
    for name, factor in subnet.input_factors:
        layer = module.get_submodule(name)
        layer.register_forward_pre_hook(ScaledInputs(factor, layer))
    return module.train()
