"""Turn numbers of any type into the tensors that layers and losses take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn.data.batches import LABEL_NAMES

Array = NDArray[Any]
MASKS = ("mask", "masks")  # how the names of parts end whose bytes are no colours
MASKED = "holds masked values, which are no numbers; fill them, such as by filled(0), or leave out their samples"
NUMBER_KINDS = "biuf"  # kinds of NumPy types: booleans, integers, floats


def as_input(x: Array, *, integers: bool = False) -> Tensor:
    """Return inputs as float32 or int64; bytes become floats in [0, 1], unless they are to stay `integers`."""
    if x.dtype == np.uint8 and not integers:
        return torch.from_numpy(np.asarray(x, order="C")).float().div_(255)
    return as_label(x)


def as_label(y: Array) -> Tensor:
    """Return labels as float32 or int64."""
    # Not np.ascontiguousarray: it makes a single label an array of one.
    with np.errstate(over="ignore"):  # `check_finite` reports values beyond float32
        return torch.from_numpy(np.asarray(y, dtype=np.float32 if y.dtype.kind == "f" else np.int64, order="C"))


def part_of(name: str, x: Array, *, integers: bool = False) -> Tensor:
    """Return a part of a batch by name; only a part with a name may be booleans, as masks are."""
    if name in LABEL_NAMES:
        return as_label(x)
    if name and x.dtype == np.bool_:
        return torch.from_numpy(np.array(x))
    return as_input(x, integers=integers or name.endswith(MASKS))


def stack_parts(name: str, parts: Sequence[Any], *, integers: bool = False) -> Tensor:
    """Join the samples' parts of a name."""
    arrays = numbers(name, parts)
    if name in LABEL_NAMES:
        return stack_labels(name, parts)
    return torch.stack([part_of(name, array, integers=integers) for array in arrays])


def stack_labels(name: str, parts: Sequence[Any]) -> Tensor:
    """Join the samples' labels."""
    return torch.stack([as_label(array) for array in numbers(name, parts)])


def numbers(name: str, parts: Sequence[Any]) -> list[Array]:
    """Return the samples' parts of a name as arrays of one shape.

    Raises:
        TypeError: one holds something else than numbers.
        ValueError: their shapes differ.
    """
    held = name or "an item"
    try:
        arrays = [as_array(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{held} is no array of numbers: {error}") from None
    if wrong := [described_type(array) for array in arrays if array.dtype.kind not in NUMBER_KINDS]:
        raise TypeError(f"{held} holds {wrong[0]}, and not numbers")
    if other := [array.shape for array in arrays if array.shape != arrays[0].shape]:
        shapes = f"{list(arrays[0].shape)} and {list(other[0])}"
        raise ValueError(f"{held} has the shapes {shapes}: pad it in a collate_fn")
    return arrays


def as_array(part: Any) -> Array:
    """Return a tensor, an array or numbers in lists as an array; bfloat16, which NumPy does not have, as float32.

    Raises:
        ValueError: they are no array, or some are masked.
    """
    if isinstance(part, Tensor):
        part = part.detach().cpu()
        return np.asarray(part.float() if part.dtype == torch.bfloat16 else part)
    if _has_masked(part):
        raise ValueError(f"it {MASKED}")
    return np.asarray(part)


def _has_masked(part: Any) -> bool:
    return isinstance(part, np.ma.MaskedArray) and bool(np.ma.is_masked(part))


def array_at_hand(part: Any, name: str) -> Array:
    """Return an array of all samples that a call was given.

    Raises:
        JobError: it is none.
    """
    if _has_masked(part):
        raise JobError(f"data: the array of {name} {MASKED}")
    try:
        array = as_array(part)
    except (TypeError, ValueError) as error:  # rows of several lengths, types that NumPy does not have
        raise JobError(f"data: the {name} are no array ({error}); make one of the same shape for each sample") from None
    if fault := array_fault(array):
        raise JobError(f"data: the array of {name} {fault}")
    return array


def array_fault(array: Array) -> str:
    """Return why an array holds no samples: it is one number, or holds no numbers; else nothing."""
    if not array.ndim:
        return "is a single value; its first dimension should count the samples"
    if array.dtype.kind not in NUMBER_KINDS:
        texts = (
            "; numpy.unique(texts, return_inverse=True)[1] makes codes of texts" if array.dtype.kind in "OUS" else ""
        )
        return f"holds {described_type(array)}; write it as floats, integers or booleans{texts}"
    return ""


def described_type(array: Array) -> str:
    """Return what an array holds in a word: `str`, if these are objects, else NumPy's own."""
    first = next((value for value in array.flat if value is not None), None) if array.dtype.kind == "O" else None
    return type(first).__name__ if isinstance(first, str) else array.dtype.name[:50]
