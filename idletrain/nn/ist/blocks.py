"""Find the residual blocks that a network runs without, and cut it by depth: a subnet has some of them.

A candidate is a child of a ModuleList or Sequential. It is a block if the network runs with the identity in its place,
and if it is residual: without its weights it returns its input, as it is or normalized. A stack of plain layers of one
width runs without one of them, too, but its other layers would get inputs of which they have seen none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.data.batches import compared, map_parts, named_parts
from idletrain.nn.ist.groups import Group, Labels, Layout, layout_of, reasons_text, without_statistics
from idletrain.nn.ist.schemes import holders_within
from idletrain.nn.ist.shape_runs import run_for_shapes
from idletrain.nn.ist.skipping import Part, SkippableBlock

Forward = Callable[..., Any]
BLOCKS_GROUP = "blocks"
SAME_STATE = 1e-4  # relative difference of hidden states that rounding explains
ALIGNED = 0.99  # cosine of a hidden state and the same one normalized


@dataclass
class _Call:
    """The first call of a candidate in a trial.

    Attributes:
        args: Its arguments as they were before.
        kwargs: Its arguments by name.
        outputs: What it returned.
        in_place: It changed an argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None
    in_place: bool = False


def find_blocks(
    module: nn.Module, inputs: Any, exclude: Sequence[str] = (), traveling: Sequence[str] = ()
) -> tuple[list[SkippableBlock], dict[str, str]]:
    """Return the blocks that a module runs without, and why each of the other candidates is none.

    Args:
        module: The module.
        inputs: A few samples' inputs.
        exclude: Names of blocks that every subnet keeps.
        traveling: Names of buffers that travel with the parameters.

    Raises:
        JobError: the module runs without each block, but not without all of them.
    """
    trial = without_statistics(module).eval()
    inputs = map_parts(lambda part: part[:2] if isinstance(part, Tensor) and part.ndim else part, inputs)
    candidates = _candidates(trial)
    expected, calls = _recorded(trial, inputs, candidates)
    blocks, reasons = [], {}
    for name, layer in candidates.items():
        kept = "model.exclude names it" if name in exclude else ""
        block = kept or _residual_block(trial, inputs, name, layer, calls.get(name), traveling)
        reason = block if isinstance(block, str) else _reason_against(trial, inputs, block, expected)
        if reason or isinstance(block, str):
            reasons[name] = reason
        else:
            blocks.append(block)
    blocks = [b for b in blocks if not any(other.name.startswith(f"{b.name}.") for other in blocks)]
    if blocks and _described(_outputs_with(trial, inputs, {b.name: _identity(b) for b in blocks})) != _described(
        expected
    ):
        raise JobError("model.split: the model runs without each of its blocks, but not without all; use neurons")
    return blocks, _worth_naming(candidates, {block.name for block in blocks}, reasons)


def by_depth(
    module: nn.Module,
    inputs: Any,
    training: TrainingSettings,
    exclude: Sequence[str],
    traveling: Sequence[str],
    *,
    narrow: bool = False,
) -> Layout:
    """Return the layout of a module's cuts into blocks, tried on a few samples' inputs.

    Args:
        module: The module.
        inputs: The samples.
        training: The job's settings.
        exclude: Names of blocks that every subnet keeps.
        traveling: Names of buffers that travel with the parameters.
        narrow: Whether neurons within blocks are divided, too; names to exclude that are no blocks are then of those.

    Raises:
        JobError: there is no block, or there are too few for the subnets; or one to keep is none.
    """
    blocks, refused = find_blocks(module, inputs, exclude, traveling)
    names = ", ".join(block.name for block in blocks)
    if not narrow and (unknown := set(exclude) - set(refused)):
        raise JobError(f"model.exclude: {', '.join(sorted(unknown))} is not a block; the blocks are {names}")
    if not blocks:
        candidates = reasons_text(refused.items()) or "it has no ModuleList and no Sequential"
        raise JobError(
            f"model.split: the model has no residual blocks that it runs without ({candidates}); use neurons"
        )
    for phase in training.every_phase:
        holders = holders_within(phase.subnets, phase.copies) if narrow else phase.copies
        if phase.subnets > (most := len(blocks) * holders):
            raise JobError(
                f"training.subnets: {phase.subnets} is more than the {len(blocks)} blocks ({names}) can be in with "
                f"training.copies: {phase.copies}; use at most {most}"
            )
    return replace(block_layout(module, blocks, traveling), kept_whole=tuple(refused.items()))


