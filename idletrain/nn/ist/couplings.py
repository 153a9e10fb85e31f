"""Record which positions of which parameters belong to the same neuron.

A position of one dimension of a parameter has an id. Ids that have to be cut together are united, and those that can
not be cut are held whole with a reason. A tensor that a module computes has labels: for each family of neurons along
it one array of ids `[...]`, as many dimensions as the tensor, of length 1 where the neuron does not depend on the
dimension. So the hidden units of a batch `[B, T, E]` are labelled `[1, 1, E]`, and its heads `[1, 1, H, 1]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

Family = Tensor  # of int64 ids, on the CPU
Families = list[Family]


@dataclass(frozen=True)
class Labelled:
    """A tensor with its families of neurons.

    Attributes:
        tensor: The tensor.
        families: Its families.
        fixed: It depends on no input, only on parameters and buffers.
        sums: Numbers of the dimensions of weights that a layer has summed over to make it, with nothing between.
        reads: Bits of the numbers of all dimensions of weights behind it, of whatever layers.
    """

    tensor: Tensor
    families: Families = field(default_factory=list)
    fixed: bool = True
    sums: frozenset[int] = frozenset()
    reads: int = 0

    def along(self, dimension: int) -> Families:
        """Return the families whose neurons differ along a dimension."""
        return [family for family in self.families if family.shape[dimension] > 1]


class Couplings:
    """Ids of neurons, which of them are one neuron, and which have to stay whole."""

    def __init__(self) -> None:
        self._parents = np.empty(0, dtype=np.int64)
        self._known = np.empty(0, dtype=np.bool_)
        self._summed = np.empty(0, dtype=np.bool_)
        self._starts: list[int] = []
        self._added: list[tuple[np.ndarray, int]] = []
        self._normalized: set[int] = set()
        self._whole: list[tuple[np.ndarray, str]] = []

    def new(self, length: int, *, known: bool = True) -> Family:
        """Return new ids `[length]`: of a parameter's or an input's positions if `known`, else of what code makes."""
        first = len(self._parents)
        ids = np.arange(first, first + length)
        self._starts.append(first)
        self._parents = np.append(self._parents, ids)
        self._known = np.append(self._known, np.full(length, known))
        self._summed = np.append(self._summed, np.zeros(length, dtype=np.bool_))
        return torch.from_numpy(ids)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the id that stands for each id's neuron."""
        while True:
            above = self._parents[ids]
            if np.array_equal(above, ids):
                return ids
            self._parents[ids] = self._parents[above]
            ids = above

    def unite(self, first: Family, second: Family) -> None:
        """Make neurons one where two families, broadcast against each other, meet."""
        if first.shape == second.shape and torch.equal(first, second):
            return
        a, b = (family.numpy().ravel() for family in torch.broadcast_tensors(first, second))  # type: ignore[no-untyped-call]
        while True:
            a, b = self.find(a), self.find(b)
            apart = a != b
            if not apart.any():
                return
            a, b = np.minimum(a, b)[apart], np.maximum(a, b)[apart]
            self._parents[b] = a
            np.logical_or.at(self._known, a, self._known[b])

    def are_one(self, first: Family, second: Family) -> bool:
        """Return True if two families that meet are the same neurons already."""
        a, b = (family.numpy().ravel() for family in torch.broadcast_tensors(first, second))  # type: ignore[no-untyped-call]
        return np.array_equal(self.find(a), self.find(b))

    def collapse(self, family: Family, dimensions: Iterable[int]) -> Family:
        """Unite a family's neurons along dimensions; return it with length 1 there."""
        for d in dimensions:
            if family.shape[d] > 1:
                first = family.narrow(d, 0, 1)
                self.unite(family, first)
                family = first
        return family

    def is_known(self, family: Family) -> bool:
        """Return True if any of a family's neurons has a position in a parameter or an input."""
        return bool(self._known[self.find(family.numpy().ravel())].any())

    def hold(self, family: Family, reason: str) -> None:
        """Keep a family's neurons whole. Without a reason, nothing is to be said of it."""
        self._whole.append((family.numpy().ravel(), reason))

    def mark_summed(self, family: Family) -> None:
        """Note that a layer sums over these positions of its weight."""
        self._summed[family.numpy().ravel()] = True

    def mark_added(self, family: Family, reads: int) -> None:
        """Note that what several layers compute is added up in these neurons, of what `reads` of `Labelled` says."""
        self._added.append((family.numpy().ravel(), reads))

    def dimensions(self, families: Families) -> set[int]:
        """Return numbers for the dimensions of parameters and inputs that families come from."""
        ids = [np.unique(family.numpy()) for family in families if self.is_known(family)]
        return {int(n) for some in ids for n in np.searchsorted(self._starts, some, side="right")}

    def mark_normalized(self, dimensions: Iterable[int]) -> None:
        """Note that a normalization follows sums over these dimensions."""
        self._normalized.update(dimensions)

    def is_normalized(self, family: Family) -> bool:
        """Return True if a normalization follows the sum over a dimension of a weight."""
        return not self.dimensions([family]).isdisjoint(self._normalized)

    def summed(self, ids: np.ndarray) -> np.ndarray:
        """Return for each id if a layer sums over it."""
        marked: np.ndarray = self._summed[ids]
        return marked

    def streams(self) -> set[int]:
        """Return the ids that stand for neurons of residual streams: what is added to them depends on them."""
        read_in: dict[int, np.ndarray] = {}  # neurons that layers sum over, by the number of a weight's dimension
        result: set[int] = set()
        for ids, reads in self._added:
            is_read = np.zeros(len(self._parents), dtype=np.bool_)
            for n in _bits(reads):
                if n not in read_in:
                    own = np.arange(*[*self._starts, len(self._parents)][n - 1 : n + 1])
                    read_in[n] = self.find(own[self._summed[own]])
                is_read[read_in[n]] = True
            neurons = np.unique(self.find(ids))
            result.update(neurons[is_read[neurons]].tolist())
        return result

    def reasons(self) -> dict[int, str]:
        """Return the ids that stand for neurons to keep whole, each with its reason or ""."""
        result: dict[int, str] = {}
        for ids, reason in self._whole:
            for i in np.unique(self.find(ids)).tolist():
                result[i] = reason or result.get(i, "")
        return result


