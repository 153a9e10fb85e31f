"""Find by trial which sums over cut neurons a subnet has to scale, and which groups cannot be cut.

The trial is a network of random weights in which every neuron occurs twice, in random places. One of each pair is a
subnet. Each of the subnet's sums over its neurons is then exactly half of the network's, so with the right sums doubled
both give the same outputs, whatever is between. A sum without a weight cannot be doubled: its group has to stay whole.
A sum that gives the same outputs doubled or not has a normalization right after it: it is not scaled, since there a
factor would only change the length of the weights, and with it the speed of learning.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from idletrain.errors import JobError, user_code
from idletrain.nn.ist.groups import Contraction, Layout, Neurons, Scaling, offsets, without_groups
from idletrain.nn.ist.partition import Mask
from idletrain.nn.ist.subnets import ScaledInputs, Subnet, cut

TRIAL_NEURONS = 32  # of a group in the trial's subnet, and twice as many in its network: enough for any statistics
SEED = 29  # of the trial's weights; the same in every process
SAME = (
    1e-3  # relative difference of outputs that float32's rounding explains; a sum of half the size makes 0.1 and more
)
# Relative difference that the small constant in a normalization's denominator explains, with weights LOUD times as
# large. What one of fifty residual blocks adds changes outputs by 0.07 and more.
NORMALIZED = 1e-2
UNDECIDED = 5e-2  # below it the trial is repeated with larger weights
LOUD = 8.0
POWERS: Mapping[Scaling, float] = {"weights": 1.0, "unknown": 1.0, "roots": 0.5}  # of 1/share
MAX_CHOICES = 64  # ways to scale one group that are tried

KNOWN = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)
Place = tuple[str, int]  # a parameter's name and one of its dimensions
Choice = Mapping[Place, Scaling]


@dataclass(frozen=True)
class Subject:
    """A network to try.

    Attributes:
        module: The network on the meta device; BatchNorm uses batch statistics.
        parameters: The network's values, in the module's order; only their size matters.
        inputs: A few samples.
        outputs: Names of groups whose neurons are the network's outputs; the trial cuts none of them.
    """

    module: nn.Module
    parameters: Sequence[Tensor]
    inputs: Any
    outputs: frozenset[str] = frozenset()


class UnknownError(Exception):
    """Outputs cannot be compared, for the reason in the text."""


def with_scaling(subject: Subject, layout: Layout) -> Layout:
    """Return the layout with its contractions, without the groups for which no scaling is right."""
    try:
        choice = _first_that_fits(subject, layout, [_guess(subject.module, layout)])
        if choice is None:
            layout, choice = _group_by_group(subject, layout)
        return _with_contractions(subject, layout, _without_normalized(subject, layout, choice))
    except UnknownError:
        places = [place for place, scaling in _guess(subject.module, layout).items() if scaling == "weights"]
        return _with_contractions(subject, layout, dict.fromkeys(places, "unknown"))


def reason_to_keep_whole(subject: Subject, layout: Layout) -> str:
    """Return the reason why a layout of one group cannot be cut, or "" if it can or if that cannot be tested."""
    try:
        fits = _first_that_fits(subject, layout, _guesses(subject.module, layout)) is not None
    except UnknownError:
        return ""
    return "" if fits else "its neurons are added up, multiplied or compared with each other without a layer's weights"


def _group_by_group(subject: Subject, layout: Layout) -> tuple[Layout, Choice]:
    """Find a scaling for each group alone; groups that have none stay whole."""
    choices: dict[Place, Scaling] = {}
    reasons: dict[str, str] = {}
    for group in layout.groups:
        alone = without_groups(layout, {g.name: "" for g in layout.groups if g is not group})
        choice = (
            None if group.name in subject.outputs else _first_that_fits(subject, alone, _guesses(subject.module, alone))
        )
        if choice is not None:
            choices.update(choice)
        elif group.name not in subject.outputs:
            reasons[group.name] = reason_to_keep_whole(subject, alone)
    layout = without_groups(layout, reasons)
    choices = {place: scaling for place, scaling in choices.items() if place in set(_places(layout))}
    if _first_that_fits(subject, layout, [choices]) is None:
        raise UnknownError("each group alone can be cut, but all of them together cannot")
    return layout, choices


def _first_that_fits(subject: Subject, layout: Layout, choices: Iterator[Choice] | Sequence[Choice]) -> Choice | None:
    """Return the first choice with which network and subnet give the same outputs, in training or in evaluation mode.

    Noise in training mode differs between the two; in evaluation mode there should be none.
    """
    tried = list(itertools.islice(choices, MAX_CHOICES))
    for training in (True, False):
        trial = _Trial.of(subject, layout, training=training)
        for choice in tried:
            if trial.difference(choice) < SAME:
                return choice
    return None


def _without_normalized(subject: Subject, layout: Layout, choice: Choice) -> Choice:
    """Mark the contractions that need no scaling, each tried beside all others."""
    trial = next(
        (
            t
            for training in (True, False)
            if (t := _Trial.of(subject, layout, training=training)).difference(choice) < SAME
        ),
        None,
    )
    if trial is None:
        return choice
    result: dict[Place, Scaling] = dict(choice)
    for place in (place for place, scaling in choice.items() if scaling in ("weights", "roots", "inputs")):
        without: Choice = {**choice, place: "normalized"}
        difference = trial.difference(without)
        if difference < UNDECIDED:
            difference = trial.louder(place).difference(without)
        if difference < NORMALIZED:
            result[place] = "normalized" if trial.depends_on(place, choice) else "unused"
    return result if trial.difference(result) < NORMALIZED else choice


def _with_contractions(subject: Subject, layout: Layout, choice: Choice) -> Layout:
    contractions = tuple(
        Contraction(name, d, scaling, _contracting(subject.module, name, d) if scaling == "inputs" else ())
        for (name, d), scaling in choice.items()
    )
    dimensions: dict[str, list[tuple[int, float]]] = {}
    for c in contractions:
        if c.scaling in POWERS:
            dimensions.setdefault(c.tensor, []).append((c.dimension, POWERS[c.scaling]))
    tensors = tuple(replace(t, scaled=tuple(sorted(dimensions.get(t.name, ())))) for t in layout.tensors)
    return replace(layout, tensors=tensors, contractions=contractions)


# --- what to try ------------------------------------------------------------------------------------------------------


def _places(layout: Layout) -> list[Place]:
    """All cut dimensions of weights with two dimensions or more."""
    return [
        (tensor.name, d)
        for tensor in layout.tensors
        for d, neurons in enumerate(tensor.neurons)
        if neurons is not None and len(tensor.shape) > 1
    ]


def _guess(module: nn.Module, layout: Layout) -> Choice:
    """Guess from the layers that own the parameters: scale a contraction's weights, or its inputs where the same
    parameter has another use, too.
    """
    choice: dict[Place, Scaling] = {}
    for name, d in _places(layout):
        uses = [_contracts(owner, short, d) for owner, short in _owners(module, name)]
        if any(uses):
            choice[name, d] = "weights" if all(uses) else "inputs"
    return choice


def _guesses(module: nn.Module, layout: Layout) -> Iterator[Choice]:
    """Yield the guess, then choices that differ from it in one place, then in two."""
    guess, places = _guess(module, layout), _places(layout)
    yield guess
    for count in (1, 2):
        for some in itertools.combinations(places, count):
            for scalings in itertools.product(*(_others(module, place, guess.get(place)) for place in some)):
                changed: dict[Place, Scaling | None] = {**guess, **dict(zip(some, scalings, strict=True))}
                yield {place: scaling for place, scaling in changed.items() if scaling}


def _others(module: nn.Module, place: Place, guessed: Scaling | None) -> list[Scaling | None]:
    """Return the other scalings to try at a place; none where torch's own layers do not sum over it."""
    name, d = place
    uses = [(owner, _contracts(owner, short, d)) for owner, short in _owners(module, name)]
    if all(isinstance(owner, KNOWN) and not contracts for owner, contracts in uses):
        return []
    possible: list[Scaling | None] = ["weights", "roots", None]
    possible += ["inputs"] if _contracting(module, name, d) else []
    return [scaling for scaling in possible if scaling != guessed]


