"""Profile a network by running each unit on its own, so that memory for the largest unit is enough.

The module runs forward without gradients. Each unit is also run forward and backward when its turn comes: twice for
its CPU seconds (without waits and other processes) or GPU seconds, once for the bytes that it saves and needs.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from idletrain.nn.data.batches import call, device_of, fields_of, map_parts, tensors_of
from idletrain.nn.outofcore.executing.resident import ResidentPeak, give_back_pages, release_freed_memory
from idletrain.nn.outofcore.executing.saved_tensors import SMALL_BYTES
from idletrain.nn.outofcore.planning.profile import Unit
from idletrain.nn.units import Installed, Piece

LOSS = "loss"
UNSEEN_BYTES = 1 << 20  # fewer bytes beside the tensors are page remainders and Python's own
TIMED = 2  # timed runs of a unit; the quickest counts


def measure_units(
    module: nn.Module,
    pieces: Sequence[Piece],
    inputs: Any,
    loss: Callable[[Any], Tensor],
    state_slots: int = 0,
    *,
    by_kernel: bool = False,
) -> tuple[list[Piece], tuple[Unit, ...]]:
    """Measure every unit's seconds and bytes.

    Args:
        module: The network in training mode; its buffers and torch's random state are restored.
        pieces: Its units.
        inputs: A batch.
        loss: Computes the loss from its outputs.
        state_slots: Tensors of optimizer state per parameter.
        by_kernel: Whether to add memory that only the kernel sees (convolutions copy their inputs to other layouts). It
            counts the whole process, so no other thread may allocate. The C library is set to return freed memory.

    Returns:
        The pieces in the order in which they ran, without those that ran never or twice, which stay outside the plan;
        and a unit for each, with one more for the loss.
    """
    fixed = {p.untyped_storage()._cdata for p in module.parameters()}
    calls: list[int] = []
    units: dict[int, Unit] = {}

    def run(p: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(p)
        trial = _Trial(pieces[p].name, forward, args, kwargs, list(pieces[p].parameters()), fixed, by_kernel)
        units[p], out = trial.unit(state_slots)
        if any(map(_carries, tree_flatten((args, kwargs))[0])):  # which a second forward pass would write to again
            units[p] = replace(units[p], modes="KS")
        return out

    if by_kernel:
        release_freed_memory()
    with left_alone(module, inputs), torch.no_grad():
        installed = Installed(pieces, [(p, p) for p in range(len(pieces))], run)
        try:
            outputs = call(module, inputs)
        finally:
            installed.remove()
        last = _Trial(LOSS, loss, (outputs,), {}, [], fixed, by_kernel).unit(0)[0]
    once = [p for p in calls if calls.count(p) == 1]
    # A chain's piece can be joined to the one before only if it also ran right after it.
    follows = [i > 0 and pieces[p].follows and once[i - 1] == p - 1 for i, p in enumerate(once)]
    measured = [replace(units[p], follows=f) for p, f in zip(once, follows, strict=True)]
    return [pieces[p] for p in once], (*measured, replace(last, follows=False, modes="K"))


@contextlib.contextmanager
def left_alone(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Restore the module's buffers and torch's random state on exit."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    device = device_of(inputs)
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def across_batch(module: nn.Module, loss: Callable[[Any, Any], Tensor], outputs: Any, target: Any) -> str:
    """Return the reason why a batch cannot be cut into micro-batches, or "" if it can.

    Args:
        module: The network.
        loss: The loss, which must be a mean over samples; tried on halves of the batch.
        outputs: The network's outputs for the batch.
        target: The batch's target.
    """
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return "outputs or labels are more than one tensor"
    for name, inner in module.named_modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.training:
            return f"{name} (BatchNorm) uses the statistics of the whole batch"
    half = len(outputs) // 2
    if half:
        whole = loss(outputs[: 2 * half], target[: 2 * half])
        parts = (loss(outputs[:half], target[:half]) + loss(outputs[half : 2 * half], target[half : 2 * half])) / 2
        if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
            return "the loss is not a mean over the batch's samples"
    return ""


class _Trial:
    """Runs one unit forward and backward, for time and for memory, and forward without saving."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: list[nn.Parameter],
        fixed: set[int],
        by_kernel: bool,
    ) -> None:
        self._name, self._forward, self._fixed, self._by_kernel = name, forward, fixed, by_kernel
        self._arguments = args, kwargs
        self._parameters = [p for p in parameters if p.requires_grad]
        self._values = sum(p.nbytes for p in parameters)
        tensors = tensors_in(self._arguments)
        self._device = tensors[0].device
        self._entering = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        self._make_memory = _DeviceMemory if self._device.type == "cuda" else lambda: _HostMemory(by_kernel)

    def unit(self, state_slots: int) -> tuple[Unit, Any]:
        """Measure the unit; return it and its outputs."""
        forward_seconds, recompute_seconds, backward_seconds = (min(runs) for runs in zip(*self._runs(), strict=True))
        copies, leaves, entering = self._copied()
        with self._make_memory() as memory:
            out, saved, _ = self._run(copies)
            saving = memory.peak_bytes
            backward = self._backward(out, leaves, memory)
        leaving = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(out)}
        inner = sum(size for key, size in saved.items() if key not in entering and key not in leaving)
        del out, leaves, copies
        gradients = sum(p.nbytes for p in self._parameters)
        with self._make_memory() as memory:
            args, kwargs = self._arguments
            out = self._forward(*args, **kwargs)
            bare = memory.peak_bytes
        unit = Unit(
            name=self._name,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            recompute_seconds=recompute_seconds,
            input_bytes=sum(self._entering.values()),
            output_bytes=sum(leaving.values()),
            inner_bytes=inner,
            tensors=sum(size >= SMALL_BYTES for size in saved.values()),
            saves_input=bool(entering & saved.keys()),
            saves_output=bool(leaving.keys() & saved.keys()),
            forward_bytes=bare,
            saving_bytes=saving,
            backward_bytes=max(0, backward - gradients),
            parameter_bytes=self._values,
            state_bytes=state_slots * gradients,
        )
        return unit, out

    def _copied(self) -> tuple[Any, list[Tensor], set[int]]:
        """Copy the arguments, so that the unit may change them in place; return copies, their leaves and storages."""
        leaves: list[Tensor] = []
        storages: set[int] = set()

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copied = value
            if value.is_floating_point():
                leaves.append(value.detach().requires_grad_())
                copied = leaves[-1].clone()
            storages.add(copied.untyped_storage()._cdata)
            return copied

        with torch.enable_grad():
            copies = map_parts(copy, self._arguments)
        copies = tree_map(lambda leaf: deepcopy(leaf) if _carries(leaf) else leaf, copies)
        return copies, leaves, storages

    def _run(self, copies: Any) -> tuple[Any, dict[int, int], float]:
        """Run forward; return outputs, saved storages with their bytes, and the time of the last save."""
        saved: dict[int, int] = {}
        last = self._now()

        def pack(tensor: Tensor) -> Tensor:
            nonlocal last
            last = self._now()
            storage = tensor.untyped_storage()
            if storage._cdata not in self._fixed:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        args, kwargs = copies
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            return self._forward(*args, **kwargs), saved, last

    def _backward(self, out: Any, leaves: list[Tensor], memory: _HostMemory | _DeviceMemory | None = None) -> int:
        """Run backward from all outputs; return the bytes that it needed beside the saved tensors."""
        outs = [t for t in tensors_in(out) if t.requires_grad]
        if not outs:
            return 0
        with torch.enable_grad():
            end: Tensor = _End.apply(*outs)  # type: ignore[no-untyped-call]
        before = memory.restart() if memory else 0
        torch.autograd.grad(end, [*leaves, *self._parameters], allow_unused=True)
        return max(0, memory.peak_bytes - before - sum(t.nbytes for t in outs)) if memory else 0

    def _runs(self) -> list[tuple[float, float, float]]:
        """Time the unit: seconds forward, until the last tensor is saved, and backward, for each run.

        Must come before memory is measured, as a kernel's first run takes memory for its code.
        """
        return [self._seconds() for _ in range(TIMED)]

    def _seconds(self) -> tuple[float, float, float]:
        if self._by_kernel:  # a step finds no free pages either, and zeroing new ones takes up to half of its time
            give_back_pages()
        copies, leaves, _ = self._copied()
        started = self._now()
        out, _, last = self._run(copies)
        middle = self._now()
        self._backward(out, leaves)
        return middle - started, min(last, middle) - started, self._now() - middle

    def _now(self) -> float:
        if self._device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _carries(value: Any) -> bool:
    """Return whether an argument is no container of tensors, and a unit may write to it, as to a cache of keys."""
    is_plain = isinstance(value, Tensor | nn.Module | type) or callable(value) or fields_of(value) is not None
    return hasattr(value, "__dict__") and not is_plain


