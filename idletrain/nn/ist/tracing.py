"""Run a module once, on the meta device where it can, and follow its neurons from operator to operator."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from idletrain.nn.data.batches import tensors_of
from idletrain.nn.ist.couplings import Couplings, Families, Labelled, varying
from idletrain.nn.ist.elementwise import elementwise
from idletrain.nn.ist.operators import NORMALIZATIONS, PASSING, RULES, SUMS
from idletrain.nn.ist.shape_runs import ShapeMemory

Place = tuple[str, int]  # a parameter's name and one of its dimensions
_FACTORIES = ("empty", "zeros", "ones", "full", "new_", "rand", "normal", "arange", "bernoulli")


@dataclass(frozen=True)
class Trace:
    """The couplings of neurons that a run of a module shows.

    Attributes:
        couplings: Which neurons are one.
        places: The ids of the positions of each parameter's dimensions `[length]`.
    """

    couplings: Couplings
    places: Mapping[Place, Tensor]


def trace_neurons(module: nn.Module, sample: Any, run: Callable[[nn.Module, Any], Any]) -> Trace:
    """Run a module on a batch, in training and in evaluation, and return how its parameters' positions are coupled.

    Args:
        module: A module, and
        sample: a batch of two samples, as `shape_runs.for_trials` makes them.
        run: Runs a module on a batch.
    """
    couplings = Couplings()
    places: dict[Place, Tensor] = {}
    memory, mode = ShapeMemory(), _Following(couplings)
    for name, parameter in module.named_parameters():
        families: Families = []
        for d, length in enumerate(parameter.shape):
            if length > 1:
                places[name, d] = couplings.new(length)
                families.append(places[name, d].view([length if e == d else 1 for e in range(parameter.ndim)]))
        mode.label(Labelled(parameter, families))
    for tensor in tensors_of(sample):
        families = []
        for d, length in enumerate(tensor.shape[1:], start=1):
            if length > 1:
                ids = couplings.new(length)
                couplings.hold(ids, "")
                families.append(ids.view([length if e == d else 1 for e in range(tensor.ndim)]))
        mode.label(Labelled(tensor, families, fixed=False))
    fast, was_training = torch.backends.mha.get_fastpath_enabled(), module.training
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer
    try:
        for training in (True, False):  # a layer may run in one of them alone, or by chance
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), memory, mode:
                outputs = run(module.train(training), sample)
            for tensor in tensors_of(outputs):
                for family in mode.labelled(tensor).families:
                    couplings.hold(family, "its neurons are the network's outputs")
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        module.train(was_training)
    return Trace(couplings, places)


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Label the tensors that operators make."""

    def __init__(self, couplings: Couplings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._couplings = couplings
        self._known: dict[int, Labelled] = {}

    def label(self, labelled: Labelled) -> None:
        """Label a tensor; it is kept, so that its id stays its own."""
        self._known[id(labelled.tensor)] = labelled

    def labelled(self, tensor: Tensor) -> Labelled:
        """Return a tensor's labels."""
        return self._known.get(id(tensor)) or Labelled(tensor)

    def __torch_dispatch__(
        self, op: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        result = op(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._follow(op, (*args, *(kwargs or {}).values()), result)
        return result

    def _follow(self, op: Any, args: tuple[Any, ...], result: Any) -> None:
        outputs = tensors_of(result)
        inputs = [self.labelled(tensor) for tensor in _flat(args)]
        fixed = all(labelled.fixed for labelled in inputs)
        if not outputs:
            return
        if op.overloadpacket.__name__.startswith(_FACTORIES):
            self.label(Labelled(outputs[0], self._unknown(outputs[0]), fixed=True))
            return
        families: list[Families] = [[] for _ in outputs]
        sums = self._sums(op, inputs)
        if any(labelled.families for labelled in inputs):
            families = RULES.get(op.overloadpacket, elementwise)(self._couplings, op, inputs, args, outputs)
        written = outputs[0] is args[0] if args else False
        if written:
            self._unite_written(inputs[0], families[0])
        reads = self._reads(op, inputs)
        for output, own in zip(outputs, families, strict=True):
            self.label(Labelled(output, own, fixed, sums, reads))

    def _sums(self, op: Any, inputs: Sequence[Labelled]) -> frozenset[int]:
        """Return which sums an operator's output is, and note those that a normalization follows."""
        if op.overloadpacket in NORMALIZATIONS:
            self._couplings.mark_normalized(inputs[0].sums)
        changing = [labelled for labelled in inputs if not labelled.fixed]
        if op.overloadpacket in SUMS:
            weights = [family for labelled in inputs if labelled.fixed for family in labelled.families]
            return frozenset(self._couplings.dimensions(weights))
        passes = op.overloadpacket in PASSING and len(changing) == 1
        return changing[0].sums if passes else frozenset()

    def _reads(self, op: Any, inputs: Sequence[Labelled]) -> int:
        """Return the bits of the weights' dimensions that an operator's output depends on."""
        reads = functools.reduce(operator.or_, (labelled.reads for labelled in inputs), 0)
        if op.overloadpacket in SUMS:
            weights = [family for labelled in inputs if labelled.fixed for family in labelled.families]
            reads |= sum(1 << n for n in self._couplings.dimensions(weights))
        return reads

    def _unknown(self, tensor: Tensor) -> Families:
        """Return new families for a tensor that code makes, into which others may be written."""
        return [
            self._couplings.new(length, known=False).view([length if e == d else 1 for e in range(tensor.ndim)])
            for d, length in enumerate(tensor.shape)
            if length > 1
        ]

    def _unite_written(self, before: Labelled, families: Families) -> None:
        """Give what a tensor is a view of the neurons that are written into it."""
        for old in before.families:
            for new in families:
                if old.ndim == new.ndim and varying(old) == varying(new):
                    self._couplings.unite(old, new)


def _flat(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    return [tensor for part in args for tensor in _flat(part)] if isinstance(args, list | tuple) else []
