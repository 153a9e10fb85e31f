"""torch_geometric's graphs (`Data`) and several of them joined to one (`Batch`).

The package is not imported here: where it is not imported, no object is one of its graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

GRAPH_LABELS = "y"  # their name in torch_geometric's data sets


def is_graph(value: Any) -> bool:
    """Return whether an object is a torch_geometric `Data`, or a `Batch` of them."""
    package = sys.modules.get("torch_geometric.data")
    return package is not None and isinstance(value, package.Data)


def join_graphs(graphs: Sequence[Any]) -> Any:
    """Join graphs to one, between whose parts there is no edge, as torch_geometric's DataLoader does."""
    return sys.modules["torch_geometric.data"].Batch.from_data_list(list(graphs))
