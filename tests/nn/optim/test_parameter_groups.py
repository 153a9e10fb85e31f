"""Each parameter has the settings of the first group that fits it."""

from __future__ import annotations

import pytest
from torch import nn

from idletrain.errors import JobError
from idletrain.nn.optim.parameter_groups import ParameterSettings, check, settings_of
from idletrain.optimizer_settings import OptimizerSettings


class OwnNorm(nn.LayerNorm):
    """As of a library of models, known by its name alone."""


def net() -> nn.Module:
    attention = nn.MultiheadAttention(4, 2)
    return nn.ModuleDict({"head": nn.Linear(4, 2), "attention": attention, "ln_1": OwnNorm(4), "bn": nn.BatchNorm1d(4)})


def found(**fields: object) -> dict[str, ParameterSettings]:
    settings = OptimizerSettings.model_validate({"name": "sgd", "lr": 1.0, "weight_decay": 0.5, **fields})
    names = [name for name, _ in net().named_parameters()]
    return dict(zip(names, settings_of(net(), names, settings), strict=True))


def test_without_groups_all_have_the_optimizers_settings() -> None:
    assert set(found().values()) == {ParameterSettings(1.0, 0.5)}


def test_bias_and_norm_mean_kinds_of_parameters() -> None:
    settings = found(groups=[{"parameters": ["bias", "norm"], "weight_decay": 0}])
    plain = {name for name, own in settings.items() if own.weight_decay}
    assert plain == {"head.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert {own.lr for own in settings.values()} == {1.0}


def test_the_first_group_that_fits_counts_and_what_it_leaves_out_is_the_optimizers() -> None:
    settings = found(groups=[{"parameters": ["head.weight"], "lr": 3}, {"parameters": ["head.*"], "weight_decay": 0}])
    assert settings["head.weight"] == ParameterSettings(3.0, 0.5)
    assert settings["head.bias"] == ParameterSettings(1.0, 0.0)


def test_a_pattern_that_fits_nothing_is_told() -> None:
    groups = [{"parameters": ["bias", "norm"]}, {"parameters": ["hed.*", "head.*"], "lr": 0.1}]
    settings = OptimizerSettings.model_validate({"name": "sgd", "lr": 1.0, "groups": groups})
    with pytest.raises(JobError) as error:
        check(net(), settings)
    sentence = "training.optimizer.groups.1.parameters: 'hed.*' fits no parameter; names are like head.weight"
    assert error.value.faults == (sentence,)