class _End(torch.autograd.Function):
    """Turn outputs into a scalar whose gradients are ones (passing gradients to torch would import sympy: 40 MB)."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in outs]
        return torch.zeros((), device=outs[0].device)

    @staticmethod
    def backward(ctx: Any, *_grad: Tensor) -> Any:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


class _HostMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors made in its context, and with `by_kernel` also other memory."""

    def __init__(self, by_kernel: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._bytes = self._peak = self._start = 0
        self._by_kernel = by_kernel
        if by_kernel:
            release_freed_memory()
        self._resident = ResidentPeak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it: 80 MB

    def restart(self) -> int:
        """Count the peak from now on; return the live bytes."""
        self._peak = self._start = self._bytes
        self._resident = ResidentPeak()
        return self._bytes

    @property
    def peak_bytes(self) -> int:
        unseen = self._start + self._resident.bytes - self._peak if self._by_kernel else 0
        return self._peak + (unseen if unseen > UNSEEN_BYTES else 0)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        entered = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live and key not in entered:
                self._live[key] = storage.nbytes(), weakref.ref(storage, functools.partial(self._on_freed, key))
                self._bytes += storage.nbytes()
        self._peak = max(self._peak, self._bytes)
        return out

    def _on_freed(self, key: int, _ref: Any) -> None:
        self._bytes -= self._live.pop(key)[0]


class _DeviceMemory:
    """Counts the bytes of a GPU's tensors by its allocator."""

    def __enter__(self) -> _DeviceMemory:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._start = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_raised: Any) -> None:
        torch.cuda.synchronize()

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated() - self._start)

    def restart(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated() - self._start)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested arguments or results."""
    return [tensor for leaf in tree_flatten(tree)[0] for tensor in tensors_of(leaf)]
