"""Train one subnet for J local steps of the job's optimizer (IST, arXiv 1910.02120, algorithm 1).

Weights and optimizer state are views of one flat buffer, which is trained in place and pushed without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.nn.data import batches
from idletrain.nn.data.arrays import ArraySource, ArrayTree, Samples
from idletrain.nn.data.seeding import seed_everything
from idletrain.nn.ist.modules import copied, in_training, set_buffer, tensor_of
from idletrain.nn.ist.randomness import generator, key
from idletrain.nn.ist.skipping import change_by
from idletrain.nn.ist.subnets import ScaledInputs, Subnet, gather, views
from idletrain.nn.optim import parameter_groups
from idletrain.nn.optim.parameter_groups import ParameterSettings
from idletrain.nn.optim.table import StepSettings, kind_of
from idletrain.nn.precision import Forward, memory_format
from idletrain.nn.program import Program
from idletrain.nn.rate_factors import rate_factors
from idletrain.optimizer_settings import OptimizerSettings

Update = Callable[[int, nn.Parameter, list[Tensor]], None]  # (place, parameter with .grad, its state) -> moved in place


class Planned(Protocol):
    """Runs steps of a module that does not fit into memory as a whole."""

    def step(self, inputs: Any, target: Any, *, last: bool) -> Tensor:
        """Do one step on a batch and return the batch's loss `[]`; move each parameter when its gradient is ready.

        Args:
            inputs: The batch's inputs.
            target: The batch's labels, or the batch itself if it is one by name.
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
        first_step: The steps before it from the start of the run, by which schedules go; the round's if None.
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
        first_step: int | None = None,
    ) -> None:
        self._program, self._training, self._loss = program, program.training, program.training_loss
        self._number, self._round, self._device = number, round_, device or flat.device
        self._phase = program.training.phase(round_)
        self._first_step = self._phase.steps_before(round_) if first_step is None else first_step
        tensors = program.layout.tensors
        self.module = assemble(program.module, subnet, flat[: subnet.parameters]).to(self._device)
        parameters = dict(self.module.named_parameters())
        self._parameters = [parameters[t.name] for t in tensors if not t.buffer]
        self._trained = [i for i, t in enumerate(tensors) if t.trainable]
        values = views(flat[: subnet.parameters], subnet.shapes)
        self._buffers = [(t.name, value) for t, value in zip(tensors, values, strict=True) if t.buffer]
        changing = {t.name for t in tensors if t.buffer} | program.buffers.keys()
        self._constant = [(name, b) for name, b in program.module.named_buffers() if name not in changing]
        _, *state = subnet.slots(flat, len(program.slots), len(program.row_slots))
        self._slots = [list(views(slot, of_slot.shapes)) for of_slot, slot in state]
        shared = [all(positions is None for positions in at) for at in subnet.positions]
        # Where the changes of all subnets are added to a shared parameter, each applies its part of the weight decay.
        part = 1 / self._phase.subnets if program.layout.common == "sum" else 1.0
        optimizer, names = program.training.optimizer, [t.name for t in tensors]
        settings = [
            replace(own, weight_decay=own.weight_decay * part) if is_shared else own
            for own, is_shared in zip(
                parameter_groups.settings_of(program.module, names, optimizer), shared, strict=True
            )
        ]
        factors = rate_factors(
            program.layout,
            subnet,
            parameter_groups.norm_parameters(program.module),
            by_gradient=kind_of(optimizer).by_gradient,
        )
        settings = [own.times(factor) for own, factor in zip(settings, factors, strict=True)]
        self._optimizer = LocalOptimizer(optimizer, names, settings)
        self._factor = 1.0
        self._forward = Forward(
            self.module,
            program.precision,
            compiled=program.training.compile,
            format=memory_format(program.module),
        )
        self.planned = planned(self.module, self._update) if planned else None

    def reads(self, order: BatchOrder, step: int) -> list[tuple[Any, int]]:
        """Return all that the steps from `step` to the round's last read: which samples, and with which seed."""
        return [read for s in range(step, self._phase.local_steps) for read in self._reads_of(order, s)]

    def _reads_of(self, order: BatchOrder, step: int) -> list[tuple[Any, int]]:
        """Return what a step reads: a micro-batch at a time, but of a stream the whole batch."""
        index = order.batch(self._number, self._phase.steps_before(self._round) + step)
        seed = partial(data_seed, self._training.seed, self._round, step, self._number)
        size = None if self.planned else self._program.micro_batch
        if size is None or not isinstance(index, np.ndarray):
            return [(index, seed(0))]
        return [(index[start : start + size], seed(start)) for start in range(0, len(index), size)]

    def step(self, samples: Samples, order: BatchOrder, step: int) -> Tensor:
        """Do one of this round's J steps and return the loss `[]` of its batch, computed before the step."""
        since_start = self._first_step + step
        is_persistent = self._training.optimizer.state == "travel"
        self._optimizer.counted(since_start if is_persistent else step)
        self._factor = self._program.lr_factor(since_start)
        reads = self._reads_of(order, step)
        if self.planned:
            (batch,) = self._micro_batches(samples, reads, step)
            return self.planned.step(*batch, last=step + 1 == self._phase.local_steps)
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._backward(self._micro_batches(samples, reads, step), sum(len(index) for index, _ in reads))
        moved = [i for i in self._trained if self._parameters[i].grad is not None]
        if (most := self._training.optimizer.clip_norm) is not None:
            nn.utils.clip_grad_norm_([self._parameters[i] for i in moved], most)
        self._optimizer.move(
            moved,
            [self._parameters[i] for i in moved],
            [[slot[i] for i in moved] for slot in self._slots],
            self._factor,
        )
        self._store_buffers()
        return loss

    def _micro_batches(
        self, samples: Samples, reads: Sequence[tuple[Any, int]], step: int
    ) -> Iterator[tuple[Any, Any]]:
        """Yield inputs and target of a step's micro-batches; random numbers are seeded for each, and for its step."""
        number = 0
        for index, seed in reads:
            if not isinstance(samples, ArraySource | ArrayTree):  # which draw no random numbers
                seed_everything(seed)
            batch = samples.batch(index)
            whole = len(index)
            size = whole if self.planned else min(whole, self._program.micro_batch or whole)
            for start in range(0, whole, size):
                part = batches.rows_of(batch, start, start + size) if size < whole else batch
                purpose = (self._round, self._number, step, *([number] if number else []))
                seed_step(key(self._training.seed, "step", *purpose), self._device)
                yield batches.moved(part, self._device)
                number += 1

    def _backward(self, micro_batches: Iterator[tuple[Any, Any]], samples: int) -> Tensor:
        """Compute the gradients of the loss of a step's samples, micro-batch by micro-batch; return the loss `[]`.

        Where the loss is a mean, a micro-batch counts by its labels, so that the gradients are those of the whole batch
        but for rounding.
        """
        total, counted = torch.zeros((), device=self._device), 0
        several = (self._program.micro_batch or samples) < samples and not self._program.summed
        for inputs, target in micro_batches:
            count = self._program.label_count(inputs, target) if several else 1
            if count:  # the mean over no label is NaN
                loss = self._loss(self._forward(inputs), target)
                (loss * count if count > 1 else loss).backward()  # type: ignore[no-untyped-call]
                total, counted = total + loss.detach() * count, counted + count
        if several:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(counted)
        return total if self._program.summed else total / counted

    def _store_buffers(self) -> None:
        """Copy the buffers that travel into the flat buffer, and round them to what it holds, as a pull would."""
        for name, kept in self._buffers:
            value = tensor_of(self.module, name)
            if value.shape != kept.shape:
                raise buffer_fault(name, f"its shape became {list(value.shape)}")
            kept.copy_(value.detach())
            if value.dtype != kept.dtype:
                value.detach().copy_(kept)

    def check_buffers(self) -> None:
        """Check that no buffer has changed but those that travel or are estimated.

        Raises:
            JobError: one has.
        """
        for name, began in self._constant:
            value = tensor_of(self.module, name)
            if value.shape != began.shape or not torch.equal(value, began.to(value.device)):
                raise buffer_fault(name, "it changed, though not in the trial before the start")

    def _update(self, number: int, parameter: nn.Parameter, state: list[Tensor]) -> None:
        self._optimizer.move([number], [parameter], [[values] for values in state], self._factor)


