"""A job's metrics are read from names, and tried before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score

from idletrain.errors import JobError
from idletrain.job import MetricSettings
from idletrain.nn import metric_checks
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.faults import resolve
from idletrain.nn.metric_checks import check_metrics, named_metrics
from idletrain.nn.user_metrics import checked_metrics


def furthest(outputs: Tensor, labels: Tensor, power: int = 1) -> Tensor:
    return ((outputs.argmax(1) - labels).abs() ** power).max()


SAMPLES = ArraySource(np.random.default_rng(0).normal(size=(40, 6)).astype("float32"), np.arange(40) % 3)


def test_job_files_name_classes_with_arguments_and_functions() -> None:
    settings = {
        "f1": {"metric": "torchmetrics.classification:MulticlassF1Score", "args": {"num_classes": 3}},
        "far": {"metric": f"{__name__}:furthest", "args": {"power": 2}, "better": "lower"},
    }
    metrics = named_metrics({name: MetricSettings(**s) for name, s in settings.items()}, {}, resolve)
    assert [(m.name, m.better) for m in metrics] == [("f1", "higher"), ("far", "lower")]
    assert metrics[1].measure(torch.eye(3), torch.tensor([0, 1, 0])) == 4
    check_metrics(metrics, nn.Linear(6, 3), SAMPLES)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"metric": "torchmetrics.nothing:F1"}, "training.metrics.f1: 'torchmetrics.nothing:F1' cannot be imported ("),
        (
            {"metric": "torchmetrics.classification:MulticlassF1Score", "args": {"classes": 3}},
            "training.metrics.f1.args: torchmetrics.classification:MulticlassF1Score does not take {'classes': 3}: ",
        ),
        ({"metric": f"{__name__}:furthest"}, "training.metrics.f1: does not say which value is better"),
    ],
)
def test_what_a_job_file_names_wrongly_is_one_sentence(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as caught:
        named_metrics({"f1": MetricSettings(**setting)}, {}, resolve)
    (fault,) = caught.value.faults
    assert fault.startswith(said)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            MulticlassF1Score(num_classes=5),
            "training.metrics.m: does not fit outputs [8, 3] and labels [8] of torch.int64: ",
        ),
        (MulticlassF1Score(num_classes=3, average=None), "training.metrics.m: returns [3]; return one number, such as"),
        (MetricCollection([BinaryAUROC()]), "training.metrics.m: does not "),
        ((lambda *_: {"a": 1}, "lower"), "training.metrics.m: returns a; give its metrics one by one"),
        ((lambda *_: 1 / 0, "lower"), "training.metrics.m: does not fit outputs [8, 3] and labels [8] of"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_with_the_shapes(metric: Any, said: str) -> None:
    with pytest.raises(JobError) as caught:
        check_metrics(checked_metrics({"m": metric}), nn.Linear(6, 3), SAMPLES)
    (fault,) = caught.value.faults
    assert fault.startswith(said)


@pytest.mark.parametrize(
    "given", [["accuracy"], "accuracy", MulticlassF1Score(num_classes=3)], ids=["list", "str", "one"]
)
def test_metrics_without_names_are_refused(given: Any) -> None:
    with pytest.raises(JobError, match=r"metrics: .* should name each metric, such as \{'f1': MulticlassF1Score"):
        named_metrics({}, given, resolve)


def test_metrics_without_test_data_are_refused() -> None:
    with pytest.raises(JobError, match=r"training.metrics: are measured on test data, which are missing"):
        check_metrics(checked_metrics({"far": (furthest, "lower")}), nn.Linear(6, 3), None)


def test_a_function_of_more_outputs_than_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = checked_metrics({"far": (furthest, "lower"), "f1": MulticlassF1Score(num_classes=3)})
    monkeypatch.setattr(metric_checks, "MEMORY_PART", 1e-15)
    with pytest.raises(JobError) as caught:
        check_metrics(metrics, nn.Linear(6, 3), SAMPLES)
    (fault,) = caught.value.faults
    assert fault.startswith("training.metrics.far: a function gets all outputs, 0.0 GiB, at once; give a torchmetrics")
