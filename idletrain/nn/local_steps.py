"""J steps of plain SGD (or AdamW) on one subnet, alone (IST, arXiv 1910.02120, algorithm 1).

Weights and optimizer state are views of one flat buffer, so what is pulled is trained in place and pushed as it is.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.nn.data import Samples
from idletrain.nn.program import Program
from idletrain.nn.randomness import generator, key
from idletrain.nn.subnets import Subnet, views


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
    """

    def __init__(self, program: Program, subnet: Subnet, flat: Tensor, number: int, round_: int) -> None:
        self._training, self._loss = program.training, program.loss
        self._number, self._round, self._device = number, round_, flat.device
        self.flat = flat
        self.module = assemble(program.module, subnet, flat[: subnet.parameters]).to(flat.device)
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(program, trainable)
        self._bind_state(program, subnet)

    def step(self, samples: Samples, order: BatchOrder, step: int) -> None:
        """Do step `step` of this round's J."""
        seed_torch(key(self._training.seed, "step", self._round, self._number, step), self._device)
        index = order.batch(self._number, self._round * self._training.local_steps + step)
        inputs, labels = samples.batch(index)
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(self.module(inputs.to(self._device)), labels.to(self._device)).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def resume_at(self, step: int) -> None:
        """Tell AdamW's bias correction how many steps its moments have seen."""
        travels = self._training.optimizer.state == "travel"
        seen = step + travels * self._round * self._training.local_steps
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(seen)

    def _bind_state(self, program: Program, subnet: Subnet) -> None:
        """Put the optimizer's state into the flat buffer's later slots."""
        parameters = dict(self.module.named_parameters())
        for slot, name in enumerate(program.slots[1:], start=1):
            part = self.flat[slot * subnet.parameters : (slot + 1) * subnet.parameters]
            for tensor, view in zip(program.layout.tensors, views(part, subnet.shapes), strict=True):
                if tensor.trainable:
                    state = self._optimizer.state[parameters[tensor.name]]
                    state[name] = view
                    if self._training.optimizer.name == "adamw":
                        state.setdefault("step", torch.zeros(()))


def make_optimizer(program: Program, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The local optimizer that the job names."""
    asked = program.training.optimizer
    if asked.name == "adamw":
        return torch.optim.AdamW(parameters, lr=asked.lr, betas=asked.betas, weight_decay=asked.weight_decay)
    return torch.optim.SGD(parameters, lr=asked.lr, momentum=asked.momentum, weight_decay=asked.weight_decay)


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
