"""The layout of a network's cuts: the dimensions of its tensors that are indexed by the same neurons."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.nn.ist.modules import copied, stays_evaluated
from idletrain.nn.ist.skipping import SkippableBlock

SHOWN = 8  # layers of one reason that an error names

Neurons = NDArray[np.int64]
SharedRule = Literal["mean", "sum", "same"]
BufferRule = Literal["mean", "sum", "kept"]


class UnsplitError(JobError):
    """A module's groups cannot be found or hold too little; it can be trained whole.

    Attributes:
        reason: What is so, of the model.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"model: {reason}; write model.groups by hand or use training.method: local-sgd")


@dataclass(frozen=True)
class Group:
    """A neuron group: neurons that a round partitions; a neuron is a unit, a channel, a label or an attention head.

    Attributes:
        name: The first layer whose outputs its neurons are, or the name in a table written by hand.
        size: Number of its neurons.
        fixed: Its partition is drawn once and kept for all rounds.
        within: The number of the residual block that its neurons are in, where blocks are left out; else None.
    """

    name: str
    size: int
    fixed: bool = False
    within: int | None = None


@dataclass(frozen=True)
class TensorLayout:
    """The cuts of one parameter or buffer.

    Attributes:
        neurons: For each dimension None (never cut) or `[dimension]`: the neuron (numbered across all groups) at
            every position, -1 for positions that every subnet has.
        scaled: Pairs of a dimension and a power. In a subnet, values along the dimension are multiplied by that power
            of the network's number of neurons over the subnet's: a sum over the subnet's neurons is then as large as
            one over all of them.
        buffer: None for a parameter; for a buffer how the subnets' copies are merged: `mean` of them, `sum` of their
            changes, or `kept` as the network's, which training does not change.
    """

    name: str
    shape: tuple[int, ...]
    neurons: tuple[Neurons | None, ...]
    trainable: bool
    scaled: tuple[tuple[int, float], ...] = ()
    buffer: BufferRule | None = None

    @property
    def merged(self) -> bool:
        """Return True if a commit writes the subnets' values into the network."""
        return self.trainable or self.buffer in ("mean", "sum")

    @property
    def shared(self) -> bool:
        """Return True for a shared tensor: every subnet trains a copy of all of it."""
        return all(dimension is None for dimension in self.neurons)


Scaling = Literal["weights", "roots", "inputs", "input_roots", "normalized", "unused", "unknown"]
# Powers of 1/share that a contraction's weights or its inputs are multiplied by.
WEIGHT_POWERS: Mapping[Scaling, float] = {"weights": 1.0, "unknown": 1.0, "roots": 0.5}
INPUT_POWERS: Mapping[Scaling, float] = {"inputs": 1.0, "input_roots": 0.5}


