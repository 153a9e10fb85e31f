"""Trace tensors through a module: the units that use each parameter, and tensors that outlive the next unit."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from idletrain.nn.data.batches import call, tensors_of
from idletrain.nn.outofcore.executing.measure import left_alone, tensors_in
from idletrain.nn.outofcore.planning.profile import Held
from idletrain.nn.units import Installed, Piece

BETWEEN = -1  # stands for operations outside all pieces


class Traced(NamedTuple):
    """The result of a trace.

    Attributes:
        users: For every parameter the pieces that use it, `BETWEEN` if it is used outside of all.
        held: For every piece the tensors that the module's own code holds while it runs forward, whatever the plan:
            outputs that are used again (as by a skip connection), and arguments of enclosing modules.
        waiting: For every piece the bytes of such tensors' gradients that wait while its backward pass runs.
    """

    users: list[frozenset[int]]
    held: list[tuple[Held, ...]]
    waiting: list[int]


def trace(module: nn.Module, pieces: Sequence[Piece], inputs: Any) -> Traced:
    """Run a module forward without gradients, so that all live tensors are held by its own code, and trace these.

    Args:
        module: The module; its buffers and torch's random state are restored.
        pieces: Its units, in the order in which they run.
        inputs: A batch.
    """
    uses = _Uses(list(module.parameters()), inputs)
    held: list[tuple[Held, ...]] = [()] * len(pieces)

    def run(p: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = uses.values((args, kwargs))
        for value in arguments:
            value.users.append(p)
        held[p] = tuple(Held(v.owner, v.size) for v in uses.alive() if v not in arguments)
        uses.here = p
        try:
            out = forward(*args, **kwargs)
        finally:
            uses.here = BETWEEN
        uses.record(out, p)
        return out

    with left_alone(module, inputs), torch.no_grad(), uses:
        installed = Installed(pieces, [(p, p) for p in range(len(pieces))], run)
        try:
            call(module, inputs)
        finally:
            installed.remove()
    flows = _flows(uses.all, len(pieces))
    waiting = [{_waiting(value, p, flows) for value in uses.all} for p in range(len(pieces))]
    return Traced(
        [frozenset(users) for users in uses.of],
        held,
        [sum(value.size for value in values if value) for values in waiting],
    )


class _Value:
    """A storage made by a piece or by an operation between pieces.

    Attributes:
        size: Its bytes.
        maker: The piece, or `BETWEEN`.
        users: The pieces that take it, and the values that operations between pieces made of it.
    """

    def __init__(self, storage: torch.UntypedStorage, maker: int) -> None:
        self.size, self.maker = storage.nbytes(), maker
        self.users: list[int | _Value] = []
        # While this weak reference exists, no other storage gets the address.
        self._weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_freed(self) -> bool:
        return bool(self._weak.expired())  # type: ignore[no-untyped-call]

    @property
    def owner(self) -> int:
        """The piece whose input it is, or -1."""
        return next((user for user in self.users if isinstance(user, int)), -1)


def _flows(values: Sequence[_Value], end: int) -> dict[_Value, list[int]]:
    """Return for every value the pieces whose backward passes give its gradient's parts, the last to give one first."""
    flows: dict[_Value, list[int]] = {}
    for value in reversed(values):  # a value's users are made after it
        flows[value] = sorted(u if isinstance(u, int) else flows[u][0] for u in value.users) or [end]
    return flows


def _waiting(value: _Value, p: int, flows: dict[_Value, list[int]]) -> _Value | None:
    """Return the value whose size a value's waiting gradient has while piece `p` runs backward, or None.

    Parts that have arrived are summed and wait until all have; a single part that comes from a concatenation is a view
    of the concatenation's whole gradient.
    """
    first, last = flows[value][0], flows[value][-1]
    if not (value.maker < p < last if value.maker != BETWEEN else first <= p < last):
        return None
    arrived = [user for user in value.users if (user if isinstance(user, int) else flows[user][0]) > p]
    return arrived[0] if len(arrived) == 1 and isinstance(arrived[0], _Value) else value


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the pieces that use each parameter or a view of it, and the values that operations make of others.

    Several parameters may lie in one storage.
    """

    def __init__(self, parameters: Sequence[Tensor], inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.here = BETWEEN
        self.of: list[set[int]] = [set() for _ in parameters]
        self.all: list[_Value] = []
        self._by_storage: dict[int, _Value] = {}
        self._within: dict[int, list[tuple[int, int]]] = {}  # storage -> (offset, number) of its parameters
        for number, p in enumerate(parameters):
            self._within.setdefault(p.untyped_storage()._cdata, []).append((int(p.storage_offset()), number))
        for starts in self._within.values():
            starts.sort()
        self._fixed = {*self._within, *(t.untyped_storage()._cdata for t in tensors_of(inputs))}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it: 80 MB

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            starts = self._within.get(tensor.untyped_storage()._cdata)
            at = bisect.bisect_right(starts, (tensor.storage_offset(), len(self.of))) - 1 if starts else -1
            if starts and at >= 0:
                self.of[starts[at][1]].add(self.here)
        out = func(*args, **(kwargs or {}))
        if self.here == BETWEEN:
            arguments = self.values((args, kwargs))
            for result in self.record(out, BETWEEN):
                for value in arguments:
                    value.users.append(result)
        return out

    def alive(self) -> list[_Value]:
        """Return the latest value in every live storage, so that one changed in place counts once."""
        return [value for value in self._by_storage.values() if not value.is_freed()]

    def values(self, tree: Any) -> list[_Value]:
        """Return the recorded values of these tensors."""
        storages = {t.untyped_storage()._cdata: t for t in tensors_in(tree)}
        return [self._by_storage[key] for key in storages if key in self._by_storage]

    def record(self, tree: Any, maker: int) -> list[_Value]:
        """Record float tensors that a piece returns, or new ones that an operation makes; return their values."""
        values = []
        for tensor in tensors_in(tree):
            key = tensor.untyped_storage()._cdata
            new = key not in self._by_storage or maker != BETWEEN
            if new and key not in self._fixed and tensor.is_floating_point():
                value = self._by_storage[key] = _Value(tensor.untyped_storage(), maker)
                self.all.append(value)
                values.append(value)
        return values
