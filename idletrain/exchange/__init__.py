"""The exchange of updates: the parameter store's server, its client, and the messages between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idletrain.exchange.ddp import ddp_hook

__all__ = ["ddp_hook"]


def __getattr__(name: str) -> object:
    """Import `ddp_hook` on first use, so that importing `exchange.messages` does not import torch."""
    if name != "ddp_hook":
        raise AttributeError(name)
    from idletrain.exchange.ddp import ddp_hook

    return ddp_hook
