"""An instance of torch.optim and a name become the settings of a job, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.nn.optim.from_torch import settings_of
from idletrain.nn.optim.table import OPTIMIZERS
from idletrain.optimizer_settings import OptimizerSettings


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, 0.2, 0.9, nesterov=True), {"name": "sgd", "momentum": 0.9, "nesterov": True}),
        (lambda p: torch.optim.Adam(p, 0.2, (0.8, 0.9)), {"name": "adam", "betas": (0.8, 0.9), "eps": 1e-8}),
        (lambda p: torch.optim.AdamW(p, torch.tensor(0.2)), {"name": "adamw", "weight_decay": 0.01}),
        (lambda p: torch.optim.Adagrad(p, 0.2, initial_accumulator_value=0.1), {"name": "adagrad", "start": 0.1}),
        (lambda p: torch.optim.RMSprop(p, 0.2, eps=1e-4), {"name": "rmsprop", "alpha": 0.99, "eps": 1e-4}),
    ],
    ids=["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"],
)
def test_an_instance_gives_its_class_and_settings(make: Callable[[Any], Any], expected: dict[str, Any]) -> None:
    module = nn.Linear(3, 2)
    settings = OptimizerSettings.model_validate(settings_of(make(module.parameters()), module))
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.lr == pytest.approx(0.2)
    assert settings.groups == ()


def test_groups_become_groups_by_their_parameters_names() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [
        {"params": module[0].parameters()},
        {"params": [module[1].bias], "lr": 0.3, "weight_decay": 0.0},
        {"params": [module[1].weight], "lr": 0.4},
    ]
    settings = OptimizerSettings.model_validate(settings_of(torch.optim.AdamW(groups, lr=0.1), module))
    assert (settings.lr, settings.weight_decay) == (0.1, 0.01)
    first, second = settings.groups
    assert (first.parameters, first.lr, first.weight_decay) == (("1.bias",), 0.3, 0.0)
    assert (second.parameters, second.lr, second.weight_decay) == (("1.weight",), 0.4, 0.01)


def test_a_group_without_parameters_is_none() -> None:
    module = nn.Linear(3, 2, bias=False)
    groups = [{"params": module.parameters()}, {"params": [], "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    settings = OptimizerSettings.model_validate(settings_of(torch.optim.AdamW(groups, lr=0.1), module))
    assert settings.groups == ()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_name_means_torchs_defaults(name: str) -> None:
    module = nn.Linear(3, 2)
    settings = settings_of(name, module)
    OptimizerSettings.model_validate(settings)
    torchs = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop"}.get(name)
    if torchs:
        assert settings_of(torchs, module) == settings
        assert settings == settings_of(getattr(torch.optim, torchs)(module.parameters()), module)


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def scheduled(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


class Own(torch.optim.SGD):
    """May move otherwise than its base."""


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1), "optimizer: holds parameters of another module"),
        (lambda m: torch.optim.SGD([m.bias], 0.1), "optimizer: does not hold weight; add it, or freeze it"),
        (lambda m: torch.optim.NAdam(m.parameters()), "NAdam is not one that workers have; use SGD, Adam, AdamW, Adag"),
        (lambda m: Own(m.parameters(), 0.1), "optimizer: Own is not one that workers have; use SGD"),
        (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), "Adam with amsgrad=True is not one that workers"),
        (lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, 0.5), "SGD with dampening=0.5 is not one that workers"),
        (lambda m: torch.optim.SGD(m.parameters(), maximize=True), "SGD with maximize=True is not one that workers"),
        (stepped, "optimizer: has taken steps already, and its state cannot be taken along; make a new one"),
        (scheduled, "optimizer: has a scheduler; leave it out and name optimizer.schedule"),
        (
            lambda m: torch.optim.SGD([{"params": [m.weight]}, {"params": [m.bias], "momentum": 0.5}], 0.1),
            "optimizer: its parameter groups differ in more than lr and weight_decay; unify them",
        ),
        (lambda _: "adamax", "optimizer: 'adamax' should be one of sgd, adam, adamw, adagrad, row-adagrad, rmsprop, l"),
        (lambda _: torch.optim.SGD, "optimizer: type should be a name, settings, or a torch.optim instance"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_sentence(make: Callable[[Any], Any], sentence: str) -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(JobError) as error:
        settings_of(make(module), module)
    (fault,) = error.value.faults
    assert sentence in fault


def test_frozen_parameters_need_not_be_held() -> None:
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    assert settings_of(torch.optim.SGD([module.bias], lr=0.1), module)["name"] == "sgd"
