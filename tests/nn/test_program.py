"""What is sent once to every worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from idletrain.nn import travel
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.prepare import Prepared
from idletrain.nn.program import bce_with_logits, cross_entropy, model_loss, mse


@pytest.mark.parametrize(
    ("optimizer", "slots", "persistent"),
    [
        ({"lr": 0.1, "name": "sgd"}, ("value",), (1, 0)),
        ({"lr": 0.1, "name": "sgd", "momentum": 0.5}, ("value", "momentum_buffer"), (2, 0)),
        ({"lr": 0.1, "name": "sgd", "momentum": 0.5, "state": "reset"}, ("value", "momentum_buffer"), (1, 0)),
        ({"lr": 0.1, "name": "adamw"}, ("value", "exp_avg", "exp_avg_sq"), (3, 0)),
        ({"lr": 0.1, "name": "row-adagrad"}, ("value",), (1, 1)),
        ({"lr": 0.1, "name": "row-adagrad", "state": "reset"}, ("value",), (1, 0)),
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
    again = pickle.loads(travel.dumps(program))
    for ours, theirs in zip(
        program.subnets(3, by_neurons((0.5, 0.5))), again.subnets(3, by_neurons((0.5, 0.5))), strict=True
    ):
        assert ours.shapes == theirs.shapes
        for here, there in zip(ours.positions, theirs.positions, strict=True):
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_pickled_program_holds_no_parameters(small_program: Callable[..., Prepared]) -> None:
    """Its size does not follow the network's, but for an index a neuron."""
    narrow, wide = (small_program(widths=(6, w, w, 3)).program for w in (64, 1024))
    assert len(travel.dumps(wide)) - len(travel.dumps(narrow)) < 1024 * 1024 * 4 / 10


@pytest.mark.parametrize(("loss", "plain"), [(bce_with_logits, "binary_cross_entropy_with_logits"), (mse, "mse_loss")])
def test_labels_may_be_integers_where_they_are_compared_with_floats(loss: Any, plain: str) -> None:
    outputs, labels = torch.randn(4, 3, requires_grad=True), torch.randint(0, 2, (4, 3))
    loss(outputs, labels).backward()
    expected = getattr(torch.nn.functional, plain)(outputs, labels.float())
    torch.testing.assert_close(loss(outputs, labels), expected)
    assert outputs.grad is not None


def test_cross_entropy_is_over_classes_in_the_last_dimension() -> None:
    logits, labels = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
    torch.testing.assert_close(cross_entropy(logits, labels), expected)


def test_a_model_s_own_loss_has_that_name_or_is_its_only_number() -> None:
    loss, logits = torch.tensor(0.5), torch.zeros(2, 3)
    for outputs in ({"loss": loss, "other": torch.tensor(1.0)}, (logits, loss), loss):
        assert model_loss(outputs, None) is loss
    for unclear in (logits, (loss, loss), {"a": loss, "b": loss}):
        with pytest.raises(ValueError, match="its outputs have no loss"):
            model_loss(unclear, None)
