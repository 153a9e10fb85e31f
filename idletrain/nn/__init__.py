"""What one worker computes: neuron groups, partitions, subnets, local steps, models, data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idletrain.nn.sparse import SparseEmbeddingBag as SparseEmbeddingBag
    from idletrain.nn.sparse import SparseLinear as SparseLinear

__all__ = ["SparseEmbeddingBag", "SparseLinear"]


def __getattr__(name: str) -> Any:
    """Numba, which the sparse layers need, is imported by who uses them: it takes every other worker a second."""
    if name in __all__:
        from idletrain.nn import sparse

        return getattr(sparse, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
