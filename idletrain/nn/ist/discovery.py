"""Find the neuron groups of any `nn.Module`.

A run of the module shows which positions of which parameters belong to the same neuron (see `tracing`). Neurons of one
kind are a group. Groups are then tried: on torch's meta device the module must run without half of each one's neurons
and still return outputs of the same shape; a check by values follows. What fails that stays whole, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from idletrain.errors import JobError, tried_code
from idletrain.nn.ist.cut_buffers import Failure, HalfTrial, with_cut_buffers
from idletrain.nn.ist.groups import (
    Group,
    Labels,
    Layout,
    UnsplitError,
    layout_of,
    reasons_text,
)
from idletrain.nn.ist.modules import computed_weights, tensor_of
from idletrain.nn.ist.shape_runs import run_for_shapes
from idletrain.nn.ist.tracing import Place, Trace, trace_neurons

MOST_SEARCH_RUNS = 100_000  # of a search: 5 to 15 s on the meta device


@dataclass(frozen=True)
class NeuronKind:
    """Neurons of one kind.

    Attributes:
        name: The first layer whose outputs they are.
        size: Their number.
        labels: Their positions.
        stream: They are a residual stream, which what is added to it depends on.
        recurrent: They are a recurrent state.
        reason: Why they stay whole, or "".
        layers: All layers with weights whose outputs they are.
        place: In the module's order.
    """

    name: str
    size: int
    labels: Labels
    stream: bool = False
    recurrent: bool = False
    reason: str = ""
    layers: tuple[str, ...] = ()
    place: int = 0


def find_groups(
    module: nn.Module,
    sample: Any,
    exclude: Sequence[str] = (),
    refuse: Callable[[Layout], str] = lambda _layout: "",
    joint: Collection[str] = (),
    unsuitable: Callable[[NeuronKind], str] = lambda _candidate: "",
) -> Layout:
    """Find every neuron group of a module.

    Args:
        module: A module, and
        sample: a batch of at least two samples, as `shape_runs.for_trials` makes them.
        exclude: Names of groups to keep whole.
        refuse: Returns the reason why a layout cannot be cut although the module runs without some of its neurons, or
            "" if it can.
        joint: Buffers that are not cut, since their values for some neurons depend on the others.
        unsuitable: Returns the reason why a group is not worth a cut, or "".

    Raises:
        UnsplitError: nothing can be cut (with some candidates' reasons), or the module cannot be traced.
        JobError: an excluded group does not exist, or every group is excluded.
    """
    traced = _trace(module, sample)
    candidates = [replace(c, reason=c.reason or unsuitable(c)) for c in _candidates(module, traced)]
    search = _Search(module, sample, traced, refuse, joint)
    search.add([candidate for candidate in candidates if not candidate.reason])
    refused = {c.name: c.reason or search.refused.get(c.name, "") for c in candidates}
    refused = {name: reason for name, reason in refused.items() if reason}
    if unknown := set(exclude) - {candidate.name for candidate in search.accepted}:
        known = ", ".join(candidate.name for candidate in search.accepted)
        raise JobError(f"model.exclude: {', '.join(sorted(unknown))} is not a group; the groups are {known}")
    if not search.accepted:
        reasons = reasons_text(refused.items()) or "it has no layer with neurons"
        raise UnsplitError(f"it has nothing to split ({reasons})")
    left = [candidate for candidate in search.accepted if candidate.name not in exclude]
    if not left:
        raise JobError("model.exclude: names every group; leave one, or use training.method: local-sgd")
    return replace(search.layout(left), kept_whole=tuple(_kept_whole(candidates, refused, exclude).items()))


def _kept_whole(candidates: Sequence[NeuronKind], refused: Mapping[str, str], exclude: Sequence[str]) -> dict[str, str]:
    """Return every layer that stays whole, with the reason."""
    reasons = {**refused, **dict.fromkeys(exclude, "model.exclude names it")}
    result = dict(reasons)
    for candidate in candidates:
        if candidate.name in reasons:
            result |= {layer: f"as {candidate.name}" for layer in candidate.layers if layer not in result}
    return result


class _Search:
    """Accept those candidates that can be cut together, each as soon as it is tried.

    Attributes:
        accepted: In the module's order.
        refused: Names of the others, with reasons.
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Any,
        traced: Trace,
        refuse: Callable[[Layout], str],
        joint: Collection[str],
    ) -> None:
        self.accepted: list[NeuronKind] = []
        self.refused: dict[str, str] = {}
        self._module, self._refuse, self._joint = module, refuse, joint
        self._trial = HalfTrial(module, sample)
        self._summed = _summed(traced)
        self._normalized = frozenset(at for at in self._summed if traced.couplings.is_normalized(traced.places[at]))
        self._runs_left = MOST_SEARCH_RUNS // sum(1 for _ in module.modules())  # no seconds: it ends alike everywhere

    def layout(self, candidates: Sequence[NeuronKind]) -> Layout:
        """Return the layout of some candidates."""
        groups = [(Group(candidate.name, candidate.size), candidate.labels) for candidate in candidates]
        return replace(layout_of(self._module, groups), summed=self._summed, normalized=self._normalized)

    def add(self, some: Sequence[NeuronKind]) -> None:
        """Try all at once; where that fails, those that the failing layer has apart, or one half after the other.

        Where values differ, twins stay together: groups of repeated blocks, of which the first and the last tell.
        """
        if not some:
            return
        failure = self._failure(some)
        if failure and len(some) == 1:
            labels = with_cut_buffers(self._trial, some[0].labels, self._joint)
            if not isinstance(labels, str) and labels.keys() != some[0].labels.keys():
                some = [replace(some[0], labels=labels)]
                failure = self._failure(some)
        if not failure:
            self.accepted = sorted([*self.accepted, *some], key=lambda candidate: candidate.place)
        elif len(some) == 1:
            self.refused[some[0].name] = failure.reason
        elif failure.of_values and len(some) > 2 and len({_twin_key(candidate) for candidate in some}) == 1:
            self._add_twins(some)
        else:
            second = _second_part(some, failure)
            self.add([candidate for candidate in some if all(candidate is not other for other in second)])
            self.add(second)

    def _add_twins(self, twins: Sequence[NeuronKind]) -> None:
        """Try the first and the last; the others are refused, too, if both are for the same reason, else tried."""
        first, *middle, last = twins
        self.add([first])
        self.add([last])
        reason = self.refused.get(first.name)
        if reason and reason == self.refused.get(last.name):
            self.refused |= dict.fromkeys((twin.name for twin in middle), reason)
        else:
            self.add(middle[: len(middle) // 2])
            self.add(middle[len(middle) // 2 :])

    def _failure(self, some: Sequence[NeuronKind]) -> Failure | None:
        self._runs_left -= 1
        if self._runs_left < 0:
            return Failure(f"the search for groups ended before it, after {MOST_SEARCH_RUNS:,} runs of layers", "")
        layout = self.layout([*self.accepted, *some])
        failure = self._trial.failure(layout)
        if failure is None and (reason := self._refuse(layout)):
            return Failure(reason, "", of_values=True)
        return failure


def _second_part(some: Sequence[NeuronKind], failure: Failure) -> list[NeuronKind]:
    """Return the candidates to try after the others, some of which fail together."""
    if failure.of_values:
        kinds = list(dict.fromkeys(_twin_key(candidate) for candidate in some))
        later = kinds[len(kinds) // 2 :]
        second = [candidate for candidate in some if _twin_key(candidate) in later]
    else:
        second = [c for c in some if any(name.startswith(f"{failure.layer}.") for name, _ in c.labels)]
    return second if 0 < len(second) < len(some) else list(some[len(some) // 2 :])


def _twin_key(candidate: NeuronKind) -> tuple[Any, ...]:
    """Return what groups of repeated blocks have in common: sizes, positions, and names but for numbers."""
    labels = ((re.sub(r"\d+", "", name), d, label.tobytes()) for (name, d), label in candidate.labels.items())
    return re.sub(r"\d+", "", candidate.name), candidate.size, *labels


def _trace(module: nn.Module, sample: Any) -> Trace:
    """Follow a module's neurons.

    Raises:
        UnsplitError: that is not possible, whatever the reason.
    """
    try:
        with tried_code():
            return trace_neurons(module, sample, run_for_shapes)
    except JobError as error:
        reason = str(error).removeprefix("model: ")
        raise UnsplitError(f"its neuron groups cannot be found ({reason})") from error


def _summed(traced: Trace) -> frozenset[Place]:
    return frozenset(at for at, ids in traced.places.items() if traced.couplings.summed(ids.numpy()).any())


def _candidates(module: nn.Module, traced: Trace) -> list[NeuronKind]:
    """Return the neurons of each kind: those with as many positions in the same dimensions of the same parameters."""
    summed, reasons, streams = _summed(traced), traced.couplings.reasons(), traced.couplings.streams()
    neurons_at = {at: traced.couplings.find(ids.numpy()) for at, ids in traced.places.items()}
    unsaid = np.array([neuron for neuron, reason in reasons.items() if not reason], dtype=np.int64)
    counts: dict[int, Counter[Place]] = defaultdict(Counter)
    for at, ids in neurons_at.items():
        for neuron, count in zip(*np.unique(ids[~np.isin(ids, unsaid)], return_counts=True), strict=True):
            counts[int(neuron)][at] = int(count)
    kinds: dict[tuple[tuple[Place, int], ...], list[int]] = defaultdict(list)
    for neuron, count_of in counts.items():
        if any(at not in summed for at in count_of):
            kinds[tuple(count_of.items())].append(neuron)
    result: list[NeuronKind] = []
    for kind, neurons in kinds.items():
        places = [at for at, _ in kind]
        name = _name(module, places, summed)
        reason = _computed(module, places)
        reason = reason or next((reasons[neuron] for neuron in neurons if neuron in reasons), "")
        reason = reason or ("it is a single neuron" if len(neurons) == 1 else "")
        labels = {at: _numbers(neurons_at[at], np.sort(neurons)) for at in places}
        layers = dict.fromkeys(_layer(at[0]) for at in places if at not in summed and tensor_of(module, at[0]).ndim > 1)
        recurrent = any(isinstance(module.get_submodule(layer), nn.RNNBase) for layer in layers)
        stream = not recurrent and len(layers) > 1 and not streams.isdisjoint(neurons)
        result.append(NeuronKind(name, len(neurons), labels, stream, recurrent, reason, tuple(layers), len(result)))
    return _with_own_names(result)


def _numbers(ids: NDArray[np.int64], neurons: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each neuron among sorted ones, -1 for others."""
    places = np.minimum(np.searchsorted(neurons, ids), len(neurons) - 1)
    return np.where(neurons[places] == ids, places, -1)


def _with_own_names(kinds: Sequence[NeuronKind]) -> list[NeuronKind]:
    """Number kinds of the same name; those that may be cut come first."""
    uses: Counter[str] = Counter()
    result = []
    for kind in sorted(kinds, key=lambda kind: bool(kind.reason)):
        uses[kind.name] += 1
        result.append(replace(kind, name=kind.name if uses[kind.name] == 1 else f"{kind.name}/{uses[kind.name]}"))
    return sorted(result, key=lambda kind: kind.place)


def _name(module: nn.Module, places: Sequence[Place], summed: Collection[Place]) -> str:
    """Return the first layer whose outputs the neurons are: one with a weight, if there is any."""
    weights = [at for at in places if tensor_of(module, at[0]).ndim > 1]
    outputs = [at for at in places if at not in summed]
    name, _ = ([at for at in weights if at in outputs] or outputs or places)[0]
    return _layer(name) or type(module).__name__


def _layer(parameter: str) -> str:
    return re.sub(r"\.?parametrizations\..*", "", parameter.rpartition(".")[0])


def _computed(module: nn.Module, places: Collection[Place]) -> str:
    """Return a reason to keep a group whole that names a weight computed by other than weight_norm, or ""."""
    names, layers = {name for name, _ in places}, {_layer(name) for name, _ in places}
    return next(
        (
            f"{weight.name} is computed by {', '.join(weight.kinds).lstrip('_')}, which needs all of it"
            for weight in computed_weights(module)
            if (weight.path in layers or names & set(weight.sources)) and not weight.has_fixed_length
        ),
        "",
    )
