"""The best constant prediction's loss is that of a constant which a search finds; a network's score has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from idletrain.nn.constant import ConstantPrediction
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.evaluate import score
from idletrain.nn.program import LOSSES, Loss, cross_entropy

DICE = torch.Generator().manual_seed(0)


def searched(loss: Loss, labels: Tensor, outputs: int) -> float:
    """The lowest loss of one vector for all samples, by gradient descent."""
    constant = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))
    descent = torch.optim.LBFGS([constant], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        descent.zero_grad()
        value = loss(constant.expand(len(labels), -1), labels)
        value.backward()
        return value

    descent.step(closure)
    return float(closure().detach())


def found(loss: Loss, labels: Tensor, outputs: Tensor) -> float | None:
    constant = ConstantPrediction(loss)
    for batch in torch.arange(len(labels)).split(7):
        constant.add(outputs[batch], labels[batch])
    return constant.loss


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("cross_entropy", torch.randint(0, 3, (40,), generator=DICE)),
        ("mse", 5 + 2 * torch.randn(40, 3, generator=DICE, dtype=torch.float64)),
        ("bce_with_logits", (torch.rand(40, 3, generator=DICE) < 0.2).double()),
    ],
)
def test_it_is_the_lowest_loss_of_one_output_for_all_samples(name: str, labels: Tensor) -> None:
    value = found(LOSSES[name], labels, torch.zeros(40, 3, dtype=torch.float64))
    assert value == pytest.approx(searched(LOSSES[name], labels, 3), rel=1e-3)


def test_labels_that_are_ignored_do_not_count() -> None:
    labels = torch.tensor([0, 1, -100, -100])
    assert found(cross_entropy, labels, torch.zeros(4, 2)) == pytest.approx(0.6931, abs=1e-4)


def test_of_another_loss_and_of_no_label_nothing_is_known() -> None:
    assert found(nn.functional.huber_loss, torch.zeros(4), torch.zeros(4)) is None
    assert ConstantPrediction(cross_entropy).loss is None


def test_a_score_has_it() -> None:
    x, y = torch.randn(30, 4, generator=DICE).numpy(), torch.arange(30).remainder(2).numpy()
    result = score(nn.Linear(4, 2), ArraySource(x, y), cross_entropy)
    assert result.constant_loss == pytest.approx(0.6931, abs=1e-4)
