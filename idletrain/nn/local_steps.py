"""J steps of plain SGD (or AdamW) on one subnet, alone (IST, arXiv 1910.02120, algorithm 1).

Weights and optimizer state are views of one flat buffer, so what is pulled is trained in place and pushed as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from idletrain.job import TrainingSettings
from idletrain.nn.data import Samples
from idletrain.nn.outofcore.trainer import PlannedSteps
from idletrain.nn.program import Program
from idletrain.nn.randomness import generator, key
from idletrain.nn.subnets import Subnet, views

ADAMW_EPS = 1e-8  # torch.optim.AdamW's default


class BatchOrder:
    """Which samples each step takes: every epoch is a new order, dealt out to the subnets in turn.

    One pass over the data is shared by all subnets (as data parallel counts it), not made by each.
    """

    def __init__(self, seed: int, samples: int, batch_size: int, subnets: int) -> None:
        self._seed, self._samples, self._subnets = seed, samples, subnets
        self._batch_size = min(batch_size, samples)
        self._per_epoch = samples // self._batch_size
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, subnet: int, step: int) -> NDArray[np.int64]:
        """Sample numbers `[B]` of a subnet's step, counted from the start of the run."""
        epoch, slot = divmod(step * self._subnets + subnet, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, generator(self._seed, "order", epoch).permutation(self._samples)
        return self._order[slot * self._batch_size : (slot + 1) * self._batch_size]


class LocalSteps:
    """One subnet of one round, being trained.

    Args:
        program: The run's program.
        subnet: Where its tensors lie.
        flat: `[slots * P]`, on the device to train on; trained in place.
        number: The subnet's number.
        round_: The round.
        planned: What runs the steps by a plan, when the subnet does not fit; made from the module.
    """

    def __init__(
        self,
        program: Program,
        subnet: Subnet,
        flat: Tensor,
        number: int,
        round_: int,
        planned: Callable[[nn.Module], PlannedSteps] | None = None,
    ) -> None:
        self._training, self._loss = program.training, program.loss
        self._number, self._round, self._device = number, round_, flat.device
        self.flat = flat
        self.module = assemble(program.module, subnet, flat[: subnet.parameters]).to(flat.device)
        self._optimizer = LocalOptimizer(program, subnet, flat, self.module)
        self.planned = planned(self.module) if planned else None

    def step(self, samples: Samples, order: BatchOrder, step: int) -> None:
        """Do step `step` of this round's J."""
        seed_torch(key(self._training.seed, "step", self._round, self._number, step), self._device)
        since_start = self._round * self._training.local_steps + step
        index = order.batch(self._number, since_start)
        inputs, labels = samples.batch(index)
        self.module.zero_grad(set_to_none=True)
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        if self.planned:
            self.planned.backward(inputs, labels)
        else:
            self._loss(self.module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(learning_rate(self._training, since_start))

    def resume_at(self, step: int) -> None:
        """Tell AdamW's bias correction how many steps its moments have seen."""
        travels = self._training.optimizer.state == "travel"
        seen = step + travels * self._round * self._training.local_steps
        self._optimizer.seen(seen)


class LocalOptimizer:
    """The local optimizer that the job names; its state is the flat buffer's later slots.

    Made of torch's optimizer functions: the first `torch.optim.SGD` of a process imports torch._dynamo, which takes
    a worker 1.4 s on an idle core before its first step, at every replacement of a node.
    """

    def __init__(self, program: Program, subnet: Subnet, flat: Tensor, module: nn.Module) -> None:
        self._asked = program.training.optimizer
        tensors, P = program.layout.tensors, subnet.parameters
        slots = [list(views(flat[s * P : (s + 1) * P], subnet.shapes)) for s in range(1, len(program.slots))]
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._slots = [[view for t, view in zip(tensors, slot, strict=True) if t.trainable] for slot in slots]
        self._steps = [torch.zeros(()) for _ in self._parameters]

    def seen(self, steps: int) -> None:
        """Say how many steps the state has seen."""
        for count in self._steps:
            count.fill_(steps)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient."""
        asked = self._asked
        having = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        parameters: list[Tensor] = [self._parameters[i] for i in having]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [[slot[i] for i in having] for slot in self._slots]
        if asked.name == "adamw":
            means, squares = state
            adamw(
                parameters,
                gradients,
                means,
                squares,
                [],
                [self._steps[i] for i in having],
                amsgrad=False,
                beta1=asked.betas[0],
                beta2=asked.betas[1],
                lr=lr,
                weight_decay=asked.weight_decay,
                eps=ADAMW_EPS,
                maximize=False,
            )
        else:
            sgd(
                parameters,
                gradients,
                list(state[0]) if state else [None] * len(having),
                weight_decay=asked.weight_decay,
                momentum=asked.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )


def learning_rate(training: TrainingSettings, step: int) -> float:
    """The learning rate of a step, counted from the start of the run."""
    optimizer = training.optimizer
    if optimizer.schedule == "constant":
        return optimizer.lr
    return optimizer.lr * (1 + math.cos(math.pi * step / (training.rounds * training.local_steps))) / 2


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed dropout and its like on one device (`torch.manual_seed` visits every backend, at every step)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def assemble(meta: nn.Module, subnet: Subnet, values: Tensor) -> nn.Module:
    """The meta module with the subnet's tensors, as views of `values` `[P]`, for parameters."""
    module = copy.deepcopy(meta)
    aliases: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append((owner, name))
    parameters = list(module.named_parameters())
    assert math.prod(values.shape) == subnet.parameters
    for (_, parameter), view in zip(parameters, views(values, subnet.shapes), strict=True):
        real = nn.Parameter(view, requires_grad=parameter.requires_grad)
        for owner, name in aliases[id(parameter)]:
            setattr(owner, name, real)
    return module.train()