def block_layout(module: nn.Module, blocks: Sequence[SkippableBlock], traveling: Sequence[str] = ()) -> Layout:
    """Return the layout in which a block's parameters, and its buffers that travel, are in the block's subnets alone.

    What a block shares with another part of the module is in all subnets.
    """
    owners: dict[int, set[int]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            within = [i for i, block in enumerate(blocks) if name.startswith(f"{block.name}.")]
            owners.setdefault(id(tensor), set()).update(within or [-1])
    labels: Labels = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        owner, *others = owners[id(tensor)]
        if owner >= 0 and not others and tensor.ndim and (isinstance(tensor, nn.Parameter) or name in traveling):
            labels[name, 0] = np.full(len(tensor), owner)
    return replace(layout_of(module, [(Group(BLOCKS_GROUP, len(blocks)), labels)]), skippable=tuple(blocks))


# --- trials -----------------------------------------------------------------------------------------------------------


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of each ModuleList and Sequential by name, each once."""
    return {
        f"{path}.{short}" if path else short: layer
        for path, parent in module.named_modules()
        if isinstance(parent, nn.ModuleList | nn.Sequential)
        for short, layer in parent.named_children()
    }


def _worth_naming(candidates: Mapping[str, nn.Module], blocks: Set[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons against candidates that neither hold a block nor are a part of a block or of another layer."""
    layers = tuple(
        f"{name}."
        for name, layer in candidates.items()
        if name in blocks or not isinstance(layer, nn.ModuleList | nn.Sequential)
    )
    around = {name for name in reasons if any(block.startswith(f"{name}.") for block in blocks)}
    return {n: reason for n, reason in reasons.items() if n not in around and not n.startswith(layers)}


def _recorded(module: nn.Module, inputs: Any, layers: Mapping[str, nn.Module]) -> tuple[Any, dict[str, _Call]]:
    """Return the module's outputs and each layer's first call, by name."""
    calls: dict[str, _Call] = {}

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in calls:
            calls[name] = _Call(
                *map_parts(lambda part: part.clone() if isinstance(part, Tensor) else part, (args, kwargs))
            )

    def leave(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if (call := calls[name]).outputs is None:
            before, after = (compared(values) for values in ((call.args, call.kwargs), (args, kwargs)))
            call.in_place = not all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
            call.outputs = map_parts(lambda part: part.clone() if isinstance(part, Tensor) else part, outputs)

    handles = []
    for name, layer in layers.items():
        handles.append(
            layer.register_forward_pre_hook(lambda _l, args, kw, name=name: enter(name, args, kw), with_kwargs=True)
        )
        handles.append(
            layer.register_forward_hook(
                lambda _l, args, kw, out, name=name: leave(name, args, kw, out), with_kwargs=True
            )
        )
    try:
        with torch.no_grad():
            return run_for_shapes(module, inputs), calls
    finally:
        for handle in handles:
            handle.remove()


def _block(name: str, layer: nn.Module, call: _Call | None, traveling: Sequence[str]) -> SkippableBlock | str:
    """Return what a candidate takes and returns, or the reason why it is no block."""
    if not any(p.requires_grad and p.ndim > 1 for p in layer.parameters()):
        return "it has no weights that train"
    if call is None or call.outputs is None:
        return "it does not run, or returns nothing"
    single = [short for short, tensor in layer.named_parameters() if tensor.requires_grad and not tensor.ndim]
    single += [short for short, t in layer.named_buffers() if f"{name}.{short}" in traveling and not t.ndim]
    if single:
        return f"its {single[0]} is a single number, which cannot be left out of a subnet"
    argument, result = _hidden(call)
    if argument is None:
        return "it returns no hidden state of the shape and number format of its input"
    if call.in_place:
        return "it changes its input in place"
    return SkippableBlock(name, argument, result, additive=False)


def _residual_block(
    module: nn.Module, inputs: Any, name: str, layer: nn.Module, call: _Call | None, traveling: Sequence[str]
) -> SkippableBlock | str:
    """Return a candidate as a residual block, or the reason why it is none."""
    block = _block(name, layer, call, traveling)
    return block if isinstance(block, str) else _as_residual(module, inputs, block)


def _hidden(call: _Call) -> tuple[int | str | None, Any]:
    """Return the argument that holds the hidden state, and the form of the outputs (see `SkippableBlock`)."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    outputs = call.outputs
    for argument, hidden in arguments:
        if not (isinstance(hidden, Tensor) and hidden.is_floating_point() and hidden.ndim):
            continue
        if _alike(outputs, hidden):
            return argument, Part.HIDDEN
        if type(outputs) not in (tuple, list, dict):
            return None, None
        named = list(outputs.items() if isinstance(outputs, dict) else enumerate(outputs))
        place = next((place for place, part in named if _alike(part, hidden)), None)
        if place is not None:
            form = {at: Part.HIDDEN if at == place else None for at, _ in named}
            return argument, form if isinstance(outputs, dict) else type(outputs)(form.values())
    return None, None


def _alike(part: Any, hidden: Tensor) -> bool:
    return isinstance(part, Tensor) and part.shape == hidden.shape and part.dtype == hidden.dtype


def _as_residual(module: nn.Module, inputs: Any, block: SkippableBlock) -> SkippableBlock | str:
    """Return a block with how it adds to its hidden state, or the reason why it does not."""
    reason = "it is not residual: without its weights it does not return its input"
    try:
        call = _call_without_weights(module, inputs, block)
    except JobError:
        return reason
    before, after = block.before(call.args, call.kwargs), block.after(call.outputs)
    if float((after - before).norm()) <= SAME_STATE * float(before.norm()):
        return replace(block, additive=True)
    return block if float(_alignment(before, after)) > ALIGNED else reason


def _call_without_weights(module: nn.Module, inputs: Any, block: SkippableBlock) -> _Call:
    """Return a block's call in a module in which its weights and biases are 0, and the weights of its norms 2.

    What is normalized after the sum is then twice as large as what was normalized before it.
    """
    layer = module.get_submodule(block.name)
    norms = {id(part.weight) for part in layer.modules() if "norm" in type(part).__name__.lower() and _scales(part)}
    values = [(p, p.detach().clone()) for p in layer.parameters()]
    try:
        for parameter, _ in values:
            nn.init.constant_(parameter, 2.0 * (id(parameter) in norms))
        return _recorded(module, inputs, {block.name: layer})[1][block.name]
    finally:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)


def _scales(norm: nn.Module) -> bool:
    return isinstance(weight := getattr(norm, "weight", None), Tensor) and weight.ndim == 1


def _alignment(hidden: Tensor, left: Tensor) -> Tensor:
    """Return the least cosine of two hidden states `[..., D]` over all places, each about its mean."""
    before, after = (value.double() - value.double().mean(-1, keepdim=True) for value in (hidden, left))
    return cosine_similarity(before, after, dim=-1).min()


def _reason_against(module: nn.Module, inputs: Any, block: SkippableBlock, expected: Any) -> str:
    """Return why a module does not run with the identity in a block's place, or ""."""
    layer = module.get_submodule(block.name)
    try:
        outputs = _outputs_with(module, inputs, {block.name: _identity(block)})
        alone = expected
        if block.result is not Part.HIDDEN:
            alone = _outputs_with(module, inputs, {block.name: _hidden_alone(block, layer.forward)})
    except JobError as error:
        return f"the model does not run with the identity in its place ({error})"
    if _described(outputs) != _described(expected):
        return "with the identity in its place the model's outputs have other shapes or number formats"
    if not all(torch.equal(a, b) for a, b in zip(compared(alone), compared(expected), strict=True)):
        return "it returns more than a hidden state, and what follows uses it"
    return ""


def _identity(block: SkippableBlock) -> Forward:
    return lambda *args, **kwargs: block.unchanged(block.before(args, kwargs))


def _hidden_alone(block: SkippableBlock, forward: Forward) -> Forward:
    """Return a block's forward without the tensors that it returns beside the hidden state."""
    return lambda *args, **kwargs: block.unchanged(block.after(forward(*args, **kwargs)))


def _outputs_with(module: nn.Module, inputs: Any, forwards: Mapping[str, Forward]) -> Any:
    """Return a module's outputs with other forwards of some layers, by name."""
    layers = [vars(module.get_submodule(name)) for name in forwards]
    own = [layer.get("forward") for layer in layers]
    try:
        for layer, forward in zip(layers, forwards.values(), strict=True):
            layer["forward"] = forward
        with torch.no_grad():
            return run_for_shapes(module, inputs)
    finally:
        for layer, former in zip(layers, own, strict=True):
            layer.pop("forward")
            if former:
                layer["forward"] = former


def _described(outputs: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, part.shape, part.dtype) for name, part in named_parts(outputs) if isinstance(part, Tensor)]
