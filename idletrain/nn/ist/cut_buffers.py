"""Try a module without half of the neurons of some groups, and find the buffers that are indexed by a group's neurons.

Where it does not run, the innermost layer that fails is asked for buffers of a fitting length, and tried without the
neurons' part of them.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from idletrain.errors import JobError, tried_code
from idletrain.nn.data.batches import arguments, device_of, fresh, shapes_of
from idletrain.nn.ist.groups import Group, Labels, Layout, layout_of, offsets
from idletrain.nn.ist.modules import call_with
from idletrain.nn.ist.shape_runs import ShapeMemory
from idletrain.nn.ist.subnets import cut
from idletrain.nn.scripted import submodule

MOST_TRIES = 64  # sets of a layer's buffers that are tried


@dataclass(frozen=True)
class Failure:
    """The reason why a module does not run without some neurons, or computes other values.

    Attributes:
        reason: The reason.
        layer: The name of the innermost layer that failed, or "".
        of_values: It runs, but computes other values.
    """

    reason: str
    layer: str
    of_values: bool = False


class HalfTrial:
    """Runs of a module without half of the neurons of some groups.

    Args:
        module: A module of `shape_runs.for_trials`.
        sample: Its batch.
    """

    def __init__(self, module: nn.Module, sample: Any) -> None:
        self.module = module
        self._sample = sample
        self._whole = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        # Buffers may be used in training or in evaluation alone, so that a module with buffers has to run in both.
        self._modes = (True, False) if any(True for _ in module.buffers()) else (module.training,)
        self._expected: dict[bool, Any] = {}
        self._memory = ShapeMemory()

    def failure(self, layout: Layout) -> Failure | None:
        """Return why the module does not run with outputs of the same shape, or None if it does."""
        kept = np.ones(sum(layout.sizes), dtype=np.bool_)
        for size, start in zip(layout.sizes, offsets(layout.sizes), strict=True):
            kept[start + max(1, size // 2) : start + size] = False
        smaller = dict(self._whole)
        for tensor, positions in zip(layout.tensors, cut(layout, kept).positions, strict=True):
            for d, at in enumerate(positions):
                if at is not None:
                    smaller[tensor.name] = smaller[tensor.name].index_select(d, at.to(device_of(self._sample)))
        for training in self._modes:
            path: list[str] = []
            with _tracing(self.module, path):
                try:
                    shapes = self._shapes(smaller, training=training)
                    if training not in self._expected:
                        self._expected[training] = self._shapes(self._whole, training=training)
                except JobError as error:
                    layer = path[-1] if path else ""
                    kind = type(submodule(self.module, layer)).__name__
                    return Failure(f"a subnet with fewer of its neurons does not run ({kind}: {error})", layer)
            if shapes != self._expected[training]:
                return Failure("its neurons are the network's outputs", "")
        return None

    def _shapes(self, values: dict[str, Tensor], *, training: bool) -> Any:
        was_training = self.module.training
        self.module.train(training)
        args, kwargs = arguments(self.module, fresh(self._sample))
        try:
            with tried_code(), torch.no_grad(), torch.device(device_of(self._sample)), _quietly(), self._memory:
                return shapes_of(call_with(self.module, values, args, kwargs))
        finally:
            self.module.train(was_training)


def with_cut_buffers(trial: HalfTrial, labels: Labels, joint: Collection[str] = ()) -> Labels | str:
    """Return a group's labels with those of its buffers, or the reason why the module cannot be cut by it.

    Where no buffer is as long as what is cut, nothing is tried.

    Args:
        trial: Runs of the module.
        labels: The neurons at the positions of its parameters.
        joint: Buffers whose values for some neurons depend on the others, as a codebook's do; they are not cut.
    """
    module = trial.module
    if not any(_fitting(module, layer, labels) for layer, _ in module.named_modules()):
        return labels

    def failure_of(labels: Labels) -> Failure | None:
        size = 1 + max(int(label.max()) for label in labels.values())
        return trial.failure(layout_of(module, [(Group("", size), labels)]))

    failure = failure_of(labels)
    seen: set[str] = set()
    while failure and failure.layer not in seen:
        seen.add(failure.layer)
        together = [name for name, _ in _fitting(module, failure.layer, labels) if name in joint]
        if together:
            return f"training changes buffer {together[0]} for all of its neurons together"
        for buffers in _choices(module, failure.layer, labels):
            next_failure = failure_of({**labels, **buffers})
            if next_failure is None or next_failure.layer not in seen:
                labels, failure = {**labels, **buffers}, next_failure
                break
    return failure.reason if failure else labels


def _choices(module: nn.Module, layer: str, labels: Labels) -> Iterator[Labels]:
    """Yield sets of a layer's buffers that may be cut, the smallest first."""
    own = _fitting(module, layer, labels)
    sets = itertools.chain.from_iterable(itertools.combinations(own, n) for n in range(1, len(own) + 1))
    for chosen in itertools.islice(sets, MOST_TRIES):
        yield {at: own[at] for at in chosen}


def _fitting(module: nn.Module, layer: str, labels: Labels) -> Labels:
    """Return the dimensions of a layer's buffers that are as long as one that is cut, with its neurons."""
    by_length = {len(label): label for label in labels.values()}
    own = {
        (f"{layer}.{short}" if layer else short, d): by_length[length]
        for short, buffer in module.get_submodule(layer).named_buffers(recurse=False)
        for d, length in enumerate(buffer.shape)
        if length in by_length
    }
    return {at: label for at, label in own.items() if at not in labels}


@contextlib.contextmanager
def _tracing(module: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep in `path` the names of the layers that are running, the innermost last."""
    hooks = []
    for name, layer in module.named_modules():
        hooks.append(layer.register_forward_pre_hook(lambda _layer, _inputs, name=name: path.append(name)))
        hooks.append(layer.register_forward_hook(lambda _layer, _inputs, _outputs: (path.pop(), None)[1]))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Ignore warnings of what may fail, leave torch's random state alone, and run attention as in training.

    Attention's fast path does not run without memory.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
