"""Compute in bfloat16 with parameters of float32, in compiled code, and in the memory format that a module has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from idletrain.nn import compiler
from idletrain.nn.data.batches import arguments, device_of, map_parts
from idletrain.nn.ist.modules import copied, tensor_of
from idletrain.nn.scripted import unoptimized

Precision = Literal["float32", "bfloat16"]
HALF = (torch.bfloat16, torch.float16)


def is_half(module: nn.Module) -> bool:
    """Return True if a module has parameters of 16 bits."""
    return any(p.dtype in HALF for p in module.parameters())


def in_float32(module: nn.Module) -> nn.Module:
    """Return the module, or a copy with float32 in the place of parameters and buffers of 16 bits."""
    if not is_half(module):
        return module
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
        for p in module.parameters()
        if p.dtype in HALF
    }
    memo |= {id(b): b.detach().float() for b in module.buffers() if b.dtype in HALF}
    return copied(module, memo)


def as_given(module: nn.Module, given: nn.Module) -> nn.Module:
    """Return a trained module whose tensors have the number formats and memory formats of those that a user gave."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        try:
            former = tensor_of(given, name)
        except (AttributeError, KeyError):  # a lazy layer has got it since
            continue
        if isinstance(former, UninitializedParameter | UninitializedBuffer) or former.shape != tensor.shape:
            continue
        if (former.dtype, former.stride()) != (tensor.dtype, tensor.stride()):
            tensor.data = torch.empty_like(former, device=tensor.device).copy_(tensor.detach())
    return module


def memory_format(module: nn.Module) -> torch.memory_format:
    """Return the memory format of a module's kernels of two dimensions: channels last if any is in that one alone."""
    last = any(
        p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
        for p in module.parameters()
    )
    return torch.channels_last if last else torch.contiguous_format


class Forward:
    """Compute a module's outputs in a precision, as floats of 32 bits, by compiled code or without.

    Compiled code is found again by shapes, so that the subnets of all rounds are compiled once for each width.

    Args:
        module: The module.
        precision: `float32`, or `bfloat16` for `torch.autocast`.
        compiled: Whether to compile it.
        format: The memory format of its inputs of four dimensions.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        *,
        compiled: bool = False,
        format: torch.memory_format = torch.contiguous_format,  # noqa: A002
    ) -> None:
        self._module, self._is_half, self._format = module, precision == "bfloat16", format
        self._run: Callable[..., Any] = compiler.compiled(module) if compiled else module

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs of a batch."""
        if self._format != torch.contiguous_format:
            inputs = map_parts(self._formatted, inputs)
        args, kwargs = arguments(self._module, inputs)
        with unoptimized():
            if not self._is_half:
                return self._run(*args, **kwargs)
            with torch.autocast(device_of(inputs).type, torch.bfloat16):
                outputs = self._run(*args, **kwargs)
        return map_parts(_widened, outputs)

    def _formatted(self, part: Any) -> Any:
        is_image = isinstance(part, Tensor) and part.ndim == 4
        return part.contiguous(memory_format=self._format) if is_image else part


def _widened(part: Any) -> Any:
    return part.float() if isinstance(part, Tensor) and part.dtype in HALF else part
