"""Set the assembled network's buffers: those that travelled, and statistics of the data, which no subnet has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import call
from idletrain.nn.data.seeding import seeded
from idletrain.nn.evaluate import EVALUATION_BATCH, batches
from idletrain.nn.ist.modules import in_training, stays_evaluated, tensor_of
from idletrain.nn.ist.randomness import generator, key
from idletrain.nn.program import Program

# Samples that statistics are estimated from: their error falls with the root of the number, and 8,192 of Fashion-MNIST
# give the same accuracy to 0.1 points as all 60,000 at a seventh of the time.
STATISTICS_SAMPLES = 8192
POWER_ITERATIONS = 30  # twice as many as torch's own at a layer's start, from a vector that is nearly the right one
FORGOTTEN = 0.999  # a statistic that keeps more of its first value than this adds up rather than forgets


def set_buffers(
    module: nn.Module,
    began: nn.Module,
    program: Program,
    network: Sequence[Tensor],
    most: int = STATISTICS_SAMPLES,
) -> None:
    """Set every buffer of the assembled network, and leave it in evaluation mode.

    Args:
        module: The assembled network.
        began: The module before training, whose buffers are those that training does not change.
        program: The run's program.
        network: The network's values: parameters, then buffers that travelled, in the layout's order.
        most: Samples to estimate statistics from, at most.
    """
    travelled = {t.name: value for t, value in zip(program.layout.tensors, network, strict=True) if t.buffer}
    for name, buffer in began.named_buffers():
        whole_numbers = name in travelled and not buffer.is_floating_point()
        value = travelled.get(name, buffer)
        tensor_of(module, name).copy_(value.round() if whole_numbers else value)
    turn_singular_vectors(module)
    estimated = [name for name, kind in program.buffers.items() if kind == "estimate"]
    estimate_statistics(module, program.source.open(), program.training.seed, estimated, most)


@torch.no_grad()
def turn_singular_vectors(module: nn.Module) -> None:
    """Turn the singular vectors of torch's spectral norms to those of the weights, by power iteration.

    The mean of several subnets' vectors is no singular vector of the mean of their weights.
    """
    for layer in module.modules():
        spectral = parametrizations._SpectralNorm
        if isinstance(layer, parametrize.ParametrizationList) and any(isinstance(part, spectral) for part in layer):
            values = [values for name, values in layer.named_parameters(recurse=False) if name.startswith("original")]
            for part in layer:
                if isinstance(part, spectral) and values[0].ndim > 1:
                    part._power_method(part._reshape_weight_to_matrix(values[0]), POWER_ITERATIONS)
                values = [part(*values)]
        hooks: list[Any] = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        for hook in hooks * POWER_ITERATIONS:
            hook.compute_weight(layer, do_power_iteration=True)


@torch.no_grad()
def estimate_statistics(
    module: nn.Module, samples: Samples, seed: int, names: Sequence[str] = (), most: int = STATISTICS_SAMPLES
) -> None:
    """Estimate running statistics of the whole network, and leave it in evaluation mode.

    A layer that the user has put into evaluation mode keeps its statistics (see `modules.in_training`).
    Dropout draws the same numbers every time; a last batch of one sample, which has no variance, is left out.

    Args:
        module: The network.
        samples: The training data.
        seed: The run's seed.
        names: Buffers to estimate beside those of torch's own norms; all others stay as they are.
        most: Samples to estimate them from, at most.
    """
    in_training(module)
    own = {*names, *_statistics_of(module, nn.modules.instancenorm._InstanceNorm)}
    norms = _statistics_of(module, nn.modules.batchnorm._BatchNorm)
    if not own and not norms:
        module.eval()
        return  # and a stream is not read for nothing
    order = generator(seed, "statistics").permutation(len(samples))[:most]
    order = order[: len(order) - (len(order) % EVALUATION_BATCH == 1)]
    began = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def after(update: Callable[[Iterable[Any]], None], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all buffers after an update over the data that began with these values."""
        _set(module, first)
        with seeded(key(seed, "statistics", "dropout")):
            update(inputs for inputs, _ in batches(samples, order))
        return {name: buffer.clone() for name, buffer in module.named_buffers()}

    def train(inputs: Iterable[Any]) -> None:
        for batch in inputs:
            call(module, batch)

    def train_norms(inputs: Iterable[Any]) -> None:
        """Compute cumulative means, as `torch.optim.swa_utils.update_bn` does for all layers of a module."""
        momenta = {layer: layer.momentum for layer in _trained(module, nn.modules.batchnorm._BatchNorm).values()}
        for layer in momenta:
            layer.reset_running_stats()
            layer.momentum = None
        train(inputs)
        for layer, momentum in momenta.items():
            layer.momentum = momentum

    result = dict(began)
    if own:
        raised = {name: value + 1 if _is_averaged(name, value, own) else value for name, value in began.items()}
        low, high = after(train, began), after(train, raised)
        result |= {
            name: _without_first(began[name], low[name], high[name])
            if _is_averaged(name, low[name], own)
            else low[name]
            for name in own
        }
    if norms:
        estimated = after(train_norms, began)
        result |= {name: estimated[name] for name in norms}
    _set(module, result)
    module.eval()


def _without_first(first: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Take the first value out of a running mean, which keeps the same part of every first value.

    Args:
        first: The value before the first batch.
        low: The value after the last batch.
        high: The value after the last batch, if the first value is larger by one.
    """
    retained = high - low
    forgets = (retained > 0) & (retained < FORGOTTEN)  # the first value may be infinite
    return torch.where(forgets, (low - retained * first) / torch.where(forgets, 1 - retained, 1), low)


def _is_averaged(name: str, value: Tensor, own: set[str]) -> bool:
    return name in own and value.is_floating_point()


def _trained(module: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
    """Return all layers of a kind that the user has not put into evaluation mode, by name."""
    return {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, kind) and not stays_evaluated(module, layer)
    }


def _statistics_of(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the names of the buffers of all such layers."""
    return [
        f"{path}.{short}" if path else short
        for path, layer in _trained(module, kind).items()
        for short, _ in layer.named_buffers(recurse=False)
    ]


def _set(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        tensor_of(module, name).copy_(value)
