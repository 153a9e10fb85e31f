"""Copy modules of any kind, reach their tensors by name, and undo what computes a weight from other parameters.

A module with parametrizations (`torch.nn.utils.parametrize`) has a class of its own, which torch refuses to pickle; one
with a hook of the older `torch.nn.utils.weight_norm` or `spectral_norm` holds a computed weight, which torch refuses to
copy. Copies made here can be copied, and pickled by `travel`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from idletrain.nn import scripted


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its name."""
    owner, _, short = name.rpartition(".")
    holder = scripted.submodule(module, owner)
    tensor = holder._parameters[short] if short in holder._parameters else holder._buffers[short]
    assert tensor is not None
    return tensor


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a copy of a tensor in a buffer's place, wherever the module has it; whole numbers are rounded."""
    former = tensor_of(module, name)
    value = (value if former.is_floating_point() else value.round()).to(former.dtype, copy=True)
    for owner in module.modules():
        for short, buffer in owner._buffers.items():
            if buffer is former:
                owner._buffers[short] = value


def call_with(
    module: nn.Module, values: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a module with other parameters and buffers, each wherever the module has the one of that name.

    torch's own way to do that leaves a wrong tensor in a layer that the module holds under two names.
    """
    places: defaultdict[int, list[str]] = defaultdict(list)
    for path, layer in module.named_modules():  # each layer under its first name alone
        for short, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            places[id(tensor)].append(f"{path}.{short}" if path else short)
    everywhere = {place: value for name, value in values.items() for place in places[id(tensor_of(module, name))]}
    return functional_call(module, everywhere, tuple(args), dict(kwargs or {}), tie_weights=False)


def in_training(module: nn.Module) -> nn.Module:
    """Put a module into training mode; return it.

    Where it is in that mode already, its layers stay as they are: a user may have put some of them into evaluation
    mode, such as BatchNorm whose statistics are to stay.
    """
    return module if module.training else module.train()


def stays_evaluated(module: nn.Module, layer: nn.Module) -> bool:
    """Return True if a user has put a layer of a module in training mode into evaluation mode."""
    return module.training and not layer.training


# --- copies -----------------------------------------------------------------------------------------------------------


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy that can be copied and pickled.

    Args:
        module: The module.
        memo: What to put in the place of which object, by `id`.
    """
    memo = dict(memo or {})
    for layer in module.modules():
        for value in (*layer._buffers.values(), *vars(layer).values()):
            if isinstance(value, UninitializedBuffer):
                empty: Any = UninitializedBuffer  # whose arguments torch does not declare
                memo.setdefault(id(value), empty(device=value.device, dtype=value.dtype))
            elif isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    scripted.put_copies(module, memo)
    result = copy.deepcopy(module, memo)
    for layer in result.modules():
        if parametrize.is_parametrized(layer):
            layer.__class__ = parametrize.type_before_parametrizations(layer)
            _dress(layer, tuple(layer.parametrizations))  # type: ignore[arg-type]
    return result


def _dress(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Give a layer a class that can be pickled and that computes the tensors of these names, as `parametrize` does."""
    parametrize._inject_new_class(layer)
    type(layer).__reduce_ex__ = _reduce  # type: ignore[assignment, method-assign]
    for name in names:
        parametrize._inject_property(layer, name)


def _reduce(layer: nn.Module, _protocol: Any) -> tuple[Any, ...]:
    names = tuple(layer.parametrizations)  # type: ignore[arg-type]
    cls = parametrize.type_before_parametrizations(layer)
    return _rebuild, (cls, names), cls.__getstate__(layer)  # type: ignore[call-arg]


def _rebuild(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    layer = cls.__new__(cls)
    vars(layer).update(_parameters={}, _buffers={}, _modules={})  # in which `parametrize` looks for the names
    _dress(layer, names)
    return layer


# --- computed weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComputedWeight:
    """A tensor that a layer computes from other parameters.

    Attributes:
        layer: The layer.
        path: Its name in the module.
        short: The tensor's name in the layer.
        sources: Names of the parameters in the module.
        kinds: Names of the classes that compute it.
    """

    layer: nn.Module
    path: str
    short: str
    sources: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path}.{self.short}" if self.path else self.short

    @property
    def has_fixed_length(self) -> bool:
        """Return True if rows of the last source have the length that the first one says (weight_norm)."""
        return self.kinds in (("WeightNorm",), ("_WeightNorm",))


def computed_weights(module: nn.Module) -> list[ComputedWeight]:
    """Return every weight with a parametrization, or with a hook of the older weight_norm or spectral_norm."""
    return [
        ComputedWeight(layer, path, short, tuple(f"{path}.{s}" if path else s for s in sources), kinds)
        for path, layer in module.named_modules()
        for short, sources, kinds in (*_parametrized(layer), *_hooked(layer))
    ]


def _parametrized(layer: nn.Module) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    if parametrize.is_parametrized(layer):
        for short, chain in layer.parametrizations.items():  # type: ignore[operator, union-attr]
            names = tuple(f"parametrizations.{short}.{own}" for own, _ in chain.named_parameters(recurse=False))
            yield short, names, tuple(type(part).__name__ for part in chain)


def _hooked(layer: nn.Module) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield hook.name, (f"{hook.name}_g", f"{hook.name}_v"), ("WeightNorm",)
        elif isinstance(hook, SpectralNorm):
            yield hook.name, (f"{hook.name}_orig",), ("SpectralNorm",)
