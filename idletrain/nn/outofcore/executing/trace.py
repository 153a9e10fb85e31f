"""How tensors run through a module: who uses which parameter, and what lives longer than from one unit to the next."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from idletrain.nn.outofcore.executing.measure import left_alone, tensors_in
from idletrain.nn.outofcore.planning.profile import Held
from idletrain.nn.units import Installed, Piece

BETWEEN = -1  # the piece of what runs between pieces


class Traced(NamedTuple):
    """What was seen; lists have an entry for every piece.

    Attributes:
        users: Of every parameter by number the pieces that use it, `BETWEEN` for what is used outside of all.
        held: What the module's own code holds while the piece runs forward, whatever the plan: outputs that are used
            again (a skip connection's), and what modules around the piece were called with.
        waiting: Bytes of gradients of such tensors that wait while the piece's backward pass runs.
    """

    users: list[frozenset[int]]
    held: list[tuple[Held, ...]]
    waiting: list[int]


def trace(module: nn.Module, pieces: Sequence[Piece], inputs: Tensor) -> Traced:
    """Run a module forward once more, without gradients: what lives then is held by the module's own code.

    Args:
        module: Its buffers and torch's random state are left as they were.
        pieces: Its units, in the order in which they run.
        inputs: A batch.
    """
    uses = _Uses(list(module.parameters()), inputs)
    held: list[tuple[Held, ...]] = [()] * len(pieces)

    def run(p: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = uses.values((args, kwargs))
        for value in given:
            value.users.append(p)
        held[p] = tuple(Held(v.owner, v.size) for v in uses.alive() if v not in given)
        uses.here = p
        try:
            out = forward(*args, **kwargs)
        finally:
            uses.here = BETWEEN
        uses.make(out, p)
        return out

    with left_alone(module, inputs), torch.no_grad(), uses:
        installed = Installed(pieces, [(p, p) for p in range(len(pieces))], run)
        try:
            module(inputs)
        finally:
            installed.remove()
    flows = _flows(uses.all, len(pieces))
    waiting = [{_waiting(value, p, flows) for value in uses.all} for p in range(len(pieces))]
    return Traced(
        [frozenset(users) for users in uses.of],
        held,
        [sum(value.size for value in there if value) for there in waiting],
    )


class _Value:
    """A tensor's storage behind a piece or an operation between pieces.

    Attributes:
        maker: The piece, or `BETWEEN`.
        users: Pieces, and what operations between them made of it.
    """

    def __init__(self, storage: torch.UntypedStorage, maker: int) -> None:
        self.size, self.maker = storage.nbytes(), maker
        self.users: list[int | _Value] = []
        # While it is held no other storage gets the address.
        self._weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def gone(self) -> bool:
        return bool(self._weak.expired())  # type: ignore[no-untyped-call]

    @property
    def owner(self) -> int:
        """The piece whose input it is."""
        return next((user for user in self.users if isinstance(user, int)), -1)


def _flows(values: Sequence[_Value], end: int) -> dict[_Value, list[int]]:
    """Of every value the pieces behind which its gradient's parts come, the last to come first."""
    flows: dict[_Value, list[int]] = {}
    for value in reversed(values):  # users are made later
        flows[value] = sorted(u if isinstance(u, int) else flows[u][0] for u in value.users) or [end]
    return flows


def _waiting(value: _Value, p: int, flows: dict[_Value, list[int]]) -> _Value | None:
    """What waits of a value's gradient while piece `p` runs backward, as the value that it is as large as.

    Parts that came are added up, and go on when all are there; a single one that came of a concatenation is a view of
    all of its gradient.
    """
    first, last = flows[value][0], flows[value][-1]
    if not (value.maker < p < last if value.maker != BETWEEN else first <= p < last):
        return None
    came = [user for user in value.users if (user if isinstance(user, int) else flows[user][0]) > p]
    return came[0] if len(came) == 1 and isinstance(came[0], _Value) else value


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where parameters, or views of them, are used (several may lie in one storage), and what is made of what."""

    def __init__(self, parameters: Sequence[Tensor], inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.here = BETWEEN
        self.of: list[set[int]] = [set() for _ in parameters]
        self.all: list[_Value] = []
        self._by_storage: dict[int, _Value] = {}
        self._within: dict[int, list[tuple[int, int]]] = {}  # of a storage, where parameters begin
        for number, p in enumerate(parameters):
            self._within.setdefault(p.untyped_storage()._cdata, []).append((int(p.storage_offset()), number))
        for places in self._within.values():
            places.sort()
        self._fixed = {*self._within, inputs.untyped_storage()._cdata}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it: 80 MB

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            places = self._within.get(tensor.untyped_storage()._cdata)
            at = bisect.bisect_right(places, (tensor.storage_offset(), len(self.of))) - 1 if places else -1
            if places and at >= 0:
                self.of[places[at][1]].add(self.here)
        out = func(*args, **(kwargs or {}))
        if self.here == BETWEEN:
            given = self.values((args, kwargs))
            for made in self.make(out, BETWEEN):
                for value in given:
                    value.users.append(made)
        return out

    def alive(self) -> list[_Value]:
        """The latest value in every storage that something holds: what was changed in place is there once."""
        return [value for value in self._by_storage.values() if not value.gone()]

    def values(self, tree: Any) -> list[_Value]:
        """What is known of these tensors."""
        found = {t.untyped_storage()._cdata: t for t in tensors_in(tree)}
        return [self._by_storage[key] for key in found if key in self._by_storage]

    def make(self, tree: Any, maker: int) -> list[_Value]:
        """Note floats that a piece gives back, or that an operation made anew."""
        made = []
        for tensor in tensors_in(tree):
            key = tensor.untyped_storage()._cdata
            new = key not in self._by_storage or maker != BETWEEN
            if new and key not in self._fixed and tensor.is_floating_point():
                value = self._by_storage[key] = _Value(tensor.untyped_storage(), maker)
                self.all.append(value)
                made.append(value)
        return made
