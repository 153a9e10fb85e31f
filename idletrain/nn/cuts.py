"""Find the cuts of a module, or take those that the job declares, and try subnets on a few samples."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from idletrain.errors import JobError, user_code
from idletrain.held_interrupts import interrupts_held
from idletrain.job import MemorySettings, Split, TrainingSettings
from idletrain.nn.checks import check_label_lookup, very_wide
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import call, described, device_of, shapes_of
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.ist import discovery, groups
from idletrain.nn.ist.any_width import take_widths
from idletrain.nn.ist.blocks import by_depth
from idletrain.nn.ist.groups import BufferRule, Layout, UnsplitError, reasons_text, weightless, with_buffers
from idletrain.nn.ist.modules import copied
from idletrain.nn.ist.narrow_blocks import within_blocks
from idletrain.nn.ist.scaling import with_scaling
from idletrain.nn.ist.scaling_trial import Subject
from idletrain.nn.ist.schemes import scheme_of, specs_of, survival
from idletrain.nn.ist.shape_runs import ShapeMemory, for_trials, run_for_shapes
from idletrain.nn.ist.subnets import cut
from idletrain.nn.ist.time_limit import within
from idletrain.nn.ist.value_check import reason_against
from idletrain.nn.ist.worth_cutting import check_widths, unsuitable
from idletrain.nn.local_steps import assemble
from idletrain.nn.optim.table import kind_of
from idletrain.nn.scripted import scripted_layers

SEARCH_SECONDS = 20.0  # for a module's groups; then it is trained whole
LEAST_TRAINED = 0.5  # of the parameters, below which little travels and the others would have to be cut beside them
LEAST_SPLIT = 0.3  # of the parameters in groups, below which subnets save too little to lose accuracy for


class CutSettings(NamedTuple):
    """A job's settings for a network's groups.

    Attributes:
        exclude: Names of groups to keep whole.
        table: All groups written by hand (see `groups.by_hand`), or None to find them.
        fixed: Names of groups whose partition is drawn once for all rounds.
        split: Whether subnets get some of the neurons, some of the residual blocks, or both.
    """

    exclude: Sequence[str] = ()
    table: Mapping[str, Sequence[str | None]] | None = None
    fixed: Sequence[str] = ()
    split: Split = "neurons"

    @property
    def least_split(self) -> float:
        """The least share of the parameters that found groups hold; any where the job has chosen among them."""
        return 0.0 if self.exclude else LEAST_SPLIT


class Cuts(NamedTuple):
    """What a module is cut by, or that it is trained whole.

    Attributes:
        module: The module on the meta device.
        layout: The layout of its cuts.
        training: The job's settings, with the method that suits the module.
        fallback: Why that is not the job's own, in one sentence; else empty.
    """

    module: nn.Module
    layout: Layout
    training: TrainingSettings
    fallback: str = ""


def cuts_or_whole(
    module: nn.Module,
    inputs: Any,
    training: TrainingSettings,
    requested: CutSettings,
    rules: Mapping[str, BufferRule] | None = None,
) -> Cuts:
    """Return what a module is cut by; without cuts, for local SGD, where too little of it can be split.

    A table written by hand, in the job or as the module's `neuron_groups`, is taken whatever its share.

    Args:
        module: The module.
        inputs: A few samples' inputs.
        training: The job's settings.
        requested: What the job says of cuts.
        rules: The buffers that travel, each with the rule that merges its copies.
    """
    if not training.listed_phases and training.copies > training.subnets:  # else the job file was refused
        raise JobError(
            f"training.copies: {training.copies} is more than training.subnets: {training.subnets}; use at most as many"
        )
    if training.trains_whole or requested.split == "blocks" or _is_by_hand(module, requested):
        return Cuts(*cuts_of(module, inputs, training, requested, rules), training)
    try:
        if compiled := [f"its layer {name}" if name else "it" for name in scripted_layers(module)]:
            raise UnsplitError(f"{compiled[0]} is compiled by torch.jit, and its neurons cannot be followed")
        if (trained := _trained_share(module)) < LEAST_TRAINED and not requested.exclude:
            raise UnsplitError(f"only {trained:.1%} of its parameters train, and no others travel")
        # torch imports it where it is first used; stopped in the middle of that, no later use of it would work.
        with interrupts_held():
            importlib.import_module("torch._dynamo")
        meta, layout = within(
            SEARCH_SECONDS,
            lambda: _guarded_cuts(module, inputs, training, requested, rules),
            "looking for the neuron groups of the model",
        )
        groups.check_split_share(layout, requested.least_split)
        return Cuts(meta, layout, training)
    except UnsplitError as error:
        reason = error.reason
    except TimeoutError:
        reason = f"the search for its neuron groups did not end within {SEARCH_SECONDS:.0f} s"
    if requested.split == "both":
        raise JobError(f"model.split: no neurons within the model's blocks can be cut ({reason}); use blocks")
    whole = training.as_local_sgd()
    sentence = (
        f"the model is trained whole, by local-sgd and not by ist: {reason}; write model.groups by hand to split it"
    )
    return Cuts(*cuts_of(module, inputs, whole, requested, rules), whole, sentence)


def _guarded_cuts(module: nn.Module, *rest: Any) -> tuple[nn.Module, Layout]:
    """Do the work of `cuts_of`; whatever fails of itself there keeps the module whole."""
    try:
        return cuts_of(module, *rest)
    except JobError:
        raise
    except Exception as error:
        raise UnsplitError(f"the search for its neuron groups fails ({type(error).__name__}: {error})") from error


def cuts_of(
    module: nn.Module,
    inputs: Any,
    training: TrainingSettings,
    requested: CutSettings,
    rules: Mapping[str, BufferRule] | None = None,
) -> tuple[nn.Module, Layout]:
    """Return the module on the meta device and the layout of its cuts, tried on a few samples' inputs.

    Args:
        module: The module.
        inputs: The samples.
        training: The job's settings.
        requested: What the job says of cuts.
        rules: The buffers that travel, each with the rule that merges its copies.

    Raises:
        UnsplitError: nothing of it can be split.
        JobError: what the job says of cuts does not fit the module.
    """
    rules = rules or {}
    meta = groups.leave_out_statistics(groups.to_meta(module))
    if training.trains_whole:
        return meta, with_buffers(meta, groups.whole(meta), rules)
    depth = None
    if requested.split != "neurons":
        narrow, traveling = requested.split == "both", tuple(rules)
        depth = by_depth(module, inputs, training, requested.exclude, traveling, narrow=narrow)
        if not narrow:
            return meta, with_buffers(meta, depth, rules)
        requested = requested._replace(
            exclude=[name for name in requested.exclude if name not in dict(depth.kept_whole)]
        )
    meta = take_widths(meta)
    layout = _by_width(module, meta, inputs, training, requested, rules, depth)
    return meta, with_buffers(meta, layout, rules)


def _by_width(
    module: nn.Module,
    meta: nn.Module,
    inputs: Any,
    training: TrainingSettings,
    requested: CutSettings,
    rules: Mapping[str, BufferRule],
    depth: Layout | None,
) -> Layout:
    """Return the layout by width, within blocks where there is one by depth; see `cuts_of`."""
    trial = for_trials(module, inputs)
    values = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    subject = Subject(copied(meta), values, inputs)
    joint = [name for name in rules if sum(length > 1 for length in values[name].shape) > 1]
    refuse, worthless = functools.partial(reason_against, subject), functools.partial(unsuitable, training, depth)
    exclude = requested.exclude
    layout = _layout(module, meta, requested, lambda: discovery.find_groups(*trial, exclude, refuse, joint, worthless))
    layout = _fix(layout, requested.fixed)
    outputs = _label_groups(meta, layout)
    if outputs:
        layout = replace(layout, common="same" if training.mode == "lockstep" else "sum")
    if outputs and any(phase.copies > 1 for phase in training.every_phase):
        name = "finish_whole" if training.finish_whole else "copies"
        raise JobError(f"training.{name}: the labels of a very wide output are each in one subnet; leave it out")
    placed = within_blocks(layout, depth) if depth else layout
    for phase in training.every_phase:
        check_widths(placed, phase)
    try:
        _check_subnets(meta, placed, trial, training)
    except JobError as error:
        if _is_by_hand(module, requested):
            raise
        fault = str(error).removeprefix("model.groups: ").partition(";")[0]
        raise UnsplitError(f"its groups can be split one by one but not together: {fault}") from error
    least = 0.0 if _is_by_hand(module, requested) else requested.least_split
    layout = with_scaling(replace(subject, outputs=outputs), layout, least)
    if not layout.groups:
        raise UnsplitError(f"it has nothing to split ({reasons_text(layout.kept_whole)})")
    return within_blocks(layout, depth) if depth else layout


def _trained_share(module: nn.Module) -> float:
    """Return the share of the parameters that train."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(size for size, trains in sizes if trains) / max(1, sum(size for size, _ in sizes))


