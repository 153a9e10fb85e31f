"""What training a subnet takes, known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import flowers

from idletrain.errors import JobError
from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.memory import SCRATCH_BYTES, subnet_need, subnet_of_share
from idletrain.nn.models import mlp
from idletrain.nn.prepare import Prepared, named_loss, prepare
from idletrain.quantities import steady


def test_need_grows_with_the_share_and_never_less_than_the_scratch(small_program: Callable[..., Prepared]) -> None:
    need = subnet_need(small_program(widths=(6, 64, 64, 3)).program)
    needs = [need(share / 16) for share in range(1, 17)]
    assert needs == sorted(needs)
    assert needs[0] < needs[-1]
    assert needs[0] > SCRATCH_BYTES


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ({"name": "sgd", "lr": 0.1}, 1),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.9}, 2),
        ({"name": "adamw", "lr": 0.1}, 3),
    ],
)
def test_need_counts_what_is_pulled_kept_sent_and_differentiated(
    small_program: Callable[..., Prepared], optimizer: dict[str, Any], slots: int
) -> None:
    program = small_program(widths=(6, 64, 64, 3), optimizer=optimizer).program
    whole = 4 * (6 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3)
    assert len(program.slots) == slots
    assert subnet_need(program)(1.0) - SCRATCH_BYTES >= (2 * slots + 2) * whole


def test_need_counts_every_layer_s_output_for_a_batch(small_program: Callable[..., Prepared]) -> None:
    one, eight = (subnet_need(small_program(widths=(6, 64, 64, 3), batch_size=b).program)(1.0) for b in (2, 16))
    outputs = 6 + 64 + 64 + 64 + 64 + 3  # flatten, linear, ReLU, linear, ReLU, linear
    assert eight - one == 2 * 4 * outputs * 14


def test_a_share_is_of_every_group(small_program: Callable[..., Prepared]) -> None:
    subnet = subnet_of_share(small_program(widths=(6, 64, 32, 3)).program, 0.25)
    assert subnet.shapes == ((16, 6), (16,), (8, 16), (8,), (3, 8), (3,))


BATCH = 16384  # whose activations outweigh the steps in which memory is rounded
MANY = flowers(BATCH, 6, 3)


def fitting(budget: int, size: int | str = "auto") -> Prepared:
    training = TrainingSettings(subnets=2, batch_size=BATCH, micro_batch=size)
    loss, memory = named_loss("cross_entropy"), MemorySettings(budget=budget)
    return prepare(mlp((6, 64, 64, 3), None), MANY, None, loss, training, memory=memory)


def test_a_micro_batch_is_the_largest_half_of_halves_that_fits_and_follows_from_the_job() -> None:
    sizes = [BATCH, BATCH // 2, BATCH // 4]
    needs = [subnet_need(fitting(1 << 30, size).program)(0.5) for size in sizes]
    assert needs == sorted(needs, reverse=True)
    for size, need in zip(sizes, needs, strict=True):
        budget = next(b for b in range(need, 2 * need, 1 << 16) if steady(b) >= need)
        program = fitting(budget).program
        assert program.micro_batch == (size if size < BATCH else None)
        assert subnet_need(program)(0.5) == need
        assert program.out_of_core == ("auto" if size == BATCH else "never")
        less = next(b for b in range(budget, 0, -(1 << 16)) if steady(b) < need)
        assert (fitting(less).program.micro_batch or BATCH) <= size // 2


def test_a_budget_for_not_even_one_sample_is_told() -> None:
    with pytest.raises(
        JobError, match=r"training\.micro_batch: a subnet and one sample need 48 MiB, and memory\.budget"
    ):
        fitting(1 << 20)