class LocalOptimizer:
    """Move parameters with the optimizer that the job names; the caller holds the parameters and their state."""

    def __init__(
        self, optimizer: OptimizerSettings, names: Sequence[str], settings: Sequence[ParameterSettings]
    ) -> None:
        self._optimizer, self._kind = optimizer, kind_of(optimizer)
        self._names, self._settings = names, settings
        self._steps = [torch.zeros(()) for _ in names]

    def counted(self, steps: int) -> None:
        """Set how many steps the state has seen, for AdamW's bias correction.

        Steps without a gradient count, too, so that an attempt resumed from a checkpoint counts the same.
        """
        for count in self._steps:
            count.fill_(steps)

    @torch.no_grad()
    def move(
        self, numbers: Sequence[int], parameters: Sequence[Tensor], state: Sequence[Sequence[Tensor]], factor: float
    ) -> None:
        """Move parameters by their gradients.

        Args:
            numbers: The parameters' places in the module's order.
            parameters: With a gradient each.
            state: For each state slot, one tensor for each parameter.
            factor: What each parameter's learning rate is multiplied by.
        """
        alike: dict[ParameterSettings, list[int]] = {}
        for at, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
            assert parameter.grad is not None
            own = self._settings[number]
            if parameter.grad.is_sparse or self._kind.move_dense is None:
                tensors = [slot[at] for slot in state]
                step = StepSettings(self._optimizer, own.lr * factor, own.weight_decay)
                assert self._kind.move_rows is not None  # `refuse_rows` has said so before the start
                self._kind.move_rows(self._names[number], parameter, parameter.grad, tensors, self._steps[number], step)
            else:
                alike.setdefault(own, []).append(at)
        for own, places in alike.items():
            moved = [parameters[at] for at in places]
            gradients = [p.grad for p in moved if p.grad is not None]
            slots = [[slot[at] for at in places] for slot in state]
            steps = [self._steps[numbers[at]] for at in places]
            assert self._kind.move_dense is not None
            step = StepSettings(self._optimizer, own.lr * factor, own.weight_decay)
            self._kind.move_dense(moved, gradients, slots, steps, step)