def _is_by_hand(module: nn.Module, requested: CutSettings) -> bool:
    """Return True if the job or the module declares the groups."""
    return bool(requested.table) or getattr(module, "neuron_groups", None) is not None


def _layout(module: nn.Module, meta: nn.Module, requested: CutSettings, find: Callable[[], Layout]) -> Layout:
    """Return the layout that the job or the module declares, or find it."""
    table = requested.table or _own_groups(module, requested.exclude)
    if table:
        return groups.by_hand(meta, table)
    if very_wide(meta) is not None:
        raise JobError(
            "model.groups: a network that ends in SparseLinear needs its groups by hand, such as "
            "{output.weight: [labels, hidden], output.bias: [labels]}"
        )
    return find()


def _label_groups(meta: nn.Module, layout: Layout) -> frozenset[str]:
    """Return the names of the groups whose neurons are a very wide output's labels."""
    weight = f"{very_wide(meta)}.weight"
    labels = [t.neurons[0] for t in layout.tensors if t.name == weight and t.neurons[0] is not None]
    starts = groups.offsets(layout.sizes)
    return frozenset(
        group.name
        for group, start in zip(layout.groups, starts, strict=True)
        if any(((n >= start) & (n < start + group.size)).any() for n in labels)
    )


def _own_groups(module: nn.Module, exclude: Sequence[str]) -> dict[str, tuple[str | None, ...]] | None:
    """Return the groups in a module's `neuron_groups` without the excluded ones; None without that attribute."""
    declared: Mapping[str, Sequence[str | None]] | None = getattr(module, "neuron_groups", None)
    if declared is None:
        return None
    names = {name for name, _ in module.named_parameters()}
    known = list(dict.fromkeys(group for entries in declared.values() for group in entries if group))
    if unknown := set(exclude) - set(known):
        raise JobError(f"model.exclude: {', '.join(sorted(unknown))} is not a group; the groups are {', '.join(known)}")
    if not set(known) - set(exclude):
        raise JobError("model.exclude: names every group; leave one, or use training.method: local-sgd")
    return {
        name: tuple(None if group in exclude else group for group in entries)
        for name, entries in declared.items()
        if name in names
    }


