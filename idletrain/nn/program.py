"""The program of a run: all that a worker needs to train any of its subnets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.data.arrays import Source
from idletrain.nn.data.batches import fields_of, labels_of, prediction, sample_count, tensors_of
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.schemes import SubnetPlace, SubnetSpec, mask_of, scheme_of, specs_of, survival
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.optim import schedule
from idletrain.nn.optim.schedule import Schedule
from idletrain.nn.optim.table import StateSlot, kind_of
from idletrain.nn.scripted import scripted_layers

Loss = Callable[[Any, Any], Tensor]  # (outputs, target) -> []
IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's ignore_index: neither loss nor accuracy counts it


def cross_entropy(outputs: Any, target: Any, *, smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of logits `[B, ..., C]` against classes `[B, ...]`, whose labels may be smoothed."""
    logits, labels = prediction(outputs).flatten(0, -2), labels_of(target).flatten()
    return functional.cross_entropy(logits, labels, label_smoothing=smoothing)


def bce_with_logits(outputs: Any, target: Any) -> Tensor:
    """Return the binary cross entropy of logits against labels in [0, 1] of the same shape, also as integers."""
    logits = prediction(outputs)
    return functional.binary_cross_entropy_with_logits(logits, labels_of(target).to(logits.dtype))


def mse(outputs: Any, target: Any) -> Tensor:
    """Return the mean squared difference of outputs and labels of the same shape."""
    values = prediction(outputs)
    return functional.mse_loss(values, labels_of(target).to(values.dtype))


def model_loss(outputs: Any, target: Any) -> Tensor:
    """Return the loss that the model computes itself: `outputs.loss`, `outputs["loss"]`, or else the only single number
    among its outputs, as in `(logits, loss)`.

    Raises:
        ValueError: there is none.
    """
    del target  # the module has had the labels with its inputs
    loss: Tensor | None = (fields_of(outputs) or {}).get("loss", getattr(outputs, "loss", None))
    if loss is None and len(numbers := [part for part in tensors_of(outputs) if not part.ndim]) == 1:
        loss = numbers[0]
    if loss is None:
        raise ValueError("its outputs have no loss; give labels by the name that its forward takes, or another loss")
    return loss


def sampled_softmax(outputs: Any, labels: Any) -> Tensor:
    """Return the loss of a network that ends in `idletrain.nn.wide.SparseLinear`, over the batch's active labels."""
    loss: Tensor = outputs.loss(labels)
    return loss


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "bce_with_logits": bce_with_logits,
    "mse": mse,
    "sampled_softmax": sampled_softmax,
    "model": model_loss,
}


def default_loss(inputs: Any, outputs: Any) -> str:
    """Return the name of the loss of a job that names none: the model's own if it computes one from a batch by name."""
    own = fields_of(inputs) is not None and (fields_of(outputs) or {}).get("loss", getattr(outputs, "loss", None))
    return "model" if isinstance(own, Tensor) else "cross_entropy"


