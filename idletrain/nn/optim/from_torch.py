"""Read a job's optimizer from what a PyTorch user has: a name, or an instance of a class of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.optimizer_settings import OptimizerSettings

# For each class: its name in a job, settings under other names in a job, and settings that must have one value.
TORCH_OPTIMIZERS: dict[type[torch.optim.Optimizer], tuple[str, dict[str, str], dict[str, Any]]] = {
    torch.optim.SGD: ("sgd", {}, {"dampening": 0}),
    torch.optim.Adam: ("adam", {}, {"amsgrad": False, "decoupled_weight_decay": False}),
    torch.optim.AdamW: ("adamw", {}, {"amsgrad": False, "decoupled_weight_decay": True}),
    torch.optim.Adagrad: ("adagrad", {"initial_accumulator_value": "start"}, {"lr_decay": 0}),
    torch.optim.RMSprop: ("rmsprop", {}, {"centered": False}),
}
TAKEN = ("lr", "momentum", "nesterov", "weight_decay", "betas", "alpha", "eps")
BY_GROUP = ("lr", "weight_decay")  # what parameter groups may differ in
LION = {"name": "lion", "lr": 1e-4, "betas": [0.9, 0.99]}  # its authors' defaults; torch has none
ROW_ADAGRAD = {"name": "row-adagrad", "lr": 0.01}  # the lr of torch's Adagrad


def settings_of(optimizer: str | Mapping[str, Any] | torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the fields of `training.optimizer` for what `fit` was given.

    Args:
        optimizer: A name, for torch's default settings; fields of a job; or a fresh instance for the module.
        module: The module to train.

    Raises:
        JobError: there is no such optimizer, or the instance has settings or parameters that cannot be used.
    """
    if isinstance(optimizer, str):
        return _by_name(optimizer.lower())
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer: {type(optimizer).__name__} should be a name, settings, or a torch.optim instance")
    if type(optimizer) not in TORCH_OPTIMIZERS:
        known = ", ".join(cls.__name__ for cls in TORCH_OPTIMIZERS)
        raise JobError(f"optimizer: {type(optimizer).__name__} is not one that workers have; use {known} or lion")
    return _from_instance(optimizer, module)


def _by_name(name: str) -> dict[str, Any]:
    """Return a named optimizer with torch's default settings."""
    own = {settings["name"]: settings for settings in (LION, ROW_ADAGRAD)}
    if name in own:
        return dict(own[name])
    cls: Any
    for cls, (ours, _, _) in TORCH_OPTIMIZERS.items():
        if name == ours:
            return _group_settings(cls, cls([nn.Parameter(torch.zeros(()))]).param_groups[0])
    known = ", ".join(get_args(OptimizerSettings.model_fields["name"].annotation))
    raise JobError(f"optimizer: {name!r} should be one of {known}")


def _from_instance(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an instance's settings; each parameter group after the first becomes one by its parameters' names."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= names.keys():
        raise JobError("optimizer: holds parameters of another module; make it from module.parameters()")
    if missing := [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]:
        raise JobError(
            f"optimizer: does not hold {missing[0]}{' and others' if missing[1:] else ''}; "
            "add it, or freeze it with requires_grad_(False)"
        )
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad's state begins with itself
        raise JobError("optimizer: has taken steps already, and its state cannot be taken along; make a new one")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise JobError("optimizer: has a scheduler; leave it out and name optimizer.schedule, as in a job file")
    first, *others = [_group_settings(type(optimizer), group) for group in optimizer.param_groups]
    groups = []
    for group, settings in zip(optimizer.param_groups[1:], others, strict=True):
        if not group["params"]:
            continue
        if {**settings, **{field: first[field] for field in BY_GROUP}} != first:
            raise JobError(f"optimizer: its parameter groups differ in more than {' and '.join(BY_GROUP)}; unify them")
        own = {field: settings[field] for field in BY_GROUP}
        groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], **own})
    return first | ({"groups": groups} if groups else {})


def _group_settings(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings as fields of a job."""
    name, renamed, required = TORCH_OPTIMIZERS[cls]
    for field, value in {"maximize": False, **required}.items():
        if group.get(field, value) != value:
            raise JobError(f"optimizer: {cls.__name__} with {field}={group[field]} is not one that workers have")
    settings = {field: _plain(group[field]) for field in TAKEN if field in group}
    return {"name": name, **settings, **{ours: float(group[theirs]) for theirs, ours in renamed.items()}}


def _plain(value: Any) -> Any:
    """Return a setting without tensors, as a job has it."""
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, bool) else float(value)