def _owners(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Return every layer that has a parameter, with the parameter's name in it."""
    wanted = module.get_parameter(name)
    return [
        (owner, short)
        for owner in module.modules()
        for short, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter is wanted
    ]


def _contracts(owner: nn.Module, short: str, dimension: int) -> bool:
    """Return True if a layer sums over this dimension of its parameter, as torch's layers do."""
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or short.endswith("bias"):
        return False
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return dimension == 0
    if isinstance(owner, nn.Bilinear):
        return dimension > 0
    return dimension == 1


def _contracting(module: nn.Module, name: str, dimension: int) -> tuple[str, ...]:
    """Return the names of the layers that sum over their inputs along a dimension of this weight."""
    wanted = module.get_parameter(name)
    return tuple(
        path
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
        and layer.weight is wanted
        and _contracts(layer, "weight", dimension)
    )


# --- the trial --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
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
    def of(cls, subject: Subject, layout: Layout, *, training: bool) -> _Trial:
        """Create both and run the network.

        Raises:
            UnknownError: it cannot be run with random weights, or its outputs are not finite.
        """
        whole, half, partner, doubled = _pairs(layout, subject.outputs)
        subnet = cut(layout, half)
        generator = torch.Generator().manual_seed(SEED)
        halves = [_random(own, shape, generator) for own, shape in zip(subject.parameters, subnet.shapes, strict=True)]
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
                if scaling is not None and scaling in POWERS:
                    tensors[i] = tensors[i] * _shaped(self._factors(i, d) ** POWERS[scaling], d, tensors[i].ndim)
                elif scaling == "inputs":
                    hooks += [(path, self._factors(i, d)) for path in _contracting(self.subject.module, tensor.name, d)]
        try:
            outputs = _run(self.subject, self._names, tensors, hooks, training=self.training)
        except UnknownError:
            return math.inf
        if outputs.shape != self.expected.shape:
            return math.inf
        return float((outputs - self.expected).norm() / self.expected.norm().clamp(min=1e-30))

    def louder(self, place: Place) -> _Trial:
        """Return the trial with larger weights at one place, so that a normalization's constant is negligible."""
        i = self._names.index(place[0])
        halves = list(self.halves)
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
        return replace(self, halves=halves).difference(choice) > SAME

    @property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self.layout.tensors]

    def _network(self) -> Tensor:
        tensors = list(self.halves)
        for i, sources in enumerate(self.places):
            for d, source in enumerate(sources):
                if source is not None:
                    tensors[i] = tensors[i].index_select(d, source)
        return _run(self.subject, self._names, tensors, [], training=self.training)

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