def data_seed(seed: int, round_: int, step: int, subnet: int, start: int = 0) -> int:
    """Return the seed with which a subnet's samples of a round's step, from the `start`-th on, are read."""
    return key(seed, "data", round_, subnet, step, *([start] if start else []))


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the random numbers of a step (dropout, mixup): torch's on its device, and all on the CPU."""
    seed_everything(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def buffer_fault(name: str, reason: str) -> JobError:
    """Return the fault of a buffer that training changes in an unexpected way."""
    return JobError(
        f"model: buffer {name} cannot be kept in training ({reason}); name it in training.buffers with mean or sum, "
        "or keep what changes in a buffer of a fixed shape"
    )


def assemble(meta: nn.Module, subnet: Subnet, values: Tensor) -> nn.Module:
    """Return a copy of a meta module whose parameters are the subnet's, as views of `values` `[P]`.

    Buffers of the subnet's layout are copied out of `values`, in their own number format.
    """
    module = copied(meta, _frozen(meta, subnet))
    aliases: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append((owner, name))
    parameters = dict(module.named_parameters())
    assert math.prod(values.shape) == subnet.parameters
    for tensor, view in zip(subnet.layout.tensors, views(values, subnet.shapes), strict=True):
        if tensor.buffer:
            set_buffer(module, tensor.name, view)
            continue
        parameter = parameters[tensor.name]
        real = nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad)
        real.data = view  # so that it has a version counter of its own: views share one
        for owner, name in aliases[id(parameter)]:
            setattr(owner, name, real)
    for name, factor in subnet.input_factors:
        layer = module.get_submodule(name)
        layer.register_forward_pre_hook(ScaledInputs(factor, layer))
    for block, share in subnet.branches:
        change_by(module, block, share)
    return in_training(module)


def _frozen(meta: nn.Module, subnet: Subnet) -> dict[int, Any]:
    """Return the subnet's parameters that do not train, by the `id` of the network's; whole ones are not copied."""
    if subnet.frozen is None:
        return {}
    network = [tensor_of(meta, tensor.name) for tensor in subnet.frozen.layout.tensors]
    if all(tensor.shared for tensor in subnet.frozen.layout.tensors):
        taken: Iterable[Tensor] = network
    else:
        values = torch.empty(subnet.frozen.parameters)
        gather(network, subnet.frozen, values)
        taken = views(values, subnet.frozen.shapes)
    return {
        id(whole): nn.Parameter(value.detach(), requires_grad=False)
        for whole, value in zip(network, taken, strict=True)
    }
