"""A network of doubled neurons and its subnet, which give the same outputs if every sum is scaled right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from idletrain.errors import JobError, tried_code
from idletrain.nn.data.batches import Called, compared, fresh
from idletrain.nn.ist.contractions import contracting_layers
from idletrain.nn.ist.groups import INPUT_POWERS, WEIGHT_POWERS, Layout, Neurons, Scaling, offsets
from idletrain.nn.ist.modules import call_with, in_training
from idletrain.nn.ist.partition import Mask
from idletrain.nn.ist.subnets import Positions, ScaledInputs, Subnet, cut

TRIAL_NEURONS = 32  # of a group in the trial's subnet, and twice as many in its network: enough for any statistics
SEED = 29  # of the trial's weights; the same in every process
FLOAT32_ROUNDING = 1e-3  # relative difference that it explains; a sum of half the size makes 0.1 and more
MOST_DRAWN = 1_000_003  # random numbers of a parameter, which then come again; a prime, so that no row is another
LOUD = 8.0  # how much larger weights are beside which a normalization's small constant is negligible
Place = tuple[str, int]  # a parameter's name and one of its dimensions
Choice = Mapping[Place, Scaling]


@dataclass(frozen=True)
class Subject:
    """A network to try.

    Attributes:
        module: The network on the meta device, for trials alone; BatchNorm uses batch statistics.
        values: The network's parameters and buffers, by name; of parameters only their size matters.
        inputs: A few samples.
        outputs: Names of groups whose neurons are the network's outputs; the trial cuts none of them.
    """

    module: nn.Module
    values: Mapping[str, Tensor]
    inputs: Any
    outputs: frozenset[str] = frozenset()

    @functools.cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """Random weights of the network's size, by name; to be read alone."""
        generator = torch.Generator().manual_seed(SEED)
        own = {name: self.values[name] for name, _ in self.module.named_parameters()}
        return {name: random_values(value, tuple(value.shape), generator) for name, value in own.items()}


class UnknownError(Exception):
    """Outputs cannot be compared, for the reason in the text."""


@dataclass(frozen=True)
class Trial:
    """A network of doubled neurons and the subnet with one of each pair."""

    subject: Subject
    layout: Layout
    subnet: Subnet
    halves: list[Tensor]
    places: list[list[Tensor | None]]
    doubled: Mask
    expected: Tensor
    training: bool

    @classmethod
    def of(cls, subject: Subject, layout: Layout, *, training: bool) -> Trial:
        """Create both and run the network.

        Raises:
            UnknownError: it cannot be run with random weights, or its outputs are not finite.
        """
        whole, half, partner, doubled = _pairs(layout, subject.outputs)
        subnet = cut(layout, half)
        generator = torch.Generator().manual_seed(SEED)
        halves = [
            _values_of(subject.values[tensor.name], at)
            if tensor.buffer
            else random_values(subject.values[tensor.name], shape, generator)
            for tensor, at, shape in zip(layout.tensors, subnet.positions, subnet.shapes, strict=True)
        ]
        places = [
            [None if n is None else _source(n, whole, half, partner) for n in tensor.neurons]
            for tensor in layout.tensors
        ]
        trial = cls(subject, layout, subnet, halves, places, doubled, torch.empty(0), training)
        return replace(trial, expected=trial._network())

    def difference(self, choice: Choice) -> float:
        """Return the distance of the subnet's outputs from the network's, relative to the network's."""
        tensors, hooks = list(self.halves), []
        for i, tensor in enumerate(self.layout.tensors):
            for d in range(len(tensor.shape)):
                scaling = choice.get((tensor.name, d))
                if scaling and scaling in WEIGHT_POWERS:
                    factors = self._factors(i, d) ** WEIGHT_POWERS[scaling]
                    tensors[i] = tensors[i] * _shaped(factors, d, tensors[i].ndim)
                elif scaling and scaling in INPUT_POWERS:
                    factors = self._factors(i, d) ** INPUT_POWERS[scaling]
                    hooks += [(path, factors) for path in contracting_layers(self.subject.module, tensor.name, d)]
        try:
            outputs = run_with(self.subject, self._names, tensors, hooks, training=self.training)
        except UnknownError:
            return math.inf
        if outputs.shape != self.expected.shape:
            return math.inf
        return float((outputs - self.expected).norm() / self.expected.norm().clamp(min=1e-30))

    def louder(self, *places: Place) -> Trial:
        """Return the trial with larger weights at some places, so that a normalization's constant is negligible."""
        halves = list(self.halves)
        for i in {self._names.index(name) for name, _ in places}:
            halves[i] = halves[i] * LOUD
        trial = replace(self, halves=halves)
        try:
            return replace(trial, expected=trial._network())
        except UnknownError:
            return self

    def depends_on(self, place: Place, choice: Choice) -> bool:
        """Return True if other weights at a place give other outputs."""
        i = self._names.index(place[0])
        halves = list(self.halves)
        halves[i] = torch.randn(halves[i].shape, generator=torch.Generator().manual_seed(SEED + 1)) * halves[i].std()
        return replace(self, halves=halves).difference(choice) > FLOAT32_ROUNDING

    @property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self.layout.tensors]

    def _network(self) -> Tensor:
        tensors = list(self.halves)
        for i, sources in enumerate(self.places):
            for d, source in enumerate(sources):
                if source is not None:
                    tensors[i] = tensors[i].index_select(d, source)
        return run_with(self.subject, self._names, tensors, [], training=self.training)

    def _factors(self, i: int, dimension: int) -> Tensor:
        """Return 2 for every position of a doubled neuron, 1 for the others `[length]`."""
        neurons, at = self.layout.tensors[i].neurons[dimension], self.subnet.positions[i][dimension]
        assert neurons is not None
        assert at is not None
        return torch.from_numpy(np.where(np.append(self.doubled, False)[neurons[at.numpy()]], 2.0, 1.0)).float()


