"""Find the neuron groups of any `nn.Module`.

`torch_pruning.DependencyGraph` (Fang et al., DepGraph, CVPR 2023) follows the couplings between tensors' dimensions.
Each group is then tried on torch's meta device: the module must run without some of its neurons and still return
outputs of the same shape, so inputs, outputs and widths that the code fixes stay whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from idletrain.errors import JobError, user_code
from idletrain.nn.ist.groups import Group, Labels, Layout, layout_of, run_on_meta, weightless, without_statistics

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch_pruning's import warns about optional extras
    import torch_pruning


def find_groups(
    module: nn.Module,
    sample: Tensor,
    exclude: Sequence[str] = (),
    refuse: Callable[[Layout], str] = lambda _layout: "",
) -> Layout:
    """Find every neuron group of a module.

    Args:
        module: A module on the meta device.
        sample: An input of at least two samples, on the meta device.
        exclude: Names of groups to keep whole.
        refuse: Returns the reason why a layout of one group cannot be cut although the module runs without some of its
            neurons, or "" if it can.

    Raises:
        JobError: nothing can be cut (with every candidate's reason); an excluded group does not exist; or the module
            cannot be run without values.
    """
    module = weightless(without_statistics(module))
    accepted, refused = [], {}
    candidates = list(_candidates(module, sample))
    labelled = _labelled(labels for _, labels in candidates)
    seen: set[tuple[str, int, int]] = set()
    for name, fine in candidates:
        positions = {(*at, int(p)) for at, label in fine.items() for p in np.flatnonzero(label >= 0)}
        if seen & positions:  # the same group, reached from another of its layers
            continue
        seen |= positions
        if any(not labelled[at].all() for at in fine):
            refused[name] = "it is concatenated with features that no layer makes"  # DepGraph mistakes their positions
            continue
        cut = _finest_cut(module, sample, name, fine, refuse)
        if isinstance(cut, str):
            refused[name] = cut
        else:
            size, labels = cut
            accepted.append((Group(name, size), labels))
    unknown = set(exclude) - {group.name for group, _ in accepted}
    if unknown:
        known = ", ".join(group.name for group, _ in accepted)
        raise JobError(f"model.exclude: {', '.join(sorted(unknown))} is not a group; found are {known}")
    labelled_groups = [(group, labels) for group, labels in accepted if group.name not in exclude]
    if not labelled_groups:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "it has no layer with neurons"
        raise JobError(f"model: has nothing to split ({reasons}); use training.method: local-sgd or another model")
    excluded = dict.fromkeys(exclude, "model.exclude names it")
    return replace(layout_of(module, labelled_groups), kept_whole=tuple({**refused, **excluded}.items()))


def _candidates(module: nn.Module, sample: Tensor) -> Iterator[tuple[str, Labels]]:
    """Yield every set of coupled dimensions, named after the first layer whose outputs they are."""
    graph: Any = torch_pruning.DependencyGraph()
    names = {id(m): name for name, m in module.named_modules()}
    parameters = {id(p): name for name, p in module.named_parameters()}
    with (
        user_code("model: its neuron groups cannot be found (", "); write model.groups by hand or use local-sgd"),
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")  # it warns of every parameter that no layer owns
        # Without a forward_fn it tries module(*sample) first.
        graph.build_dependency(module, example_inputs=sample, forward_fn=run_on_meta)
    for layer in module.modules():
        if layer not in graph.module2node or not isinstance(layer, _LAYERS):
            continue
        prune = graph.get_pruner_of_module(layer).prune_out_channels
        group = graph.get_pruning_group(layer, prune, list(range(graph.get_out_channels(layer))))
        labels: Labels = {}
        for item in group:
            for tensor, dimension in _dimensions(item.dep, parameters, graph):
                label = labels.setdefault((tensor, dimension), _unlabelled(module, tensor, dimension))
                within = np.asarray(item.idxs) < len(label)  # only mistaken positions are beyond it
                label[np.asarray(item.idxs)[within]] = np.asarray(item.root_idxs)[within]
        if labels:
            yield names[id(layer)] or type(layer).__name__, labels


_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)


def _labelled(candidates: Iterable[Labels]) -> dict[tuple[str, int], NDArray[np.bool_]]:
    """Return, for each dimension, a mask of the positions that belong to any candidate."""
    result: dict[tuple[str, int], NDArray[np.bool_]] = {}
    for labels in candidates:
        for at, label in labels.items():
            result[at] = result.get(at, False) | (label >= 0)
    return result


def _unlabelled(module: nn.Module, tensor: str, dimension: int) -> NDArray[np.int64]:
    return np.full(module.get_parameter(tensor).shape[dimension], -1, dtype=np.int64)


def _dimensions(dependency: Any, parameters: Mapping[int, str], graph: Any) -> Iterator[tuple[str, int]]:
    """Yield the (parameter, dimension) pairs that one entry of a pruning group stands for."""
    target = dependency.target.module
    out = "out" in dependency.handler.__name__
    if isinstance(target, nn.Parameter):
        dimension = next((u.pruning_dim for u in graph.unwrapped_parameters if u.parameters is target), target.ndim - 1)
        yield parameters[id(target)], dimension
        return
    transposed = isinstance(target, nn.modules.conv._ConvTransposeNd | nn.Embedding)
    for short, parameter in target.named_parameters(recurse=False):
        name = parameters[id(parameter)]
        if parameter.ndim == 1:
            if out:
                yield name, 0
        elif short == "weight":
            yield name, int(out == transposed)


def _finest_cut(
    module: nn.Module, sample: Tensor, name: str, labels: Labels, refuse: Callable[[Layout], str]
) -> tuple[int, Labels] | str:
    """Find the smallest neurons that the module runs without: one channel each or, for attention, one head.

    Returns:
        The number of neurons and their labels, or the reason why the module does not run without any of them.
    """
    size = 1 + max(int(label.max()) for label in labels.values())
    reason = "it is a single neuron"
    for width in (width for width in range(1, size // 2 + 1) if size % width == 0):
        coarse = {at: np.where(label < 0, -1, label // width) for at, label in labels.items()}
        reason = _runs_without_first(module, sample, coarse)
        reason = reason or refuse(layout_of(module, [(Group(name, size // width), coarse)]))
        if not reason:
            return size // width, coarse
    return reason


def _runs_without_first(module: nn.Module, sample: Tensor, labels: Labels) -> str:
    """Return "" if the module runs without neuron 0 and its outputs keep their shape, else the reason."""
    smaller = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for (name, dimension), label in labels.items():
        keep = torch.from_numpy(np.flatnonzero(label != 0))
        smaller[name] = smaller[name].index_select(dimension, keep.to("meta"))
    try:
        with user_code(""), torch.no_grad(), torch.device("meta"):
            shape = functional_call(module, smaller, (sample,)).shape
            expected = module(sample).shape
    except JobError as error:
        return str(error)[:120]
    return "" if shape == expected else "its neurons are the network's outputs"
