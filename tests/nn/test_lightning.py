"""LightningModules as they are: their training_step's loss, their forward's outputs, their optimizer."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchmetrics.classification import MulticlassAccuracy

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.checks import outputs_of
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.batches import call
from idletrain.nn.evaluate import score
from idletrain.nn.lightning import Validation, WholeBatches, callbacks_of, is_lightning, optimizer_of, plain, stepping
from idletrain.nn.program import model_loss


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
    optimizer, factors = optimizer_of(configured(result))
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert factors is None


@pytest.mark.parametrize(
    ("result", "at"),
    [
        (lambda o: ([o], [lr_scheduler.StepLR(o, 2)]), 2 * 5),  # Lightning's default: epochs, of 40 / (4 * 2) steps
        (lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.StepLR(o, 1)}, 5),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(o, 3), "interval": "step"}}, 3),
        (lambda o: ([o], [{"scheduler": lr_scheduler.StepLR(o, 3), "interval": "step", "frequency": 2}]), 6),
    ],
)
def test_a_scheduler_steps_by_epochs_or_steps_as_lightning_says(result: Any, at: int) -> None:
    optimizer, factors = optimizer_of(configured(result))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "initial_lr" not in optimizer.param_groups[0]
    assert factors is not None
    factors = factors.of_data(40, TrainingSettings(batch_size=4, subnets=2))
    assert [factors(step, 100) for step in (0, at - 1, at, 2 * at)] == pytest.approx([1, 1, 0.1, 0.01])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda o: [o, o], "^fit: configure_optimizers returns SGD and SGD; return one optimizer, or give fit one$"),
        (lambda _o: None, "returns NoneType; return one optimizer, or give fit one"),
        (
            lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.ReduceLROnPlateau(o)},
            "configure_optimizers returns a ReduceLROnPlateau, which is no schedule of steps or epochs",
        ),
        (
            lambda o: ([o], [lr_scheduler.StepLR(o, 3), lr_scheduler.StepLR(o, 5)]),
            "configure_optimizers returns several schedules; make one with SequentialLR",
        ),
        (
            lambda _o: 1 / 0,
            r"configure_optimizers fails \(<lambda> at \S+:\d+ raised ZeroDivisionError: division by zero\); give fit",
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


class Validated(Classifier):
    """Logs a number, a metric of torchmetrics, and one of the scores that are measured anyway; has callbacks."""

    def __init__(self, callbacks: Any = ()) -> None:
        super().__init__()
        self.hits = MulticlassAccuracy(num_classes=10, average="micro")
        self.callbacks = callbacks

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        outputs = self(x)
        self.hits(outputs, y)
        self.log("mean_label", y.float().mean(), prog_bar=True)
        self.log_dict({"hits": self.hits, "loss": 7.0})

    def configure_callbacks(self) -> Any:
        return self.callbacks


def labelled(count: int) -> WholeBatches:
    x = np.random.default_rng(0).normal(size=(count, 64)).astype("float32")
    return WholeBatches(Source(ArraySource(x, np.arange(count) % 10)))


def test_what_validation_step_logs_is_measured_over_all_samples_and_begins_anew() -> None:
    module, samples = stepping(Validated()).eval(), labelled(515).open()  # a batch of 512 and one of 3
    x, y = (torch.from_numpy(part) for part in (samples.samples.x, samples.samples.y))  # type: ignore[attr-defined]
    expected = {"mean_label": float(y.float().mean()), "hits": float((module(x).argmax(-1) == y).float().mean())}
    for _ in range(2):
        found = score(module, samples, model_loss)
        assert found.metrics == pytest.approx(expected)
        assert found.loss != 7.0
    assert found.of("hits") == found.metrics["hits"]


def test_what_is_logged_outside_of_an_evaluation_goes_nowhere() -> None:
    module = stepping(Validated()).eval()
    validation = Validation(module)
    module.training_step((torch.zeros(2, 64), torch.tensor([0, 1])), 0)
    assert validation.values() == {}
    assert Validation(nn.Linear(1, 1)).values() == {}


def test_callbacks_say_when_to_stop_and_what_is_best_and_others_are_named() -> None:
    callbacks = [EarlyStopping("hits", mode="max", patience=2), ModelCheckpoint(monitor="hits", mode="max")]
    found = callbacks_of(stepping(Validated([*callbacks, LearningRateMonitor()])), labelled(4))
    assert found.stop == {"metric": "hits", "patience": 2}
    assert found.better == {"hits": "higher"}
    assert found.notes == ("LearningRateMonitor is left out: no Trainer runs that would call it",)
    alone = callbacks_of(stepping(Validated(ModelCheckpoint(monitor="loss"))), labelled(4))
    assert alone.stop == {"metric": "loss"}
    assert callbacks_of(stepping(Validated([ModelCheckpoint()])), labelled(4)).stop == {}


def test_early_stopping_tells_what_is_followed_where_callbacks_watch_several_values() -> None:
    callbacks = [ModelCheckpoint(monitor="loss"), EarlyStopping("hits", mode="max", patience=2)]
    found = callbacks_of(stepping(Validated(callbacks)), labelled(4))
    assert found.stop == {"metric": "hits", "patience": 2}
    assert found.better == {"hits": "higher"}
    said = "ModelCheckpoint is left out: hits, which EarlyStopping watches, tells the best network, too"
    assert found.notes == (said,)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda _self, batch: batch[2], "<lambda> at {file}:{line} raised IndexError: tuple index out of range"),
        (lambda self, _batch: self.trainer.current_epoch, "<lambda> at {file}:{line} raised RuntimeError: Step"),
        (lambda _self, _batch: None, "training_step at {file}:{line} returned a NoneType; it should return the loss"),
        (lambda _self, _batch: {"l": 1}, "training_step at {file}:{line} returned a dict; it should return the loss"),
    ],
)
def test_a_training_step_that_fails_is_told_with_its_place(step: Any, said: str) -> None:
    module = stepping(type("Step", (Classifier,), {"training_step": step})())
    with pytest.raises(JobError) as caught:
        outputs_of(module, labelled(4).open().batch(np.arange(2)), "data.train")
    line = step.__code__.co_firstlineno
    assert str(caught.value).startswith("model: " + said.format(file=__file__, line=line))
    assert str(caught.value).endswith("; correct it (no Trainer runs: leave out self.trainer)")


def test_hooks_that_only_a_trainer_calls_are_named() -> None:
    class Hooked(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            pass

        def configure_gradient_clipping(self, *_: Any) -> None:
            pass

    assert callbacks_of(stepping(Hooked()), None).notes == (
        "configure_gradient_clipping is left out: no Trainer runs that would call it",
        "on_train_batch_end is left out: no Trainer runs that would call it",
    )


def test_callbacks_without_test_data_are_left_out_in_a_sentence() -> None:
    found = callbacks_of(stepping(Validated([EarlyStopping("hits")])), None)
    assert (found.stop, found.notes) == ({}, ("EarlyStopping is left out: there are no test data to watch",))


@pytest.mark.parametrize(
    ("monitored", "said"),
    [
        (["train_loss"], "watch train_loss, which validation_step does not log; it logs mean_label, loss, hits"),
        (["hits", "mean_label"], "watch hits and mean_label; let all of them watch one value"),
    ],
)
def test_callbacks_that_cannot_be_followed_are_refused_in_a_sentence(monitored: list[str], said: str) -> None:
    module = stepping(Validated([EarlyStopping(name) for name in monitored]))
    with pytest.raises(JobError, match=said):
        callbacks_of(module, labelled(4))


def test_a_validation_step_that_fails_is_told_in_a_sentence() -> None:
    class Failing(Validated):
        def validation_step(self, batch: Any) -> None:
            batch["mask"]

    validation = Validation(stepping(Failing()))
    with pytest.raises(
        JobError, match=r"validation_step fails \(validation_step at \S+ raised TypeError: tuple indices must"
    ):
        validation.add(labelled(4).open().batch(np.arange(2))[0])