def _bits(number: int) -> list[int]:
    return [n for n, bit in enumerate(reversed(f"{number:b}")) if bit == "1"]


def varying(family: Family) -> set[int]:
    """Return the dimensions along which a family has several neurons."""
    return {d for d, length in enumerate(family.shape) if length > 1}


def compressed(family: Family) -> Family:
    """Return a family with length 1 along every dimension on which it does not depend."""
    for d in range(family.ndim):
        if family.shape[d] > 1 and (
            family.stride(d) == 0 or bool((family == family.narrow(d, 0, 1)).all() if family.stride(d) else True)
        ):
            family = family.narrow(d, 0, 1)
    return family.contiguous()


def met(couplings: Couplings, family: Family, other: Family) -> Family:
    """Unite two families that meet element by element; return what they are then.

    Where one of them has more dimensions, as heads `[H, D]` beside a weight `[D]`, its outermost dimension decides: the
    weight is then one that all heads have, but of channels `[C, H, W]` beside a weight `[C]` each is one neuron.
    """
    mine, its = varying(family), varying(other)
    if mine == its:
        couplings.unite(family, other)
        return family
    if its < mine:
        if min(mine) in its:
            family = couplings.collapse(family, mine - its)
            couplings.unite(family, other)
            return family
        couplings.hold(other, "every neuron of another group uses it")
        return couplings.collapse(family, its)
    if mine < its:
        return met(couplings, other, family)
    family = couplings.collapse(family, mine - its)
    couplings.unite(family, couplings.collapse(other, its - mine))
    return family


def merged(couplings: Couplings, operands: Sequence[Families]) -> Families:
    """Return the families of what is computed element by element from operands of one number of dimensions."""
    result: Families = []
    for families in operands:
        for family in families:
            near = [other for other in result if varying(other) & varying(family)]
            kept = [other for other in result if not any(other is n for n in near)]
            together = family
            for other in near:
                if not varying(other) & varying(together):  # no longer, as it was united along the rest
                    kept.append(other)
                elif not couplings.is_known(together):  # what code makes fits any width
                    together = other
                elif couplings.is_known(other):
                    together = met(couplings, other, together)
            result = [*kept, *([together] if varying(together) else [])]
    return result


def padded(family: Family, dimensions: int) -> Family:
    """Return a family with leading dimensions of length 1, as broadcasting adds them."""
    return family.view((1,) * (dimensions - family.ndim) + tuple(family.shape))
