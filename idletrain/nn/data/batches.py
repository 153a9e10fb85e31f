"""A batch of any form: a tensor, sparse rows, or a tuple, mapping or dataclass of these; and how a module takes one.

A graph of torch_geometric is taken as a dataclass is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from idletrain.nn.data.csr import Rows
from idletrain.nn.data.graphs import GRAPH_LABELS, is_graph
from idletrain.nn.scripted import parameters_of, unoptimized

LABEL_NAMES = ("labels", "label")  # names of the labels in a batch by name


# --- parts ------------------------------------------------------------------------------------------------------------


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the parts of a mapping, dataclass or graph by name; None for everything else.

    SciPy's sparse matrices by key are dicts, but of numbers by position.
    """
    if isinstance(value, Mapping) and not hasattr(value, "tocsr"):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Rows):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if is_graph(value):
        return dict(value.to_dict())
    return None


def named_parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor, sparse rows and other leaf in plain containers, each with its name, such as `x[0].mask`.

    Plain containers are tuples, lists, mappings and dataclasses; what other objects hold, as caches of keys and values
    do, is no part of a batch or of outputs.
    """
    named = fields_of(value)
    if named is not None:
        for key, part in named.items():
            yield from named_parts(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from named_parts(part, f"{name}[{i}]")
    else:
        yield name, value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in plain containers, in order."""
    return [part for _, part in named_parts(value) if isinstance(part, Tensor)]


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same containers with another value in the place of every tensor, array and sparse rows.

    Mappings that torch does not know become dicts.
    """

    def at(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | Rows):
            return function(leaf)
        if isinstance(leaf, Mapping):
            return {key: map_parts(function, part) for key, part in leaf.items()}
        if (named := fields_of(leaf)) is not None:
            return _with_fields(leaf, {name: map_parts(function, part) for name, part in named.items()})
        return leaf

    return function(value) if isinstance(value, Tensor) else tree_map(at, value)


def map_leaves(function: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """Return the same containers with another value in the place of every leaf, which the function gets with its name.

    Lists of numbers are leaves; mappings become dicts.
    """
    named = fields_of(value)
    if named is not None:
        parts = {key: map_leaves(function, part, f"{name}.{key}" if name else str(key)) for key, part in named.items()}
        return parts if isinstance(value, Mapping) else _with_fields(value, parts)
    if isinstance(value, tuple | list) and not is_of_numbers(value):
        several = [map_leaves(function, part, f"{name}[{i}]" if name else str(i)) for i, part in enumerate(value)]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    return function(name, value)


def is_of_numbers(value: Any) -> bool:
    """Return True for a number, and for lists and tuples of any depth whose first leaf is one."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _is_of_arrays(value: Any) -> bool:
    """Return True for a list that holds a tensor or array, each of which is a part of its own, as for a DataLoader."""
    return isinstance(value, list) and any(getattr(part, "shape", ()) for part in value)


