"""Run a module to see which shapes it makes: on the meta device, or with values where its forward looks at them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from idletrain.errors import JobError, user_code
from idletrain.nn.data.batches import call, device_of, fresh, map_parts, uneven
from idletrain.nn.ist.any_width import take_widths
from idletrain.nn.ist.groups import leave_out_statistics, weightless, without_statistics


def run_for_shapes(module: nn.Module, inputs: Any) -> Any:
    """Run a module on inputs on its device, the meta device or another, where what its forward creates is, too.

    Torch's random state stays as it was.

    Raises:
        JobError: it does not run; on the meta device that a forward does not which looks at values, as .item() and if
            do.
    """
    with (
        user_code("model: does not run on a few samples (", ")"),
        torch.device(device_of(inputs)),
        torch.random.fork_rng(devices=[]),
    ):
        return call(module, fresh(inputs))


def for_trials(module: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """Return a copy of a module and a batch of two samples, to try which of its neurons it runs without.

    A batch whose parts differ in their number of rows, such as joined graphs, stays whole. Module and batch are on the
    meta device, where a run takes neither time nor memory; or here, with their values, if the module does not run
    without values. BatchNorm uses batch statistics; layers take their widths from their parameters.

    Args:
        module: The module.
        inputs: A few samples.
    """
    joined = bool(uneven(inputs))  # graphs, whose edges name rows that two rows would not have
    on_meta = take_widths(leave_out_statistics(weightless(module)))
    sample = map_parts((lambda part: part.to("meta")) if joined else _two_on_meta, inputs)
    try:
        with torch.no_grad(), ShapeMemory():
            run_for_shapes(on_meta, sample)
    except JobError:
        module = take_widths(without_statistics(module))
        return module, inputs if joined else map_parts(_two, inputs)
    return on_meta, sample


def _two(part: Any) -> Any:
    return part[:2] if isinstance(part, Tensor) and part.ndim else part


def _two_on_meta(part: Any) -> Any:
    if not isinstance(part, Tensor) or not part.ndim:
        return part.to("meta")
    return torch.empty((2, *part.shape[1:]), dtype=part.dtype, device="meta")


class ShapeMemory(TorchDispatchMode):
    """Look up what operators make on the meta device, of inputs of the same shapes and the same other arguments.

    Most have no kernel there, but code in Python that takes longer: that of BatchNorm takes a millisecond.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, op: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if op.is_view or op._schema.is_mutable:
            return op(*args, **kwargs)
        try:
            key = op, _form(args), _form(list(kwargs.items()))
        except _NoFormError:
            return op(*args, **kwargs)
        if (form := self._made.get(key)) is not None:
            return _of_form(form)
        result = op(*args, **kwargs)
        with contextlib.suppress(_NoFormError):
            self._made[key] = _form(result)
        return result


class _NoFormError(Exception):
    """Something has more than a shape."""


def _form(value: Any) -> Any:
    """Return what tells a value, or all that a tensor on the meta device is.

    Raises:
        _NoFormError: it has a tensor with values, or what nothing is known of.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.device.type != "meta" or value.layout != torch.strided:
            raise _NoFormError
        return Tensor, tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return type(value), tuple(_form(part) for part in value)
    if value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return type(value), value
    raise _NoFormError


def _of_form(form: Any) -> Any:
    kind, *rest = form
    if kind is Tensor:
        shape, stride, dtype = rest
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return kind(_of_form(part) for part in rest[0]) if kind in (tuple, list) else rest[0]
