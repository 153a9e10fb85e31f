"""Find each parameter's learning rate and weight decay, from the job's parameter groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from idletrain.errors import JobError
from idletrain.optimizer_settings import OptimizerSettings

WORDS = ("bias", "norm")  # which stand for kinds of parameters, not for names


@dataclass(frozen=True)
class ParameterSettings:
    """One parameter's learning rate, before the schedule, and its weight decay."""

    lr: float
    weight_decay: float

    def times(self, factor: float) -> ParameterSettings:
        """Return the settings with another learning rate by which weights decay as before."""
        return self if factor == 1 else ParameterSettings(self.lr * factor, self.weight_decay / factor)


def settings_of(module: nn.Module, names: Iterable[str], optimizer: OptimizerSettings) -> list[ParameterSettings]:
    """Return each named parameter's settings: those of the first group that fits it, else the optimizer's."""
    norms = norm_parameters(module)
    settings = []
    for name in names:
        group = next((g for g in optimizer.groups if any(fits(p, name, norms) for p in g.parameters)), None)
        lr = optimizer.lr if group is None or group.lr is None else group.lr
        decay = optimizer.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        settings.append(ParameterSettings(lr, decay))
    return settings


def fits(pattern: str, name: str, norms: Collection[str]) -> bool:
    """Return whether a parameter is what an entry of a group means.

    Args:
        pattern: A name, a pattern, or `bias` or `norm`.
        name: The parameter's name.
        norms: Names of the parameters of normalization layers.
    """
    if pattern == "bias":
        return "bias" in name.rpartition(".")[2]
    if pattern == "norm":
        return name in norms
    return name == pattern or fnmatchcase(name, pattern)


def norm_parameters(module: nn.Module) -> set[str]:
    """Return the names of all parameters that normalization layers hold, which are those with norm in their class."""
    return {
        f"{place}.{name}" if place else name
        for place, layer in module.named_modules()
        if "norm" in type(layer).__name__.lower()
        for name, _ in layer.named_parameters(recurse=False)
    }


def check(module: nn.Module, optimizer: OptimizerSettings) -> None:
    """Check that every entry of every group fits a parameter.

    Raises:
        JobError: one fits none.
    """
    names, norms = [name for name, _ in module.named_parameters()], norm_parameters(module)
    faults = [
        f"training.optimizer.groups.{number}.parameters: {pattern!r} fits no parameter; names are like {names[0]}"
        for number, group in enumerate(optimizer.groups)
        for pattern in group.parameters
        if pattern not in WORDS and not any(fits(pattern, name, norms) for name in names)
    ]
    if faults and names:
        raise JobError(faults)