def _with_fields(value: Any, parts: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass, which may be frozen, or of a graph, with other values in its fields."""
    changed = copy.copy(value)
    assign = setattr if is_graph(value) else object.__setattr__
    for name, part in parts.items():
        assign(changed, name, part)
    return changed


def moved(pair: tuple[Any, Any], device: torch.device | str) -> tuple[Any, Any]:
    """Return a batch's inputs and target on a device; where they are one object, they stay one."""
    inputs, target = pair
    there = map_parts(lambda part: part.to(device), inputs)
    return there, there if target is inputs else map_parts(lambda part: part.to(device), target)


def rows_of(pair: tuple[Any, Any], start: int, stop: int) -> tuple[Any, Any]:
    """Return inputs and target of some of a batch's samples; where they are one object, they stay one."""
    inputs, target = pair

    def some(part: Tensor | Rows) -> Any:
        if isinstance(part, Rows):
            return part.some(start, stop)
        return part[start:stop] if part.ndim else part

    here = map_parts(some, inputs)
    return here, here if target is inputs else map_parts(some, target)


def fresh(inputs: Any) -> Any:
    """Return a copy of a batch's inputs, for a trial of a module that may change them in place."""
    return map_parts(lambda part: part.clone() if isinstance(part, Tensor) else part, inputs)


def stacked(items: Sequence[Any], stack: Callable[[str, Sequence[Any]], Any], name: str = "") -> Any:
    """Join items of the same form to one batch of that form.

    Args:
        items: One for each sample.
        stack: Joins the parts of a name.
        name: The items' own name.

    Raises:
        ValueError: an item has other parts than the first one.
    """
    first = items[0]
    named = fields_of(first)
    if named is not None:
        parts = [fields_of(item) or {} for item in items]
        if any(part.keys() != named.keys() for part in parts):
            raise ValueError(f"an item has other keys than the first, {', '.join(map(str, named))}")
        joined = {
            key: stacked([part[key] for part in parts], stack, f"{name}.{key}" if name else str(key)) for key in named
        }
        return joined if isinstance(first, Mapping) else _with_fields(first, joined)
    if isinstance(first, tuple) or _is_of_arrays(first):
        if any(len(item) != len(first) for item in items):
            raise ValueError("items are tuples or lists of several lengths")
        return tuple(
            stacked([item[i] for item in items], stack, f"{name}[{i}]" if name else str(i)) for i in range(len(first))
        )
    return stack(name, items)


# --- sizes ------------------------------------------------------------------------------------------------------------


def sample_count(inputs: Any, target: Any) -> int:
    """Return the number of samples in a batch.

    It is what a batch of joined graphs says as `num_graphs`, else the first dimension of the labels; without labels, of
    the inputs' first part.
    """
    graphs = (fields_of(inputs) or {}).get("num_graphs", getattr(inputs, "num_graphs", None))
    if graphs is not None:
        return int(graphs)
    labels = labels_of(target)
    return len(labels) if _counts(labels) else length(inputs)


def length(batch: Any) -> int:
    """Return the number of rows in a batch: the first dimension of its first part."""
    return next(len(part) for _, part in named_parts(batch) if isinstance(part, Rows) or _counts(part))


def is_joined(inputs: Any, target: Any) -> bool:
    """Return whether rows of a batch's parts are not its samples: joined graphs, or sequences by time."""
    count = sample_count(inputs, target)
    counted = [len(part) for _, part in named_parts(inputs) if isinstance(part, Rows) or _counts(part)]
    return any(rows != count for rows in counted)


def _counts(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim > 0


def uneven(batch: Any) -> str:
    """Return which two parts of a batch have first dimensions that differ, or ""."""
    lengths = [(name, len(part)) for name, part in named_parts(batch) if isinstance(part, Rows) or _counts(part)]
    for name, count in lengths[1:]:
        if count != lengths[0][1]:
            return f"{lengths[0][0] or 'it'} has {lengths[0][1]} samples and {name} {count}"
    return ""


def device_of(batch: Any) -> torch.device:
    """Return the device of a batch."""
    return next(
        part.indices.device if isinstance(part, Rows) else part.device
        for _, part in named_parts(batch)
        if isinstance(part, Tensor | Rows)
    )


def shapes_of(value: Any) -> Any:
    """Return the shape of every tensor in outputs: one as it is, several by name; of a very wide output its own."""
    if hasattr(value, "dense"):  # of which a subnet may hold a share of the labels
        return tuple(value.shape[:-1])
    if isinstance(value, Tensor | Rows):
        return tuple(value.shape)
    return tuple((name, tuple(part.shape)) for name, part in named_parts(value) if isinstance(part, Tensor))


def described(value: Any, *, first: int = 0) -> str:
    """Return the shapes in a batch or in outputs in words: `[8, 3]`, or `{x: [8, 3], mask: [8]}`.

    Args:
        value: The batch or the outputs.
        first: The first dimension that is said: 1 leaves out the number of samples.
    """
    if hasattr(value, "shape"):
        return str(list(value.shape[first:]))
    parts = [(name, part) for name, part in named_parts(value) if isinstance(part, Tensor | Rows)]
    return "{" + ", ".join(f"{name}: {list(part.shape[first:])}" for name, part in parts) + "}"


def compared(outputs: Any) -> list[Tensor]:
    """Return the tensors of outputs that say what a module computes: floats, and single numbers only if all are."""
    numbers = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]
    return [tensor for tensor in numbers if tensor.ndim] or numbers


# --- calls ------------------------------------------------------------------------------------------------------------


def arguments(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments by which a module takes a batch.

    A tensor or sparse rows are the only argument, a tuple is one argument each. Of a mapping or dataclass go those
    parts whose names the module's forward takes (`label` as `labels` where it takes only that); or the whole, where
    forward has one required argument that is none of its names; of a graph also where that is called `batch`.
    """
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    named = fields_of(inputs)
    if named is None:
        return (inputs,), {}
    parameters = parameters_of(module.forward)
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if "label" in named and "label" not in takes and "labels" in takes:
        named.setdefault("labels", named.pop("label"))
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if len(required) == 1 and (required[0] not in named or (required[0] == "batch" and is_graph(inputs))):
        return (inputs,), {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return (), named
    return (), {name: part for name, part in named.items() if name in takes}


def call(module: nn.Module, inputs: Any) -> Any:
    """Run a module on a batch's inputs."""
    args, kwargs = arguments(module, inputs)
    with unoptimized():
        return module(*args, **kwargs)


class Called(nn.Module):
    """Take a batch as one argument and run a module on it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Any) -> Any:
        """See `call`."""
        return call(self.module, inputs)


# --- outputs ----------------------------------------------------------------------------------------------------------


def prediction(outputs: Any) -> Any:
    """Return what a loss compares with labels: the outputs' `logits`, or their first tensor that is no single number.

    A tensor is its own prediction, and so is the output of a very wide network.
    """
    named = fields_of(outputs)
    if named is None and not isinstance(outputs, tuple | list):
        return outputs
    if named and isinstance(named.get("logits"), Tensor):
        return named["logits"]
    tensors = tensors_of(outputs)
    return next((tensor for tensor in tensors if tensor.ndim), outputs)


def labels_of(target: Any) -> Any:
    """Return the labels in a batch by name, None if it has none; any other target is the labels."""
    named = fields_of(target)
    names = (GRAPH_LABELS,) if is_graph(target) else LABEL_NAMES
    return target if named is None else next((named[name] for name in names if named.get(name) is not None), None)