@dataclass(frozen=True)
class Contraction:
    """A sum over cut neurons, weighted by one dimension of one parameter.

    Attributes:
        tensor: The parameter's name.
        dimension: Its dimension that is summed over.
        scaling: How a subnet's smaller sum becomes as large as the network's. `weights`: the parameter is multiplied.
            `roots`: by the root only, since the vector of cut neurons is normalized to a fixed length before it.
            `inputs`: the inputs of `layers` are multiplied, since the parameter has another use. `normalized`: nothing
            is, since a normalization right after it cancels any factor. `unused`: nothing is, since no output depends
            on it. `unknown`: the parameter is multiplied, but outputs could not be compared.
            `input_roots`: inputs are multiplied by the root only, since the weights for each output are normalized to
            a fixed length (weight_norm).
        layers: Names of the modules whose inputs are multiplied.
    """

    tensor: str
    dimension: int
    scaling: Scaling
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """All groups of a network and their cuts of its parameters, in the module's order, then of its buffers.

    A buffer is among them only if it is cut, or if its values travel with the parameters.

    Attributes:
        common: How the subnets' copies of a parameter that every subnet has are merged: `mean` of them; `sum` of all
            changes, added to the old values, where each subnet holds a share of the outputs and with it a share of the
            loss; `same` where all subnets are trained in lockstep, so that their copies are equal.
        contractions: The sums over cut neurons, each with its scaling in a subnet.
        kept_whole: Names of the groups that no subnet cuts, each with the reason.
        summed: Parameters and those of their dimensions that layers sum over, as a run has shown; None if not known.
        normalized: Those that a normalization follows directly.
        frozen: Cuts of parameters that do not train, once they are no longer among `tensors` (see `frozen`).
        skippable: The residual blocks that are the neurons of the first group, where the network is cut by depth.
    """

    groups: tuple[Group, ...]
    tensors: tuple[TensorLayout, ...]
    common: SharedRule = "mean"
    contractions: tuple[Contraction, ...] = ()
    kept_whole: tuple[tuple[str, str], ...] = ()
    summed: frozenset[tuple[str, int]] | None = None
    normalized: frozenset[tuple[str, int]] = frozenset()
    frozen: tuple[TensorLayout, ...] = ()
    skippable: tuple[SkippableBlock, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(group.size for group in self.groups)

    @property
    def fixed(self) -> tuple[bool, ...]:
        return tuple(group.fixed for group in self.groups)


Labels = dict[tuple[str, int], NDArray[np.int64]]  # (parameter or buffer, dimension) -> neuron of the group, or -1


def to_meta(module: nn.Module, *, frozen: bool = True) -> nn.Module:
    """Return a copy whose parameters are on the meta device, without memory; buffers keep their values.

    Args:
        module: The module.
        frozen: False if parameters that do not train keep their values.
    """
    return copied(module, _meta_parameters(module, frozen=frozen))


def _meta_parameters(module: nn.Module, *, frozen: bool = True) -> dict[int, Any]:
    return {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
        if frozen or p.requires_grad
    }


def weightless(module: nn.Module) -> nn.Module:
    """Return a copy with all of its tensors on the meta device, for runs that only compute shapes."""
    tensors = [t for m in module.modules() for t in (*m.buffers(recurse=False), *vars(m).values())]
    memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in tensors if isinstance(t, Tensor)}
    memo |= _meta_parameters(module)
    return copied(module, memo)


def whole(module: nn.Module) -> Layout:
    """Return the layout without cuts, in which every subnet is the whole network (local SGD)."""
    return layout_of(module, [])


