"""LightningModules as they are: their training_step's loss, their forward's outputs, their optimizer."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.batches import call
from idletrain.nn.lightning import WholeBatches, is_lightning, optimizer_of, plain, stepping


class Classifier(lightning.LightningModule):
    """As Lightning's own guide writes one."""

    def __init__(self, smoothing: float = 0.0) -> None:  # noqa: ARG002 (an hparam)
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002 (Lightning's signature)
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y, label_smoothing=self.hparams.smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Source:
    def __init__(self, samples: ArraySource) -> None:
        self.samples = samples

    def open(self) -> ArraySource:
        return self.samples


def test_a_whole_batch_gives_the_training_step_s_loss_and_the_outputs_and_all_else_is_as_before() -> None:
    module = Classifier(smoothing=0.1)
    x, y = np.random.default_rng(0).normal(size=(6, 64)).astype("float32"), np.arange(6) % 10
    samples = WholeBatches(Source(ArraySource(x, y))).open()
    inputs, target = samples.batch(np.arange(6))
    step = stepping(module)
    outputs = call(step, inputs)
    logits = Classifier.forward(step, torch.from_numpy(x))
    assert torch.equal(outputs["logits"], logits)
    assert outputs["loss"].item() == pytest.approx(
        nn.functional.cross_entropy(logits, torch.from_numpy(y), label_smoothing=0.1).item()
    )
    assert torch.equal(target["labels"], torch.from_numpy(y))
    assert torch.equal(step(torch.from_numpy(x)), logits)
    assert step.state_dict().keys() == module.state_dict().keys()
    assert type(module) is Classifier
    assert type(plain(step)) is Classifier


def test_lightning_modules_are_known_and_others_are_not() -> None:
    assert is_lightning(Classifier())
    assert not is_lightning(nn.Linear(1, 1))


def configured(result: Any) -> nn.Module:
    class Configured(Classifier):
        def configure_optimizers(self) -> Any:
            return result(torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9))

    return Configured()


@pytest.mark.parametrize("result", [lambda o: o, lambda o: [o], lambda o: {"optimizer": o}, lambda o: ([o], [])])
def test_one_optimizer_is_taken_in_every_form(result: Any) -> None:
    assert optimizer_of(configured(result)).param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda o: [o, o], "return one optimizer, or give fit one"),
        (lambda _o: None, "return one optimizer, or give fit one"),
        (
            lambda o: ([o], [torch.optim.lr_scheduler.StepLR(o, 3)]),
            "configure_optimizers returns a learning rate schedule; give fit an optimizer with one",
        ),
        (
            lambda _o: 1 / 0,
            r"fit: configure_optimizers fails \(ZeroDivisionError: division by zero\); give fit an optim",
        ),
    ],
)
def test_other_optimizers_are_refused_in_a_sentence(result: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        optimizer_of(configured(result))


def test_modules_that_train_themselves_are_refused_in_a_sentence() -> None:
    by_hand = Classifier()
    by_hand.automatic_optimization = False
    with pytest.raises(JobError, match="optimizes by hand; leave out automatic_optimization = False"):
        stepping(by_hand)
    with pytest.raises(JobError, match="has no training_step; write one that returns the loss"):
        stepping(lightning.LightningModule())
