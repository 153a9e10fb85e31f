"""How each buffer goes from round to round, by what was seen of it and by what the job says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.buffers import Observed, kinds_of, of_torch_norms, traveling_rules

WRITTEN = Observed("mean", True, torch.float32)
READ = replace(WRITTEN, read=True)
COUNTER = Observed("mean", True, torch.int64, accumulates=True, largest=3, growth=1)


def kinds(*observed: Observed, names: tuple[str, ...] = (), **settings: Any) -> dict[str, str]:
    training = TrainingSettings.model_validate({"rounds": 2, **settings})
    return dict(kinds_of(observed, names or tuple(one.name for one in observed), training))


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (WRITTEN, "estimate"),
        (READ, "mean"),
        (COUNTER, "sum"),
        (replace(COUNTER, dtype=torch.float32), "sum"),
        (replace(COUNTER, feeds=True), "estimate"),  # a count that a cumulative average divides by
        (replace(COUNTER, read=True), "mean"),
    ],
)
def test_what_was_seen_decides(seen: Observed, kind: str) -> None:
    assert kinds(seen) == {"mean": kind}


def test_the_first_pattern_that_fits_decides_also_for_buffers_that_the_trial_did_not_change() -> None:
    decided = kinds(READ, names=("mean", "later"), buffers={"l*": "sum", "*": "mean"})
    assert decided == {"mean": "mean", "later": "sum"}
    assert traveling_rules({**decided, "other": "estimate"}) == decided


@pytest.mark.parametrize(
    ("seen", "settings", "says"),
    [
        (replace(READ, reshaped="changes its shape from [0] to [4]"), {}, "buffer mean changes its shape from [0] to"),
        (replace(READ, dtype=torch.complex64), {}, "buffer mean changes in training and is complex"),
        (replace(READ, finite=False), {}, "buffer mean holds NaN or infinity"),
        (READ, {"buffers": {"mean": "estimate"}}, "training.buffers: mean is read in training"),
        (WRITTEN, {"buffers": {"maen": "sum"}}, "training.buffers: 'maen' matches no buffer; the model has mean"),
        (replace(READ, is_buffer=False), {}, "make it a buffer (register_buffer)"),
        (replace(COUNTER, growth=1000), {"rounds": 1000}, "would count beyond 16,777,216"),
    ],
)
def test_what_can_be_neither_is_refused_by_name(seen: Observed, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as caught:
        kinds(seen, **settings)
    (fault,) = caught.value.faults
    assert says in fault


def test_an_attribute_that_training_does_not_read_is_nobody_s_business() -> None:
    assert kinds(replace(WRITTEN, is_buffer=False), names=("x",)) == {}


def test_statistics_of_torch_s_norms_are_known() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True), nn.LayerNorm(2))
    assert {name for name, _ in module.named_buffers()} <= of_torch_norms(module)
