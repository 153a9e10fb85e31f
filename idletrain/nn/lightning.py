"""A LightningModule as it is: its training_step computes the loss, its configure_optimizers names the optimizer.

Nothing of Lightning is imported: its Trainer does not run. What a training_step logs goes nowhere, and `batch_idx` is
always 0: which batch a subnet has is no property of the run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from idletrain.errors import JobError, user_code
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.batches import labels_of
from idletrain.nn.data.datasets import Loading, loading_of
from idletrain.nn.data.streams import StreamSource

BATCH = "lightning_batch"  # the name by which a whole batch goes to the module
PACKAGES = ("lightning", "pytorch_lightning")


def is_lightning(module: nn.Module) -> bool:
    """Return whether a module is a LightningModule."""
    return any(c.__name__ == "LightningModule" and c.__module__.split(".")[0] in PACKAGES for c in type(module).__mro__)


class Stepping:
    """Comes before a LightningModule's own class: a whole batch goes to its training_step, all else to its forward."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the loss of a whole batch, and the outputs that forward returned for it; else what forward returns."""
        if BATCH not in named:
            outputs = super().forward(*args, **named)  # type: ignore[misc]
            if self._seen is not None:
                self._seen.append(outputs)
            return outputs
        self._seen: list[Any] | None = []
        try:
            result = self.training_step(named[BATCH], *(0 for _ in range(self._takes_index())))  # type: ignore[attr-defined]
            seen = self._seen
        finally:
            self._seen = None
        loss = result["loss"] if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step returned a {type(loss).__name__}; it should return the loss")
        return {"loss": loss, **({"logits": seen[-1]} if seen and isinstance(seen[-1], Tensor) else {})}

    def _takes_index(self) -> bool:
        return len(inspect.signature(self.training_step).parameters) > 1  # type: ignore[attr-defined]

    def log(self, *_args: Any, **_named: Any) -> None:
        """Log nothing: there is no Trainer that would take it."""

    log_dict = log


def stepping(module: nn.Module) -> nn.Module:
    """Return a copy of a LightningModule that takes whole batches; its parameters keep their names.

    Raises:
        JobError: it has no training_step of its own, or optimizes by hand.
    """
    own = type(module)
    if not getattr(module, "automatic_optimization", True):
        raise JobError("fit: the LightningModule optimizes by hand; leave out automatic_optimization = False")
    if own.training_step.__module__.split(".")[0] in PACKAGES:  # type: ignore[attr-defined]
        raise JobError("fit: the LightningModule has no training_step; write one that returns the loss")
    result = copy.deepcopy(module)
    result.__class__ = type(own.__name__, (Stepping, own), {"__module__": own.__module__})
    result._seen = None  # type: ignore[assignment]
    return result


def plain(module: nn.Module) -> nn.Module:
    """Return a module that `stepping` made, of its own class again."""
    module.__class__ = type(module).__bases__[1]
    del module._seen
    return module


def optimizer_of(module: nn.Module) -> Optimizer:
    """Return the optimizer that a LightningModule configures.

    Raises:
        JobError: it has several, or a schedule; or there is none.
    """
    with user_code("fit: configure_optimizers fails (", "); give fit an optimizer"):
        configured = module.configure_optimizers()  # type: ignore[operator]
    schedules: Any = ()
    if isinstance(configured, Mapping):
        configured, schedules = configured["optimizer"], configured.get("lr_scheduler") or ()
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured, schedules = configured
    if isinstance(configured, Sequence) and len(configured) == 1:
        configured = configured[0]
    if not isinstance(configured, Optimizer):
        raise JobError(f"fit: configure_optimizers returns {configured!r}; return one optimizer, or give fit one")
    if schedules:
        raise JobError("fit: configure_optimizers returns a learning rate schedule; give fit an optimizer with one")
    return configured


@dataclass(frozen=True)
class WholeBatches:
    """Data whose batches go whole to a training_step, beside their labels for the metrics."""

    source: Source

    def open(self) -> Samples:
        """Open the samples.

        Raises:
            JobError: they are a stream.
        """
        samples = self.source.open()
        if isinstance(samples, StreamSource):
            raise JobError("fit: a LightningModule takes no stream; give a map-style Dataset, or a plain module")
        return _WholeBatches(samples, loading_of(samples))


@dataclass(frozen=True)
class _WholeBatches:
    samples: Samples
    loading: Loading

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:
        inputs, target = self.samples.batch(index)
        whole = inputs if target is inputs else (*inputs, target) if isinstance(inputs, tuple) else (inputs, target)
        labels = labels_of(target)
        named = {BATCH: whole, **({"labels": labels} if isinstance(labels, Tensor) else {})}
        return named, named
