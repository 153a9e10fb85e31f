"""Run a module to see which shapes it makes: on the meta device, or with values where its forward looks at them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
        with torch.no_grad():
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
