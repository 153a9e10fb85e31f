"""Residual blocks that a network can do without: left out of a subnet, they are the identity in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class Part(enum.Enum):
    """Parts of what a block returns."""

    HIDDEN = "the hidden state"


@dataclass(frozen=True)
class SkippableBlock:
    """A residual block: it changes a hidden state, and the network runs without the change.

    Attributes:
        name: Its name in the module.
        argument: The position or the name of the argument that holds the hidden state.
        result: What it returns, with `Part.HIDDEN` in the place of the changed hidden state: that alone, or a tuple,
            list or dict with None in the place of all other tensors.
        additive: It adds its change to the hidden state, so that the change can be scaled; False where the sum is
            normalized before it is returned.
    """

    name: str
    argument: int | str
    result: Any
    additive: bool

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the hidden state in its arguments."""
        hidden: Tensor = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        return hidden

    def after(self, outputs: Any) -> Tensor:
        """Return the hidden state in its outputs."""
        hidden: Tensor = outputs if self.result is Part.HIDDEN else outputs[self._place]
        return hidden

    def unchanged(self, hidden: Tensor) -> Any:
        """Return outputs with this hidden state and without any other tensor."""
        return self.replaced(self.result, hidden)

    def replaced(self, outputs: Any, hidden: Tensor) -> Any:
        """Return outputs with another hidden state."""
        if self.result is Part.HIDDEN:
            return hidden
        if isinstance(outputs, dict):
            return {**outputs, self._place: hidden}
        return type(outputs)(hidden if i == self._place else part for i, part in enumerate(outputs))

    @property
    def _place(self) -> Any:
        named = self.result.items() if isinstance(self.result, dict) else enumerate(self.result)
        return next(place for place, part in named if part is Part.HIDDEN)


class _Changed:
    """Run a block with its change of the hidden state multiplied by a factor; with 0 it does not run at all.

    Args:
        block: The block.
        layer: Its module.
        factor: The factor.
    """

    def __init__(self, block: SkippableBlock, layer: nn.Module, factor: float) -> None:
        self._block, self._forward, self._factor = block, layer.forward, factor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module.forward`."""
        hidden = self._block.before(args, kwargs)
        if not self._factor:
            return self._block.unchanged(hidden)
        outputs = self._forward(*args, **kwargs)
        return self._block.replaced(outputs, hidden + (self._block.after(outputs) - hidden) * self._factor)


def change_by(module: nn.Module, block: SkippableBlock, factor: float) -> None:
    """Multiply a block's change of the hidden state in a module by a factor: 0 leaves the block out."""
    if factor != 1:
        layer = module.get_submodule(block.name)
        vars(layer)["forward"] = _Changed(block, layer, factor)
