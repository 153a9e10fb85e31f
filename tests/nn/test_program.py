"""What is sent once to every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

from idletrain.nn.prepare import Prepared
from idletrain.nn.program import cross_entropy


@pytest.mark.parametrize(
    ("optimizer", "slots", "persistent"),
    [
        ({"lr": 0.1}, ("value",), (1, 0)),
        ({"lr": 0.1, "momentum": 0.5}, ("value", "momentum_buffer"), (2, 0)),
        ({"lr": 0.1, "momentum": 0.5, "state": "reset"}, ("value", "momentum_buffer"), (1, 0)),
        ({"lr": 0.1, "name": "adamw"}, ("value", "exp_avg", "exp_avg_sq"), (3, 0)),
        ({"lr": 0.1, "name": "adagrad"}, ("value",), (1, 1)),
        ({"lr": 0.1, "name": "adagrad", "state": "reset"}, ("value",), (1, 0)),
    ],
)
def test_slots_are_the_values_and_the_optimizer_s_state_and_travel_unless_reset(
    small_program: Callable[..., Prepared],
    optimizer: dict[str, Any],
    slots: tuple[str, ...],
    persistent: tuple[int, int],
) -> None:
    program = small_program(optimizer=optimizer).program
    assert program.slots == slots
    assert program.persistent_slots == persistent


def test_every_process_draws_the_same_subnets_from_the_pickled_program(small_program: Callable[..., Prepared]) -> None:
    program = small_program(widths=(6, 64, 64, 3)).program
    again = cloudpickle.loads(cloudpickle.dumps(program))
    for ours, theirs in zip(program.subnets(3, (0.5, 0.5)), again.subnets(3, (0.5, 0.5)), strict=True):
        assert ours.shapes == theirs.shapes
        for here, there in zip(ours.positions, theirs.positions, strict=True):
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_pickled_program_holds_no_parameters(small_program: Callable[..., Prepared]) -> None:
    """Its size does not follow the network's, but for an index a neuron."""
    narrow, wide = (small_program(widths=(6, w, w, 3)).program for w in (64, 1024))
    assert len(cloudpickle.dumps(wide)) - len(cloudpickle.dumps(narrow)) < 1024 * 1024 * 4 / 10


def test_cross_entropy_is_over_classes_in_the_last_dimension() -> None:
    logits, labels = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
    torch.testing.assert_close(cross_entropy(logits, labels), expected)