def _fix(layout: Layout, fixed: Sequence[str]) -> Layout:
    """Return the layout with some groups' partitions fixed for all rounds."""
    known = [group.name for group in layout.groups]
    if unknown := set(fixed) - set(known):
        raise JobError(f"model.fixed: {', '.join(sorted(unknown))} is not a group; the groups are {', '.join(known)}")
    return replace(layout, groups=tuple(replace(group, fixed=group.name in fixed) for group in layout.groups))


def _check_subnets(meta: nn.Module, layout: Layout, trial: tuple[nn.Module, Any], training: TrainingSettings) -> None:
    """Check that subnets of equal shares run, of every width among them, with outputs of the network's shape."""
    module, sample = trial
    device, memory = device_of(sample), ShapeMemory()
    with torch.no_grad(), memory:
        expected = run_for_shapes(module, sample)
    subnets = [
        cut(layout, mask, survival(specs[0].holders, len(specs)))
        for specs in (specs_of(layout, phase.equal_shares, phase.copies) for phase in training.every_phase)
        for mask in scheme_of(specs).masks(training.seed, 0, layout, specs)
    ]
    for subnet in {subnet.shapes: subnet for subnet in subnets}.values():
        small = assemble(meta, subnet, torch.zeros(subnet.parameters, device=device))
        small = weightless(small) if device.type == "meta" else small
        advice = "); name every dimension that the group's neurons index, and no other"
        with (
            user_code("model.groups: a subnet does not run (", advice),
            torch.no_grad(),
            torch.device(device),
            torch.random.fork_rng(devices=[]),
            memory,
        ):
            outputs = call(small, sample)
            if scores := getattr(outputs, "dense", None):  # of a very wide output, which has computed no score yet
                scores()
        if shapes_of(outputs) != shapes_of(expected):
            shapes = f"{described(outputs)}, the network's {described(expected)}"
            raise JobError(
                f"model.groups: a subnet's outputs for two samples are {shapes}; leave what indexes the outputs whole"
            )


def check_wide(cuts: Cuts, samples: Samples, memory: MemorySettings) -> str | None:
    """Check that the settings suit sparse rows and very wide outputs; return the name of such an output, or None."""
    module, layout, training, _ = cuts
    if training.mode == "lockstep" and (layout.common != "same" or len(layout.groups) > 1):
        raise JobError(
            "training.mode: lockstep is for networks that end in SparseLinear, with its labels as their only group; "
            "exclude the other groups, or use rounds"
        )
    wide = very_wide(module)
    if training.exchange.coded and wide:
        raise JobError("training.exchange: rows of a very wide output travel as fp32; leave it out")
    if training.exchange.coded and memory.out_of_core == "always":
        raise JobError("training.exchange: parts of a subnet out of core travel as fp32; leave one of the two out")
    if not isinstance(samples, SparseSamples) and wide is None:
        return None
    if refusal := kind_of(training.optimizer).refuse_rows(training.optimizer):
        raise JobError(refusal)
    if memory.out_of_core == "always":
        raise JobError("memory.out_of_core: always is for dense layers; leave it out, labels are sharded to fit")
    if layout.common == "sum":
        check_label_lookup(samples)
    if wide:
        layer: Any = module.get_submodule(wide)
        most = max(phase.subnets for phase in training.every_phase) if _label_groups(module, layout) else 1
        layer.check_tables(math.ceil(len(layer.weight) / most))
    return wide
