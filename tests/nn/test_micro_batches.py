"""Micro-batches: how many samples a budget holds, and networks and losses that can take a batch in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import flowers
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.memory import subnet_need
from idletrain.nn.models import mlp
from idletrain.nn.prepare import Prepared, named_loss, prepare
from idletrain.quantities import steady

BATCH = 16384  # whose activations outweigh the steps in which memory is rounded
MANY = flowers(BATCH, 6, 3)


def fitting(budget: int, size: int | str | None = "auto", mode: str = "auto") -> Prepared:
    training = TrainingSettings(subnets=2, batch_size=BATCH, micro_batch=size)
    loss, memory = named_loss("cross_entropy"), MemorySettings(budget=budget, out_of_core=mode)
    return prepare(mlp((6, 64, 64, 3), None), MANY, None, loss, training, memory=memory)


@pytest.mark.parametrize("asked", ["auto", None])
def test_a_micro_batch_is_the_largest_half_of_halves_that_fits_and_follows_from_the_job(asked: str | None) -> None:
    sizes = [BATCH, BATCH // 2, BATCH // 4]
    needs = [subnet_need(fitting(1 << 30, size).program)(0.5) for size in sizes]
    assert needs == sorted(needs, reverse=True)
    for size, need in zip(sizes, needs, strict=True):
        budget = next(b for b in range(need, 2 * need, 1 << 16) if steady(b) >= need)
        program = fitting(budget, asked).program
        assert program.micro_batch == (size if size < BATCH else None)
        assert subnet_need(program)(0.5) == need
        assert program.out_of_core == ("auto" if size == BATCH else "never")
        less = next(b for b in range(budget, 0, -(1 << 16)) if steady(b) < need)
        assert (fitting(less, asked).program.micro_batch or BATCH) <= size // 2


def test_a_budget_for_not_even_one_sample_is_told() -> None:
    with pytest.raises(
        JobError, match=r"training\.micro_batch: a subnet and one sample need 48 MiB, and memory\.budget"
    ):
        fitting(1 << 20)


def test_micro_batches_that_nobody_asked_for_are_told_and_can_be_refused() -> None:
    half = subnet_need(fitting(1 << 30, BATCH // 2).program)(0.5)
    budget = next(b for b in range(half, 2 * half, 1 << 16) if steady(b) >= half)
    note = f"training.micro_batch: {BATCH // 2}, as memory.budget does not hold a step; {BATCH} is all at once"
    assert fitting(budget, None).notes == (note,)
    for size, mode in ((BATCH, "auto"), (None, "never")):
        refused = fitting(budget, size, mode)
        assert refused.program.micro_batch is None
        assert refused.notes == ()


def test_few_samples_at_a_time_are_not_taken_unless_the_job_says_so() -> None:
    def wide(budget: int, size: str | int | None) -> Prepared:
        training = TrainingSettings(method="local-sgd", subnets=1, batch_size=1024, micro_batch=size)
        memory, loss = MemorySettings(budget=budget), named_loss("cross_entropy")
        return prepare(mlp((6, 8192, 3), None), MANY, None, loss, training, memory=memory)

    one, many = (subnet_need(wide(1 << 30, size).program)(1.0) for size in (1, 64))
    budget = next(b for b in range(one, 2 * one, 1 << 16) if steady(b) >= one)
    assert steady(budget) < many
    asked, chosen = wide(budget, "auto"), wide(budget, None)
    assert asked.program.micro_batch in range(1, 64)
    assert chosen.program.micro_batch is None
    assert chosen.program.out_of_core == "auto"
    assert "none, though memory.budget does not hold a step: it does not hold a step of 64 samples" in chosen.notes[0]


# --- networks and losses that can, and that cannot --------------------------------------------------------------------


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OwnDropout(nn.Module):
    """Drops values without a layer that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training)


class Half(nn.Sequential):
    """Computes in bfloat16 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


def contrastive(outputs: Tensor, labels: Tensor) -> Tensor:
    alike = functional.normalize(outputs) @ functional.normalize(outputs).T
    return functional.mse_loss(alike, (labels[:, None] == labels[None]).float())


def in_parts(layer: nn.Module | None, loss: Any, **training: Any) -> Prepared:
    """A network with this layer whose steps of 16,384 samples the budget does not hold."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), *([layer] if layer else []), nn.Linear(64, 3))
    settings = TrainingSettings(method="local-sgd", subnets=1, batch_size=BATCH, **training)
    return prepare(module, MANY, None, loss, settings, memory=MemorySettings(budget=68 << 20))


@pytest.mark.parametrize(
    ("layer", "loss", "training", "taken", "sums"),
    [
        (None, "cross_entropy", {}, True, False),
        (nn.Dropout(0.5), "cross_entropy", {"label_smoothing": 0.1}, True, False),
        (nn.Dropout(0.5), functional.cross_entropy, {}, True, False),
        (OwnDropout(), "cross_entropy", {}, False, False),
        (nn.Sequential(nn.Dropout(0.1), Centred()), "cross_entropy", {}, False, False),
        (None, summed, {}, False, False),  # it may ignore labels
        (None, contrastive, {}, False, False),
        (Centred(), "cross_entropy", {}, False, False),
        (nn.BatchNorm1d(64), "cross_entropy", {}, False, False),
        (nn.BatchNorm1d(64), "cross_entropy", {"ghost_batches": True}, True, False),
    ],
)
def test_micro_batches_are_taken_only_where_gradients_add_up(
    layer: nn.Module | None, loss: Any, training: dict[str, Any], taken: bool, sums: bool
) -> None:
    prepared = in_parts(layer, named_loss(loss), **training)
    program = prepared.program
    assert (program.micro_batch is not None) == taken
    assert program.summed == sums
    assert ("none, though" in prepared.notes[-1]) == (not taken)


def test_micro_batches_that_do_not_add_up_are_told_where_the_job_asks_for_them() -> None:
    prepared = in_parts(None, contrastive, micro_batch=64)
    assert prepared.program.micro_batch == 64
    assert "the gradients of micro-batches do not add up" in prepared.notes[-1]
    assert not any("add up" in note for note in in_parts(None, "cross_entropy", micro_batch=64).notes)


def test_a_sum_that_the_job_asks_to_part_is_added_up_and_not_averaged() -> None:
    prepared = in_parts(OwnDropout(), summed, micro_batch=64)
    assert (prepared.program.micro_batch, prepared.program.summed) == (64, True)
    assert not any("add up" in note for note in prepared.notes)


def test_a_loss_in_bfloat16_is_tried_as_any_other() -> None:
    settings = TrainingSettings(method="local-sgd", subnets=1, batch_size=BATCH, micro_batch=64)
    assert prepare(Half(nn.Linear(6, 3)), MANY, None, functional.cross_entropy, settings).program.micro_batch == 64
