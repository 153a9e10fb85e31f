"""How updates travel: the parameter store's server, its client, and the words between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idletrain.exchange.ddp import ddp_hook

__all__ = ["ddp_hook"]


def __getattr__(name: str) -> object:
    """`ddp_hook` when it is asked for: what imports `exchange.messages` does without torch."""
    if name != "ddp_hook":
        raise AttributeError(name)
    from idletrain.exchange.ddp import ddp_hook

    return ddp_hook