@dataclass(frozen=True)
class Program:
    """Everything that training a subnet needs; sent once to every worker.

    Attributes:
        module: The network on the meta device; BatchNorm uses batch statistics.
        layout: The groups that its parameters are cut by.
        source: The training data.
        loss: `(outputs, target) -> scalar`; the target is the labels, or the batch itself if it is one by name. That
            of evaluations.
        training: Method, steps, optimizer and seed.
        memory: Settings for a subnet that is too large for a worker.
        output: The name of its `SparseLinear`, if it ends in one, else None.
        buffers: How each buffer that training changes goes from round to round: `mean` or `sum` if its values travel
            with the parameters, `estimate` if it is estimated on the assembled network.
        schedule: The function that the job names as its schedule, if it names one.
        micro_batch: Samples that go through the module at a time; None for all of a step's.
        summed: Whether the loss of micro-batches is a sum over samples, not a mean.
        precision: What a step computes in.
        joined: Whether rows of a batch's parts are not its samples (see `batches.is_joined`).
    """

    module: nn.Module
    layout: Layout
    source: Source
    loss: Loss
    training: TrainingSettings
    memory: MemorySettings = MemorySettings()
    output: str | None = None
    buffers: Mapping[str, str] = field(default_factory=dict)
    schedule: Schedule | None = None
    micro_batch: int | None = None
    summed: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    joined: bool = False

    @property
    def parts(self) -> dict[str, Any]:
        """What in the program is the user's own, by the name by which the user knows it."""
        return {
            "model": self.module,
            "data.train": self.source,
            "training.loss": self.loss,
            "training.optimizer.schedule": self.schedule,
        }

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from the start of the run."""
        return schedule.factor(self.training.optimizer, step, self._steps, self.schedule)

    @functools.cached_property
    def _steps(self) -> int:
        return self.training.steps

    def local_steps(self, round_: int) -> int:
        """Return how many steps each subnet takes in a round."""
        return self.training.phase(round_).local_steps

    def steps_before(self, round_: int) -> int:
        """Return the steps that each subnet takes before a round."""
        return self.training.phase(round_).steps_before(round_)

    @property
    def training_loss(self) -> Loss:
        """Return the loss that steps are taken by, with smoothed labels if the job says so."""
        smoothing = self.training.label_smoothing
        return functools.partial(cross_entropy, smoothing=smoothing) if smoothing else self.loss

    def label_count(self, inputs: Any, target: Any) -> int:
        """Return how many labels the mean of the loss is taken over; samples where that is not known."""
        labels = labels_of(target)
        ignores = self.loss in (cross_entropy, model_loss, functional.cross_entropy)
        if ignores and isinstance(labels, Tensor) and labels.dtype == torch.int64:
            return int((labels != IGNORED_LABEL).sum())
        return sample_count(inputs, target)

    def specs(self, shares: Sequence[float], copies: int) -> tuple[SubnetSpec, ...]:
        """Return the specs of a round whose subnets have these shares, and each neuron is in `copies` of them."""
        return specs_of(self.layout, shares, copies)

    def subnets(self, round_: int, specs: Sequence[SubnetSpec]) -> list[Subnet]:
        """Return every subnet of a round, in the order of their specs."""
        masks = scheme_of(specs).masks(self.training.seed, round_, self.layout, specs)
        shared = survival(specs[0].holders, len(specs)), specs[0].sharing
        return [cut(self.layout, mask, *shared) for mask in masks]

    def places(self, specs: Sequence[SubnetSpec]) -> list[SubnetPlace]:
        """Return the place of every subnet of a round, which is sent with its lease."""
        return scheme_of(specs).places(self.layout.sizes, specs)

    def subnet(self, round_: int, place: SubnetPlace) -> Subnet:
        """Return one subnet of a round from its place, without drawing the others; it trains, and is not committed."""
        mask = mask_of(self.training.seed, round_, self.layout, place)
        return cut(self.layout, mask, survival(place.holders, place.subnets))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of a flat buffer's first slots: the values, then the optimizer state with one number for each value."""
        return ("value", *(slot.name for slot in self._state if not slot.per_row))

    @property
    def row_slots(self) -> tuple[str, ...]:
        """Names of the slots after `slots`: state with one number for each row (a tensor's first dimension)."""
        return tuple(slot.name for slot in self._state if slot.per_row)

    @property
    def _state(self) -> tuple[StateSlot, ...]:
        optimizer = self.training.optimizer
        return kind_of(optimizer).state(optimizer)

    @property
    def persistent_slots(self) -> tuple[int, int]:
        """Return the numbers of slots and row slots that go from round to round; the others start at zero."""
        return (len(self.slots), len(self.row_slots)) if self.training.optimizer.state == "travel" else (1, 0)

    @property
    def powers(self) -> tuple[int, ...]:
        """Return, for each persistent slot, the power of a subnet's factors that multiplies it (see `StateSlot`)."""
        power_of = {"value": 1, **{slot.name: slot.power for slot in self._state}}
        slots, row_slots = self.persistent_slots
        return tuple(power_of[name] for name in (*self.slots[:slots], *self.row_slots[:row_slots]))

    @property
    def output_at(self) -> int:
        """Return the place of the very wide output's weight among the network's tensors."""
        return [tensor.name for tensor in self.layout.tensors].index(f"{self.output}.weight")

    @property
    def out_of_core(self) -> str:
        """Return the job's `memory.out_of_core`, or `never` where a step is no plain one, if rows are sparse, if the
        exchange is coded, if parameters do not train, which workers hold already, if buffers travel, which
        recomputation would change twice, or if batches have other numbers of rows each time.

        A step is no plain one if all gradients are needed at once, or if it is taken in micro-batches, in bfloat16 or
        in compiled code, torch.jit's too.
        """
        training = self.training
        is_plain = not (
            training.optimizer.clip_norm
            or self.micro_batch
            or self.precision == "bfloat16"
            or training.compile
            or scripted_layers(self.module)
        )
        has_buffers = any(tensor.buffer for tensor in self.layout.tensors)
        special = self.output or self.row_slots or self.joined or training.exchange.coded
        in_core = special or has_buffers or self.layout.frozen or self.layout.skippable or not is_plain
        return "never" if in_core else self.memory.out_of_core

    @property
    def compiled_on(self) -> tuple[str, ...]:
        """Return the kinds of devices on which workers may compile steps, whose bits are others."""
        if self.training.compile:
            return "cpu", "cuda"
        return ("cpu",) if self.memory.compile == "auto" and self.out_of_core != "never" else ()

    def buffer_size(self, subnet: Subnet, *, persistent: bool) -> int:
        """Return the numbers in a subnet's flat buffer: the persistent slots' alone, or all of training's."""
        slots, row_slots = self.persistent_slots if persistent else (len(self.slots), len(self.row_slots))
        return slots * subnet.parameters + row_slots * subnet.by_row.parameters
