"""A network's profile, by running every unit on its own: no more memory than the largest unit is needed.

The module runs forward without gradients; each unit, when its turn comes, is run forward and backward beside it, twice
for its seconds of CPU time (waits and busy neighbours do not count) or of GPU time, once for what it saves and needs.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from idletrain.nn.outofcore.executing.resident import ResidentPeak, release_freed_memory
from idletrain.nn.outofcore.executing.saved_tensors import SMALL_BYTES
from idletrain.nn.outofcore.planning.profile import Unit
from idletrain.nn.units import Installed, Piece

LOSS = "loss"
UNSEEN_BYTES = 1 << 20  # less than that beside the tensors is pages' ends and Python's own
TIMED = 2  # runs of a unit, of which the quickest counts


def measure_units(
    module: nn.Module,
    pieces: Sequence[Piece],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    state_slots: int = 0,
    *,
    by_kernel: bool = False,
) -> tuple[list[Piece], tuple[Unit, ...]]:
    """Measure every unit.

    Args:
        module: In training mode; its buffers and torch's random state are left as they were.
        pieces: Its units.
        inputs: A batch.
        loss: The loss of its outputs.
        state_slots: Tensors of optimizer state per parameter.
        by_kernel: Whether the kernel counts what torch does not see (convolutions copy their inputs to other layouts).
            It counts the whole process: not where other threads come and go with memory. The C library is set to give
            freed memory back.

    Returns:
        The pieces in the order in which they ran (one that did not run, or ran twice, is left out and so stays
        outside the plan), and a unit for each, with one more for the loss.
    """
    fixed = {p.untyped_storage()._cdata for p in module.parameters()}
    calls: list[int] = []
    units: dict[int, Unit] = {}

    def run(p: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(p)
        trial = _Trial(pieces[p].name, forward, args, kwargs, list(pieces[p].parameters()), fixed, by_kernel)
        units[p], out = trial.unit(state_slots)
        return out

    if by_kernel:
        release_freed_memory()
    with left_alone(module, inputs), torch.no_grad():
        installed = Installed(pieces, [(p, p) for p in range(len(pieces))], run)
        try:
            outputs = module(inputs)
        finally:
            installed.remove()
        last = _Trial(LOSS, loss, (outputs,), {}, [], fixed, by_kernel).unit(0)[0]
    once = [p for p in calls if calls.count(p) == 1]
    # A chain's piece is one with the next only if that is the next to run.
    follows = [i > 0 and pieces[p].follows and once[i - 1] == p - 1 for i, p in enumerate(once)]
    measured = [replace(units[p], follows=f) for p, f in zip(once, follows, strict=True)]
    return [pieces[p] for p in once], (*measured, replace(last, follows=False, modes="K"))


@contextlib.contextmanager
def left_alone(module: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Leaves buffers and random state as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def across_batch(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, labels: Tensor) -> str:
    """Why a batch cannot be cut into micro-batches, or "" if it can.

    Args:
        module: The network.
        loss: Tried on halves of `outputs` `[B, ...]` and `labels` `[B, ...]`: it must be the mean over samples.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.training:
            return f"{name} (BatchNorm) uses the statistics of the whole batch"
    half = len(outputs) // 2
    if half:
        whole = loss(outputs[: 2 * half], labels[: 2 * half])
        parts = (loss(outputs[:half], labels[:half]) + loss(outputs[half : 2 * half], labels[half : 2 * half])) / 2
        if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
            return "the loss is not a mean over the batch's samples"
    return ""


