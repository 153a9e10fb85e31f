"""Networks with hundreds of thousands of outputs: layers, samplers, indexes and shards of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idletrain.nn.wide.layers import SparseEmbeddingBag as SparseEmbeddingBag
    from idletrain.nn.wide.layers import SparseLinear as SparseLinear

__all__ = ["SparseEmbeddingBag", "SparseLinear"]


def __getattr__(name: str) -> Any:
    """Import the sparse layers on first use: they need Numba, whose import takes a second that others save."""
    if name in __all__:
        from idletrain.nn.wide import layers

        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