def _pairs(layout: Layout, outputs: frozenset[str]) -> tuple[Mask, Mask, Neurons, Mask]:
    """Return the trial's network and subnet, each neuron's partner in the subnet, and the neurons that occur twice.

    Neurons of groups that are the network's outputs, or that have only one, occur once.
    """
    count = sum(layout.sizes)
    whole, half, doubled = (np.zeros(count, dtype=np.bool_) for _ in range(3))
    partner = np.arange(count)
    generator = np.random.default_rng(SEED)
    for group, start in zip(layout.groups, offsets(layout.sizes), strict=True):
        size = min(group.size // 2, TRIAL_NEURONS)
        if group.name in outputs or not size:
            once = slice(start, start + min(group.size, 2 * TRIAL_NEURONS))
            whole[once] = half[once] = True
            continue
        chosen = start + generator.permutation(2 * size)
        whole[chosen] = doubled[chosen] = True
        half[chosen[:size]] = True
        partner[chosen[size:]] = chosen[:size]
    return whole, half, partner, doubled


def _source(neurons: Neurons, whole: Mask, half: Mask, partner: Neurons) -> Tensor:
    """Return, for every position of the network's dimension, the subnet's position with the same values."""
    in_whole, in_half = (neurons[np.append(mask, True)[neurons]] for mask in (whole, half))
    wanted = np.append(partner, -1)[in_whole]
    width = len(neurons) + 1
    known = in_half * width + _occurrences(in_half)
    order = np.argsort(known)
    at = np.searchsorted(known[order], wanted * width + _occurrences(in_whole))
    return torch.from_numpy(order[at])


def _occurrences(neurons: Neurons) -> NDArray[np.int64]:
    """Return, for every position, the number of positions before it that belong to the same neuron."""
    order = np.argsort(neurons, kind="stable")
    ordered = neurons[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    lengths = np.diff(np.append(starts, len(ordered)))
    result = np.empty(len(neurons), dtype=np.int64)
    result[order] = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return result


def _values_of(own: Tensor, at: Positions) -> Tensor:
    """Return a buffer's values at the subnet's positions; they may be anything, so the trial makes up no others."""
    for d, positions in enumerate(at):
        own = own if positions is None else own.index_select(d, positions)
    return own


def random_values(own: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw weights whose sums are about 1, whatever the network's are; draw biases around the network's."""
    count = math.prod(shape)
    drawn = torch.randn(min(count, MOST_DRAWN), generator=generator)
    if len(shape) > 1:
        drawn /= math.sqrt(max(1, count // max(1, shape[0])))
    values = drawn.repeat(-(-count // MOST_DRAWN))[:count].view(shape)
    if len(shape) > 1:
        return values
    own = own.detach().float()
    return own.mean() + values * (0.3 * max(float(own.abs().mean()), 0.3))


def _shaped(factors: Tensor, dimension: int, dimensions: int) -> Tensor:
    return factors.view([-1 if d == dimension else 1 for d in range(dimensions)])


class _Runs(Called):
    """Run the module and compute all scores of a very wide output while its parameters are replaced."""

    def forward(self, inputs: Any) -> Any:
        outputs = super().forward(inputs)
        scores: Callable[[], Tensor] | None = getattr(outputs, "dense", None)  # of a very wide output
        tensors = compared(scores() if scores else outputs)
        return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten().double() for tensor in tensors])


def run_with(
    subject: Subject,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    hooks: Sequence[tuple[str, Tensor]],
    *,
    training: bool,
) -> Tensor:
    """Run the module with these parameters.

    Raises:
        UnknownError: it cannot be run, or its outputs are not finite.
    """
    module = subject.module
    modes = [(layer, layer.training) for layer in module.modules()]
    module = in_training(module) if training else module.eval()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it does not run with the parameters of a subnet
    handles = []
    for path, factors in hooks:
        layer = module.get_submodule(path)
        handles.append(layer.register_forward_pre_hook(ScaledInputs(factors, layer)))
    buffers = dict(module.named_buffers())
    values = {f"module.{name}": buffer.clone() for name, buffer in buffers.items()}
    values |= {  # a copy of what is drawn is made only where the module writes to it
        f"module.{name}": tensor.clone() if name in buffers else torch._lazy_clone(tensor)
        for name, tensor in zip(names, tensors, strict=True)
    }
    try:
        with tried_code(), torch.no_grad(), torch.random.fork_rng(devices=[]), _NoDropout():
            torch.manual_seed(SEED)
            outputs = call_with(_Runs(module), values, (fresh(subject.inputs),))
    except JobError as error:
        raise UnknownError(str(error)) from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
        for layer, was_training in modes:
            layer.training = was_training
    if not isinstance(outputs, Tensor) or not bool(outputs.isfinite().all()):
        raise UnknownError("its outputs are not finite numbers")
    return outputs.double()


class _NoDropout(TorchFunctionMode):
    """Disable dropout, whose masks differ between networks of different widths."""

    _DROPOUTS = frozenset(
        getattr(torch.nn.functional, name)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    )

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS or func is torch.dropout:
            return args[0] if args else kwargs["input"]
        if func is torch.nn.functional.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