class _Trial:
    """One unit run forward and backward, for time and for memory, and forward without saving."""

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
        self._name, self._forward, self._fixed = name, forward, fixed
        self._given = args, kwargs
        self._parameters = [p for p in parameters if p.requires_grad]
        self._values = sum(p.nbytes for p in parameters)
        tensors = [t for t in tree_flatten(self._given)[0] if isinstance(t, Tensor)]
        self._device = tensors[0].device
        self._entering = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        self._make_memory = _DeviceMemory if self._device.type == "cuda" else lambda: _HostMemory(by_kernel)

    def unit(self, state_slots: int) -> tuple[Unit, Any]:
        """The unit, and what it computes from its arguments."""
        forward_seconds, recompute_seconds, backward_seconds = (min(runs) for runs in zip(*self._runs(), strict=True))
        given, leaves, entering = self._copied()
        with self._make_memory() as memory:
            out, saved, _ = self._run(given)
            saving = memory.peak_bytes
            backward = self._backward(out, leaves, memory)
        leaving = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(out)}
        inner = sum(size for key, size in saved.items() if key not in entering and key not in leaving)
        del out, leaves, given
        gradients = sum(p.nbytes for p in self._parameters)
        with self._make_memory() as memory:
            args, kwargs = self._given
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
        """The arguments as copies that are no leaves (a unit may change its input in place), their leaves, and the
        copies' storages.
        """
        leaves: list[Tensor] = []
        storages: set[int] = set()

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = value
            if value.is_floating_point():
                leaves.append(value.detach().requires_grad_())
                made = leaves[-1].clone()
            storages.add(made.untyped_storage()._cdata)
            return made

        with torch.enable_grad():
            given = tree_map(copy, self._given)
        return given, leaves, storages

    def _run(self, given: Any) -> tuple[Any, dict[int, int], float]:
        """Forward; with what it saves, and when it saved the last of it."""
        saved: dict[int, int] = {}
        last = self._now()

        def pack(tensor: Tensor) -> Tensor:
            nonlocal last
            last = self._now()
            storage = tensor.untyped_storage()
            if storage._cdata not in self._fixed:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        args, kwargs = given
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            return self._forward(*args, **kwargs), saved, last

    def _backward(self, out: Any, leaves: list[Tensor], memory: _HostMemory | _DeviceMemory | None = None) -> int:
        """Backward from all outputs; returns the bytes that it needed beside what was saved."""
        outs = [t for t in tensors_in(out) if t.requires_grad]
        if not outs:
            return 0
        with torch.enable_grad():
            end: Tensor = _End.apply(*outs)  # type: ignore[no-untyped-call]
        before = memory.start_again() if memory else 0
        torch.autograd.grad(end, [*leaves, *self._parameters], allow_unused=True)
        return max(0, memory.peak_bytes - before - sum(t.nbytes for t in outs)) if memory else 0

    def _runs(self) -> list[tuple[float, float, float]]:
        """Seconds forward, until the last tensor is saved, and backward; before memory is looked at, which the first
        run of a kernel takes for its code.
        """
        return [self._seconds() for _ in range(TIMED)]

    def _seconds(self) -> tuple[float, float, float]:
        given, leaves, _ = self._copied()
        started = self._now()
        out, _, last = self._run(given)
        middle = self._now()
        self._backward(out, leaves)
        return middle - started, min(last, middle) - started, self._now() - middle

    def _now(self) -> float:
        if self._device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _End(torch.autograd.Function):
    """A number behind a unit's outputs, whose gradients are ones (to give gradients to torch imports sympy: 40 MB)."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in outs]
        return torch.zeros((), device=outs[0].device)

    @staticmethod
    def backward(ctx: Any, *_grad: Tensor) -> Any:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


class _HostMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is on; if asked, the kernel counts what is none."""

    def __init__(self, by_kernel: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._bytes = self._most = self._start = 0
        self._by_kernel = by_kernel
        if by_kernel:
            release_freed_memory()
        self._resident = ResidentPeak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it: 80 MB

    def start_again(self) -> int:
        """Count the peak from here on; returns what is there now."""
        self._most = self._start = self._bytes
        self._resident = ResidentPeak()
        return self._bytes

    @property
    def peak_bytes(self) -> int:
        unseen = self._start + self._resident.bytes - self._most if self._by_kernel else 0
        return self._most + (unseen if unseen > UNSEEN_BYTES else 0)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        entered = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._there and key not in entered:
                self._there[key] = storage.nbytes(), weakref.ref(storage, functools.partial(self._gone, key))
                self._bytes += storage.nbytes()
        self._most = max(self._most, self._bytes)
        return out

    def _gone(self, key: int, _ref: Any) -> None:
        self._bytes -= self._there.pop(key)[0]


class _DeviceMemory:
    """The same of a GPU, as its allocator counts."""

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

    def start_again(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated() - self._start)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor)]
