"""Cut a module into units: after heavy operations along chains, at blocks elsewhere, or at the modules a job names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from idletrain.errors import JobError
from idletrain.nn.scripted import is_scripted

# A unit ends after one of these: it saves only its input, so recomputation stops before it (early stop).
HEAVY = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.MultiheadAttention,
    nn.RNNBase,
)


@dataclass(frozen=True, eq=False)
class Piece:
    """The modules of a unit: one module, or neighbours within an `nn.Sequential`.

    Attributes:
        name: Made from its modules' names.
        owner: The module whose `forward` runs it: the module itself, or the outermost Sequential of its chain.
        modules: The modules, in forward order.
        follows: Its input is the output of the piece before it, within one Sequential.
    """

    name: str
    owner: nn.Module
    modules: tuple[nn.Module, ...]
    follows: bool

    @property
    def chained(self) -> bool:
        """Return True if it is a part of a Sequential."""
        return self.modules != (self.owner,)

    def run(self, x: Any) -> Any:
        """Run its modules on the input `x`, one after another."""
        for module in self.modules:
            x = module(x)
        return x

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield its parameters, each once."""
        seen: set[int] = set()
        for module in self.modules:
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def pieces_of(module: nn.Module, names: Sequence[str] = ()) -> list[Piece]:
    """Return a module's units in forward order.

    Args:
        module: Any module.
        names: Names of submodules that are one unit each; units are chosen automatically if empty.

    Raises:
        JobError: there is no submodule of a name, or one is within another.
    """
    return _named(module, names) if names else list(_automatic(module, "", root=True))


def _named(module: nn.Module, names: Sequence[str]) -> list[Piece]:
    submodules = dict(module.named_modules())
    if unknown := [name for name in names if name not in submodules]:
        raise JobError(
            f"memory.units: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not among the model's modules; "
            f"it has {', '.join(name for name in submodules if name)}"
        )
    for name in names:
        inside = [other for other in names if other.startswith(f"{name}.")]
        if inside:
            raise JobError(f"memory.units: {inside[0]} lies within {name}; name one of them")
    return [Piece(name, submodules[name], (submodules[name],), follows=False) for name in names]


def _automatic(module: nn.Module, name: str, *, root: bool = False) -> Iterator[Piece]:
    """Yield the pieces of a module: cut chains, keep blocks whole, and descend into containers of blocks."""
    if _is_chain(module):
        yield from _cut(module, list(_flat(module, name)))
    elif root or _holds_blocks(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child_name, child in module.named_children():
            yield from _automatic(child, f"{name}.{child_name}" if name else child_name)
    else:
        yield Piece(name, module, (module,), follows=False)


def _is_chain(module: nn.Module) -> bool:
    if is_scripted(module):
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module)
    return type(module).forward is nn.Sequential.forward and len(module._modules) > 0 and not hooked


def _holds_blocks(module: nn.Module) -> bool:
    """Return True if the module contains a list of two or more modules that have children (blocks)."""
    return any(
        isinstance(inner, nn.Sequential | nn.ModuleList)
        and sum(any(True for _ in child.children()) for child in inner.children()) > 1
        for inner in module.modules()
    )


def _flat(chain: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in chain.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if _is_chain(child):
            yield from _flat(child, full)
        else:
            yield full, child


def _cut(owner: nn.Module, members: list[tuple[str, nn.Module]]) -> Iterator[Piece]:
    """Yield the pieces of a chain: each ends after a heavy operation or block and in-place changes of its output."""
    run: list[tuple[str, nn.Module]] = []
    first = True
    for i, (name, module) in enumerate(members):
        run.append((name, module))
        heavy = isinstance(module, HEAVY) or any(True for _ in module.children())
        ended = heavy or _in_place(module)
        following = members[i + 1][1] if i + 1 < len(members) else None
        has_heavy = any(isinstance(m, HEAVY) or any(True for _ in m.children()) for _, m in run)
        if (ended and has_heavy and not (following is not None and _in_place(following))) or following is None:
            names = [n for n, _ in run]
            yield Piece(_span(names), owner, tuple(m for _, m in run), follows=not first)
            run, first = [], False


def _in_place(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False))


def _span(names: list[str]) -> str:
    """Return one name for consecutive modules, such as `features.3-6` for `features.3` to `features.6`."""
    if len(names) == 1:
        return names[0]
    prefix, _, last = names[-1].rpartition(".")
    return f"{names[0]}-{last}" if names[0].rpartition(".")[0] == prefix else f"{names[0]}-{names[-1]}"


SegmentRunner = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Installed:
    """Replace the `forward` of units' owners: run each segment through `runner(segment, run, args, kwargs)`.

    Args:
        pieces: The units in forward order.
        segments: Indices of each segment's first and last piece; they differ only along a chain.
        runner: Runs one segment.
    """

    def __init__(self, pieces: Sequence[Piece], segments: Sequence[tuple[int, int]], runner: SegmentRunner) -> None:
        self._runner = runner
        self._instance_forwards: dict[nn.Module, Any] = {}  # of modules whose `forward` was set on the instance
        self._owners: dict[nn.Module, list[tuple[int, list[Piece]]]] = {}
        for s, (first, last) in enumerate(segments):
            self._owners.setdefault(pieces[first].owner, []).append((s, list(pieces[first : last + 1])))
        for owner, parts in self._owners.items():
            if "forward" in owner.__dict__:
                self._instance_forwards[owner] = owner.__dict__["forward"]
            owner.forward = self._chain(parts) if parts[0][1][0].chained else self._single(owner, parts[0][0])

    def remove(self) -> None:
        """Restore the modules' own `forward`."""
        for owner in self._owners:
            owner.__dict__.pop("forward", None)
            if owner in self._instance_forwards:
                owner.forward = self._instance_forwards[owner]

    def _single(self, owner: nn.Module, segment: int) -> Callable[..., Any]:
        own = owner.forward
        return lambda *args, **kwargs: self._runner(segment, own, args, kwargs)

    def _chain(self, parts: list[tuple[int, list[Piece]]]) -> Callable[..., Any]:
        def run_all(pieces: list[Piece]) -> Callable[..., Any]:
            def run(x: Any) -> Any:
                for piece in pieces:
                    x = piece.run(x)
                return x

            return run

        runs = [(segment, run_all(pieces)) for segment, pieces in parts]

        def forward(x: Any) -> Any:
            for segment, run in runs:
                x = self._runner(segment, run, (x,), {})
            return x

        return forward