def by_hand(module: nn.Module, table: Mapping[str, Sequence[str | None]]) -> Layout:
    """Return the layout of a table written by hand.

    Args:
        module: The module.
        table: For the name of each parameter or buffer, a group's name or None for every dimension; `heads*3` where
            the dimension holds the group three times, one after another (a fused query, key and value).

    Raises:
        JobError: a parameter does not exist, or the dimensions of a group have no common number of neurons.
    """
    shapes = {name: tuple(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())}
    faults = [
        f"model.groups: {name} is not a parameter or buffer; known are {', '.join(shapes)}"
        for name in table.keys() - shapes
    ]
    faults += [
        f"model.groups.{name}: {len(table[name])} entries, but the parameter has {len(shapes[name])} dimensions"
        for name in table.keys() & shapes
        if len(table[name]) != len(shapes[name])
    ]
    if faults:
        raise JobError(faults)
    uses = [
        (name, dimension, *_parse_entry(entry))
        for name, entries in table.items()
        for dimension, entry in enumerate(entries)
        if entry is not None
    ]
    labelled_groups = []
    for group in dict.fromkeys(use[2] for use in uses):
        group_uses = [(name, d, shapes[name][d], tiles) for name, d, g, tiles in uses if g == group]
        size = min(length // tiles for _, _, length, tiles in group_uses)
        for name, d, length, tiles in group_uses:
            if size == 0 or length % (size * tiles):
                raise JobError(
                    f"model.groups.{name}: dimension {d} of {length} does not hold {size} neurons of {group}"
                )
        labels = {
            (name, d): np.tile(np.arange(size).repeat(length // size // tiles), tiles)
            for name, d, length, tiles in group_uses
        }
        labelled_groups.append((Group(group, size), labels))
    return layout_of(module, labelled_groups)


def _parse_entry(entry: str) -> tuple[str, int]:
    group, _, tiles = entry.partition("*")
    if not re.fullmatch(r"[1-9][0-9]*|", tiles):
        raise JobError(f"model.groups: {entry!r} should be a group's name, or name*3 where it stands three times")
    return group, int(tiles or 1)


def without_statistics(module: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm uses batch statistics only; running ones are estimated on the whole network.

    A layer that a user has put into evaluation mode keeps its running statistics, and uses them.
    """
    return leave_out_statistics(copied(module))


def leave_out_statistics(module: nn.Module) -> nn.Module:
    """Change a module to use batch statistics only; return it."""
    for layer in module.modules():
        if stays_evaluated(module, layer):
            continue
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module


def without_groups(layout: Layout, reasons: Mapping[str, str]) -> Layout:
    """Return the layout with some groups kept whole.

    Args:
        layout: A layout without contractions.
        reasons: Names of the groups to keep whole, each with the reason.
    """
    old_of_new = [
        offset + i
        for group, offset in zip(layout.groups, offsets(layout.sizes), strict=True)
        if group.name not in reasons
        for i in range(group.size)
    ]
    new_of_old = np.full(sum(layout.sizes) + 1, -1)  # index -1 finds the last
    new_of_old[old_of_new] = np.arange(len(old_of_new))

    def renumbered(neurons: Neurons | None) -> Neurons | None:
        if neurons is None or (new_of_old[neurons] < 0).all():
            return None
        return new_of_old[neurons]

    return replace(
        layout,
        groups=tuple(group for group in layout.groups if group.name not in reasons),
        tensors=tuple(replace(t, neurons=tuple(renumbered(n) for n in t.neurons)) for t in layout.tensors),
        kept_whole=(*layout.kept_whole, *reasons.items()),
    )


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the number of each group's first neuron, counted across all groups."""
    return list(itertools.accumulate(sizes, initial=0))[: len(sizes)]


def layout_of(module: nn.Module, labelled_groups: Sequence[tuple[Group, Labels]]) -> Layout:
    """Return the layout of a module from its groups and their labels of its parameters' positions."""
    dimensions: dict[tuple[str, int], NDArray[np.int64]] = {}
    offset = 0
    for group, labels in labelled_groups:
        for at, label in labels.items():
            merged = dimensions.setdefault(at, np.full_like(label, -1))
            merged[label >= 0] = label[label >= 0] + offset
        offset += group.size
    return Layout(
        groups=tuple(group for group, _ in labelled_groups),
        tensors=tuple(
            TensorLayout(
                name=name,
                shape=tuple(tensor.shape),
                neurons=tuple(dimensions.get((name, d)) for d in range(tensor.ndim)),
                trainable=tensor.requires_grad,
                buffer=None if isinstance(tensor, nn.Parameter) else "kept",
            )
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if isinstance(tensor, nn.Parameter) or any((name, d) in dimensions for d in range(tensor.ndim))
        ),
    )


def split_share(layout: Layout) -> float:
    """Return the share of the parameters that belong to neurons of groups, so that not every subnet has them."""
    parameters = [tensor for tensor in layout.tensors if not tensor.buffer]
    in_all = sum(
        math.prod(
            length if neurons is None else int((neurons < 0).sum())
            for length, neurons in zip(tensor.shape, tensor.neurons, strict=True)
        )
        for tensor in parameters
    )
    return 1 - in_all / max(1, sum(math.prod(tensor.shape) for tensor in parameters))


def check_split_share(layout: Layout, least: float) -> None:
    """Check that groups hold at least this share of the parameters.

    Raises:
        UnsplitError: they hold less.
    """
    if split_share(layout) < least:
        raise UnsplitError(f"less than {least:.0%} of its parameters are in groups that can be split")


def with_buffers(module: nn.Module, layout: Layout, rules: Mapping[str, BufferRule]) -> Layout:
    """Return the layout with the buffers that travel, each with the rule by which its copies are merged."""
    known = {tensor.name for tensor in layout.tensors}
    persistent_buffers = tuple(
        TensorLayout(name, tuple(buffer.shape), (None,) * buffer.ndim, trainable=False, buffer="kept")
        for name, buffer in module.named_buffers()
        if name in rules and name not in known
    )
    tensors = (replace(t, buffer=rules.get(t.name, t.buffer)) for t in (*layout.tensors, *persistent_buffers))
    return replace(layout, tensors=tuple(t for t in tensors if t.buffer != "kept" or not t.shared))


def reasons_text(reasons: Iterable[tuple[str, str]]) -> str:
    """Return layers' reasons as an error tells them: each reason once, behind the first layers that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{_first(layers)}: {reason}" for reason, layers in names.items())


def _first(layers: list[str]) -> str:
    """Return the first names, and how many there are beside."""
    more = [f"{len(layers) - SHOWN} more"] if len(layers) > SHOWN else []
    return ", ".join([*layers[:SHOWN], *more])
