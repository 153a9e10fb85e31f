"""The assembled network and its score."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.data.given import as_samples
from idletrain.nn.evaluate import Score, assembled, score
from idletrain.nn.program import cross_entropy, model_loss


class Echo(nn.Module):
    """Gives its inputs back as outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_an_assembled_module_shares_the_network_s_memory_and_leaves_the_original_alone() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    network = [torch.zeros_like(p) for p in module.parameters()]
    copy = assembled(module, network)
    network[1].fill_(5)
    assert copy[0].bias.tolist() == [5, 5]
    assert module[0].weight.abs().sum() > 0


def test_accuracy_and_mean_loss_over_all_samples_of_several_batches() -> None:
    logits = np.random.default_rng(0).normal(size=(1300, 3)).astype(np.float32)
    labels = np.arange(1300) % 3
    found = score(Echo(), ArraySource(logits, labels), cross_entropy)
    accuracy, loss = found.accuracy, found.loss
    assert accuracy == pytest.approx((logits.argmax(1) == labels).mean())
    expected = functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_accuracy_of_a_language_model_is_over_all_tokens() -> None:
    logits = np.zeros((5, 4, 3), np.float32)
    logits[..., 1] = 1
    labels = np.tile([1, 1, 1, 2], (5, 1))
    found = score(Echo(), ArraySource(logits, labels), cross_entropy)
    accuracy, loss = found.accuracy, found.loss
    assert accuracy == 0.75
    assert loss == pytest.approx(0.75 * (math.log(2 + math.e) - 1) + 0.25 * math.log(2 + math.e), rel=1e-5)


def test_accuracy_of_yes_and_no_is_by_the_sign() -> None:
    outputs = np.array([[1.0], [-1.0], [2.0], [-3.0]], np.float32)
    labels = np.array([[1.0], [0.0], [0.0], [0.0]], np.float32)
    assert score(Echo(), ArraySource(outputs, labels), functional.binary_cross_entropy_with_logits).accuracy == 0.75


def test_a_regression_has_a_loss_and_no_accuracy() -> None:
    assert score(
        Echo(), ArraySource(np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)), functional.mse_loss
    ) == Score(None, 1.0, constant_loss=0.0)


def test_ignored_labels_count_neither_for_accuracy_nor_for_loss() -> None:
    logits = np.tile(np.array([9, 0, 0], np.float32), (1300, 1))
    labels = np.full(1300, -100)
    labels[:4] = [0, 0, 0, 1]  # all of the later batches are ignored
    found = score(Echo(), ArraySource(logits, labels), cross_entropy)
    accuracy, loss = found.accuracy, found.loss
    assert accuracy == 0.75
    expected = functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_outputs_whose_classes_are_not_last_have_no_accuracy() -> None:
    outputs, labels = np.zeros((2, 3, 4, 4), np.float32), np.zeros((2, 4, 4), np.int64)
    found = score(Echo(), ArraySource(outputs, labels), lambda out, _labels: out.mean())
    accuracy, loss = found.accuracy, found.loss
    assert (accuracy, loss) == (None, 0.0)


def test_confidence_that_is_as_high_as_accuracy_has_no_calibration_error_and_temperature_1() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40_000, 4)).astype(np.float32) * 2
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (chances.cumsum(1) > rng.random((len(logits), 1))).argmax(1)
    found = score(Echo(), ArraySource(logits, labels), cross_entropy)
    assert found.calibration_error is not None
    assert found.calibration_error < 0.01
    assert found.temperature == pytest.approx(1, abs=0.03)
    overconfident = score(Echo(), ArraySource(5 * logits, labels), cross_entropy)
    assert overconfident.temperature == pytest.approx(5, rel=0.03)
    assert overconfident.calibration_error is not None
    assert overconfident.calibration_error > 0.1


def test_yes_and_no_are_calibrated_as_two_classes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20_000, 2)).astype(np.float32) * 2
    labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    found = score(Echo(), ArraySource(3 * logits, labels), functional.binary_cross_entropy_with_logits)
    assert found.temperature == pytest.approx(3, rel=0.05)


def test_a_regression_has_no_confidence() -> None:
    found = score(Echo(), ArraySource(np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)), functional.mse_loss)
    assert found.calibration_error is None
    assert found.temperature is None


def test_a_network_that_diverged_has_no_calibration() -> None:
    logits = np.full((40, 3), np.nan, np.float32)
    found = score(Echo(), ArraySource(logits, np.arange(40) % 3), cross_entropy)
    assert math.isnan(found.loss)
    assert found.calibration_error is None
    assert found.temperature is None


def test_labels_that_are_no_classes_of_the_outputs_are_not_calibrated() -> None:
    logits = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]] * 9
    found = score(Echo(), ArraySource(logits, np.array([0, 1, 2, 7])), lambda out, _labels: out.mean())
    assert found.calibration_error == pytest.approx(0, abs=0.01)


class WithLoss(nn.Module):
    """Gives its inputs back with a loss, of the labels as they stand or of each one's successor."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        kept, wanted = x[:, : x.shape[1] - self.shift], labels[:, self.shift :]
        return {"loss": functional.cross_entropy(kept.flatten(0, 1), wanted.flatten()), "logits": x}


@pytest.mark.parametrize("shift", [0, 1], ids=["labels as they stand", "a language model's next labels"])
def test_accuracy_beside_a_model_s_own_loss_is_only_of_labels_that_it_predicts(shift: int) -> None:
    logits = np.random.default_rng(0).normal(size=(600, 4, 3)).astype(np.float32)
    labels = np.arange(2400).reshape(600, 4) % 3
    labels[5] = -100
    items = MapStyleSource([{"x": x, "label": y} for x, y in zip(logits, labels, strict=True)])
    found = score(WithLoss(shift), items, model_loss)
    expected = score(Echo(), ArraySource(logits[:, : 4 - shift], labels[:, shift:]), cross_entropy)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.accuracy == (expected.accuracy if shift == 0 else None)
    assert (found.temperature is None) == (shift == 1)


class LossAlone(nn.Module):
    """Returns its loss and nothing else."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.cross_entropy(x, labels)}


def test_a_model_that_returns_its_loss_alone_is_scored_by_it() -> None:
    logits, labels = np.eye(3, dtype=np.float32)[[0, 1, 1, 0]], np.arange(4) % 3
    found = score(LossAlone(), as_samples({"x": logits, "labels": labels}), model_loss)
    expected = functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    assert (found.accuracy, found.loss) == (None, pytest.approx(float(expected)))


def test_labels_of_several_tasks_are_scored_by_the_loss() -> None:
    items = [(np.float32([i, 1]), (i % 2, np.float32([i]))) for i in range(4)]
    found = score(Echo(), MapStyleSource(items), lambda outputs, labels: (outputs[:, :1] - labels[1]).mean() + 2)
    assert (found.accuracy, found.loss) == (None, 2)


def test_a_sample_that_cannot_be_read_is_a_fault_of_the_data() -> None:
    class Damaged:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise OSError("file 3 is damaged")

    samples = as_samples(Damaged())
    with pytest.raises(
        JobError,
        match=r"of its samples 0 to 1 cannot be read \(__getitem__ at \S+ raised OSError: file 3 is damaged\); mend",
    ):
        score(nn.Identity(), samples, cross_entropy)
