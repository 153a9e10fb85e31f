"""Copy what `torch.jit` has compiled with other tensors in their places, and make the bytes by which it travels.

Copies that torch makes of a compiled module have no parameters that an optimizer takes, and pickle refuses both modules
and functions.
"""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution

Place = tuple[str, str, str]  # a layer's name, `_parameters` or `_buffers`, and a tensor's name in it


def is_scripted(layer: Any) -> bool:
    """Return True for a module that is compiled by `torch.jit.script` or `torch.jit.trace`."""
    return isinstance(layer, torch.jit.ScriptModule)


def scripted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled layers of a module by name; the module itself has the name ""."""
    result: dict[str, nn.Module] = {}
    for name, layer in module.named_modules():
        if is_scripted(layer) and not any(name.startswith(f"{outer}.") or not outer for outer in result):
            result[name] = layer
    return result


def submodule(module: nn.Module, name: str) -> nn.Module:
    """Return a layer of a module, which may be compiled, by its name."""
    return nn.Module.get_submodule(module, name)  # compiled modules refuse their own


def unoptimized() -> AbstractContextManager[None]:
    """Run compiled code as it was written: what the compiler makes of it after a few calls has other bits."""
    return optimized_execution(False)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function or method, which may be compiled."""
    if not isinstance(function, torch._C.ScriptMethod | torch.jit.ScriptFunction):
        return list(inspect.signature(function).parameters.values())
    schema: Any = function.schema
    arguments = schema.arguments[isinstance(function, torch._C.ScriptMethod) :]
    return [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in arguments
    ]


class ScriptedAttributes(Mapping[str, Any]):
    """The attributes of a compiled layer that are no parameters, buffers or modules; they can be set.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        own: Any = layer  # whose attributes torch does not declare
        others = {"training", "_is_full_backward_hook", *own._parameters.keys(), *own._buffers.keys()}
        self._names = [name for name in own._concrete_type.get_attributes() if name not in others]

    def __getitem__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._layer, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- copies -----------------------------------------------------------------------------------------------------------


def put_copies(module: nn.Module, memo: dict[int, Any]) -> None:
    """Put copies of what is compiled in a module into the memo of a deep copy.

    Args:
        module: The module.
        memo: What to put in the place of which object, by `id`; the copies and their tensors are added.
    """
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value
    for layer in scripted_layers(module).values():
        tensors = _tensors(layer)
        for tensor in tensors.values():
            if id(tensor) not in memo:
                memo[id(tensor)] = _leaf(tensor)
        memo[id(layer)] = _with_tensors(layer, {place: memo[id(tensor)] for place, tensor in tensors.items()})


def _tensors(layer: nn.Module) -> dict[Place, Tensor]:
    """Return the parameters and buffers of a compiled layer by their place."""
    return {
        (path, kind, short): tensor
        for path, own in layer.named_modules(remove_duplicate=False)
        for kind in ("_parameters", "_buffers")
        for short, tensor in getattr(own, kind).items()
        if tensor is not None
    }


def _leaf(tensor: Tensor) -> Tensor:
    value = tensor.detach().clone()
    return nn.Parameter(value, requires_grad=True) if tensor.requires_grad else value


def _with_tensors(layer: nn.Module, tensors: Mapping[Place, Tensor]) -> nn.Module:
    """Return a copy of a compiled layer with these tensors in their places."""
    with torch.no_grad():
        result = copy.deepcopy(layer)
    return _put(result, tensors)


def _put(layer: nn.Module, tensors: Mapping[Place, Tensor]) -> nn.Module:
    for (path, kind, short), tensor in tensors.items():
        getattr(submodule(layer, path), kind)[short] = tensor
    return layer


# --- bytes ------------------------------------------------------------------------------------------------------------


def reduced_scripted(compiled: Any) -> tuple[Any, ...] | None:
    """Return what pickle makes of a compiled module or function, as `__reduce__` does; None for all others.

    A module's tensors are beside its code: they may have no memory, or have another place, too.
    """
    if isinstance(compiled, torch.jit.ScriptFunction):
        function: Any = compiled
        return TravelledFunction, (function.save_to_buffer(),)
    if not is_scripted(compiled):
        return None
    tensors = _tensors(compiled)
    bare: Any = _with_tensors(compiled, dict.fromkeys(tensors, torch.empty(0)))
    return _rebuilt, (bare.save_to_buffer(), tensors)


class TravelledFunction:
    """A compiled function that was pickled.

    Args:
        code: What `torch.jit` has saved of it.
    """

    def __init__(self, code: bytes) -> None:
        self._code, self._forward = code, _loaded(code).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, _memo: Any) -> TravelledFunction:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return TravelledFunction, (self._code,)


def _rebuilt(code: bytes, tensors: Mapping[Place, Tensor]) -> nn.Module:
    return _put(_loaded(code), tensors)


def _loaded(code: bytes) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of all of `torch.jit`
        module: nn.Module = torch.jit.load(io.BytesIO(code))  # type: ignore[no-untyped-call]
    return module
