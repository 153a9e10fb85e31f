"""Metrics over batches: those that add up, and functions of all; faults are one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError, R2Score

from idletrain.errors import JobError
from idletrain.nn.user_metrics import JobMetric, Tally, checked_metrics


def largest(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).abs().max()


def value_of(metric: Any, *batches: tuple[Any, Any]) -> Tally:
    (only,) = checked_metrics({"m": metric})
    tally = Tally(only)
    for outputs, labels in batches:
        tally.add(outputs, labels)
    return tally


def test_a_metric_adds_up_batches_to_its_value_on_all_of_them() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(90, 4), torch.randint(4, (90,))
    metric = MulticlassF1Score(num_classes=4)
    tally = value_of(
        metric, (logits[:50], labels[:50]), ({"logits": logits[50:], "loss": 1.0}, {"labels": labels[50:]})
    )
    expected = MulticlassF1Score(num_classes=4)(logits, labels)
    assert tally.value() == pytest.approx(float(expected))
    assert not metric.update_called  # the job's own stays as it is


def test_a_function_gets_all_outputs_and_labels_at_once() -> None:
    tally = value_of(
        (largest, "lower"), (torch.zeros(3, 1), torch.ones(3, 1)), (torch.zeros(2, 1), torch.full((2, 1), 5.0))
    )
    assert tally.value() == 5.0


def test_torchmetrics_know_which_value_is_better_and_a_pair_says_it() -> None:
    metrics = checked_metrics(
        {"auroc": BinaryAUROC(), "mse": MeanSquaredError(), "far": (largest, "lower"), "odd": (R2Score(), "lower")}
    )
    assert [(m.name, m.better, m.by_batch) for m in metrics] == [
        ("auroc", "higher", True),
        ("mse", "lower", True),
        ("far", "lower", False),
        ("odd", "lower", True),
    ]
    collection = MetricCollection([MulticlassAccuracy(num_classes=3), MulticlassF1Score(num_classes=3)])
    assert {m.name for m in checked_metrics(collection)} == {"MulticlassAccuracy", "MulticlassF1Score"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"far": largest}, "does not say which value is better; give (metric, 'higher') or (metric, 'lower')"),
        ({"far": (largest, "up")}, "does not say which value is better"),
        ({"loss": BinaryAUROC()}, "is measured anyway or is no name; give the metric another name"),
        ({"f1": "f1"}, "'f1' should be a torchmetrics metric or a function (outputs, labels)"),
        ({"f1": MulticlassF1Score}, "should be a torchmetrics metric or a function (outputs, labels)"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: dict[str, Any], said: str) -> None:
    (name,) = metrics
    with pytest.raises(JobError) as caught:
        checked_metrics(metrics)
    (fault,) = caught.value.faults
    assert fault.startswith(f"training.metrics.{name}: ")
    assert said in fault


def test_a_value_that_is_no_number_is_none_and_says_why() -> None:
    tally = value_of((lambda *_: torch.tensor(float("nan")), "lower"), (torch.ones(2), torch.ones(2)))
    assert tally.value() is None
    assert tally.fault == "metric m is nan on the test data"
    tally = value_of(R2Score(), (torch.ones(1), torch.ones(1)))
    assert tally.value() is None
    assert tally.fault.startswith("metric m cannot be computed: Needs at least two samples")
    tally = value_of(MulticlassF1Score(num_classes=3), (torch.ones(2, 3), torch.tensor([0, 7])))
    assert tally.value() is None
    assert tally.fault.startswith("metric m cannot be computed: ")


def test_a_metric_is_a_plain_record() -> None:
    assert JobMetric("far", largest, "lower") == JobMetric("far", largest, "lower")