def _random(own: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw weights whose sums are about 1, whatever the network's are; draw biases around the network's."""
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values / math.sqrt(max(1, math.prod(shape) // max(1, shape[0])))
    own = own.detach().float()
    return own.mean() + values * (0.3 * max(float(own.abs().mean()), 0.3))


def _shaped(factors: Tensor, dimension: int, dimensions: int) -> Tensor:
    return factors.view([-1 if d == dimension else 1 for d in range(dimensions)])


class _Runs(nn.Module):
    """Run the module and compute all scores of a very wide output while its parameters are replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Any) -> Tensor:
        outputs = self.module(inputs)
        scores: Callable[[], Tensor] | None = getattr(outputs, "dense", None)  # of a very wide output
        return scores() if scores else outputs


def _run(
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
    module = copy.deepcopy(subject.module).train(training)
    for path, factors in hooks:
        layer = module.get_submodule(path)
        layer.register_forward_pre_hook(ScaledInputs(factors, layer))
    values = {f"module.{name}": tensor for name, tensor in zip(names, tensors, strict=True)}
    try:
        with user_code(""), torch.no_grad(), torch.random.fork_rng(devices=[]), _NoDropout():
            torch.manual_seed(SEED)
            outputs = functional_call(_Runs(module), values, (subject.inputs,))
    except JobError as error:
        raise UnknownError(str(error)) from None
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
