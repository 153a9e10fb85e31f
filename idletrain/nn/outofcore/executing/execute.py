"""Run a module's steps by a plan, with the same bits as without one.

Each segment runs under saved-tensor hooks that keep or swap. A recomputed segment runs under torch's checkpoint as
well, which saves its input through those hooks and restores the random state. Buffers that a forward pass changes
(BatchNorm's statistics) get their earlier values back while it is recomputed, and then those of the first pass.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from idletrain.errors import RunError
from idletrain.nn.outofcore.executing.resident import release_freed_memory
from idletrain.nn.outofcore.executing.saved_tensors import OUTSIDE_SEGMENTS, SavedTensors, Swap
from idletrain.nn.outofcore.planning.simulate import Footprint
from idletrain.nn.units import Installed, Piece

# Memory that torch's checkpoint takes once per process: it reads a setting of torch's compiler and so imports it.
CHECKPOINT_BYTES = 80 << 20


class Executor:
    """Runs a module's steps by a plan until it is closed.

    Args:
        module: The module; its units' `forward` is replaced.
        pieces: Its units in forward order.
        footprint: The plan, for these units.
        swap: The swap space for saved tensors.
        weights: Holds the parameters if they are streamed (`Weights`).

    Attributes:
        peak_bytes: Peak of live saved tensors in the last step.
        swapped_bytes: Bytes that the last step swapped out.
        forward_seconds: CPU seconds of each segment's last forward pass, of the computing thread, so that neither
            waits nor other processes count.
        backward_seconds: CPU seconds of each segment's last backward pass, recomputing included.
    """

    def __init__(
        self, module: nn.Module, pieces: Sequence[Piece], footprint: Footprint, swap: Swap, weights: Any = None
    ) -> None:
        self._footprint, self._swap, self._weights = footprint, swap, weights
        self._fixed = {p.untyped_storage()._cdata for p in module.parameters()}
        self._members = [
            [m for piece in pieces[s.first : s.last + 1] for part in piece.modules for m in part.modules()]
            for s in footprint.segments
        ]
        self._saved: SavedTensors | None = None
        self._between = OUTSIDE_SEGMENTS  # the segment of tensors saved outside all units
        self._last = len(footprint.segments) - 2
        self._ran: set[int] = set()
        count = len(footprint.segments)
        self.forward_seconds, self.backward_seconds = [0.0] * count, [0.0] * count
        self._clock: tuple[int, float] | None = None
        self.peak_bytes = self.swapped_bytes = 0
        release_freed_memory()
        spans = [(segment.first, segment.last) for segment in footprint.segments if segment.last < len(pieces)]
        self._installed = Installed(pieces, spans, self._run)

    def close(self) -> None:
        """Restore the units' own `forward`."""
        self._installed.remove()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the forward and backward pass in its body by the plan.

        Raises:
            RunError: a saved tensor was changed in place, or a segment recomputes something else.
            ScratchError: the swap space is full.
            DamageError: a swapped tensor was read back changed.
        """
        parameter = self._weights.stand_in if self._weights else self._fixed_tensor
        saved = self._saved = SavedTensors(self._swap, self._footprint, parameter, self._entered)
        self._ran.clear()
        self._between = OUTSIDE_SEGMENTS
        try:
            with saved_tensors_hooks(lambda tensor: saved.pack(tensor, self._between, swap=False), saved.unpack):
                yield
            self._stop_clock()
        except CheckpointError as error:
            raise RunError(
                "a unit computes something else when it runs again, so it cannot be recomputed: "
                f"{str(error).splitlines()[0]}; name units without it in memory.units, or make it "
                "depend on its input alone"
            ) from None
        finally:
            self.peak_bytes, self.swapped_bytes = saved.peak_bytes, saved.swapped_bytes
            saved.end()
            self._saved = None

    def _fixed_tensor(self, tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage()._cdata in self._fixed else None

    def _run(self, s: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one segment forward."""
        saved = self._saved
        if saved is None or s in self._ran or not torch.is_grad_enabled():
            if self._weights:
                self._weights.forward(s)
            return run(*args, **kwargs)  # evaluation, or a module called again: not part of the plan
        self._ran.add(s)
        segment = self._footprint.segments[s]
        saved.make_room(s)
        if self._weights:
            self._weights.forward(s)
        started = time.thread_time()
        with saved_tensors_hooks(functools.partial(saved.pack, segment=s, swap=segment.swapped), saved.unpack):
            if segment.mode in "KS":
                out = run(*args, **kwargs)
            else:
                guard = functools.partial(_same_buffers, self._members[s])
                out = checkpoint(run, *args, use_reentrant=False, context_fn=guard, **kwargs)
        self.forward_seconds[s] = time.thread_time() - started
        if s == self._last:  # the loss follows, a segment without a module
            self._between = s + 1
            saved.make_room(s + 1)
        return out

    def _entered(self, s: int) -> None:
        """Note that a segment's backward pass begins."""
        self._stop_clock()
        self._clock = s, time.thread_time()
        if self._weights:
            self._weights.backward(s)

    def _stop_clock(self) -> None:
        if self._clock:
            s, started = self._clock
            self.backward_seconds[s] = time.thread_time() - started
        self._clock = None


class _Forward:
    """Context of a recomputed segment's first pass: saves the earlier values of buffers that it changes."""

    def __init__(self, modules: Sequence[nn.Module], before: dict[tuple[nn.Module, str], Tensor]) -> None:
        self._modules, self._before = modules, before

    def __enter__(self) -> None:
        self._copies = {
            (module, name): (buffer, buffer._version, buffer.detach().clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and module.training
        }
        self._versions = [
            (p, p._version) for module in self._modules for p in module._parameters.values() if p is not None
        ]

    def __exit__(self, *_raised: Any) -> None:
        if any(p._version != version for p, version in self._versions):
            raise RunError(
                "a unit changes its own parameters in place, so it cannot be recomputed; "
                "name units without it in memory.units"
            )
        for key, (buffer, version, copy) in self._copies.items():
            uncounted = isinstance(key[0], nn.modules.batchnorm._NormBase)  # its kernel does not increment versions
            if uncounted or buffer._version != version or key[0]._buffers[key[1]] is not buffer:
                self._before[key] = copy
        self._copies = {}


class _Recomputing:
    """Context of the recomputing pass: gives those buffers their earlier values, and afterwards the present ones."""

    def __init__(self, before: dict[tuple[nn.Module, str], Tensor]) -> None:
        self._before = before

    def __enter__(self) -> None:
        self._present = {(module, name): module._buffers[name] for module, name in self._before}
        for (module, name), copy in self._before.items():
            module._buffers[name] = copy.clone()

    def __exit__(self, *_raised: Any) -> None:
        for (module, name), buffer in self._present.items():
            module._buffers[name] = buffer


def _same_buffers(modules: Sequence[nn.Module]) -> tuple[Any, Any]:
    before: dict[tuple[nn.Module, str], Tensor] = {}
    return _Forward(modules, before), _Recomputing(before)
