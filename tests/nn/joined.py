"""Batches whose rows are not samples: graphs joined to one, as torch_geometric's Batch, and sequences by time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

FEATURES, CLASSES = 5, 3


@dataclass
class Graphs:
    """Nodes `[V, 5]`, edges `[2, E]`, and the graph of every node `[V]`."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    num_graphs: int


class GraphNet(nn.Module):
    """One message to each neighbour, and the mean of a graph's nodes."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(FEATURES, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, graphs: Graphs) -> Tensor:
        came_from, goes_to = graphs.edge_index
        hidden = torch.relu(self.first(graphs.x))
        hidden = torch.relu(self.second(hidden + torch.zeros_like(hidden).index_add(0, goes_to, hidden[came_from])))
        count = int(graphs.num_graphs)
        sums = hidden.new_zeros(count, hidden.shape[1]).index_add(0, graphs.batch, hidden)
        nodes = hidden.new_zeros(count).index_add(0, graphs.batch, hidden.new_ones(len(hidden)))
        return self.last(sums / nodes.unsqueeze(1))


def graphs(count: int, seed: int = 0) -> list[Any]:
    """Rings of 3 to 6 nodes, and their class: the largest of three features' sums."""
    draw = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        nodes = int(torch.randint(3, 7, (), generator=draw))
        x = torch.randn(nodes, FEATURES, generator=draw)
        ring = torch.arange(nodes)
        items.append((x, torch.stack([ring, ring.roll(1)]), int(x[:, :CLASSES].sum(0).argmax())))
    return items


def join(items: list[Any]) -> tuple[Graphs, Tensor]:
    """The graphs as one whose parts have no edge between them."""
    sizes = torch.tensor([len(x) for x, _, _ in items])
    starts = sizes.cumsum(0) - sizes
    edges = torch.cat([edges + start for (_, edges, _), start in zip(items, starts, strict=True)], 1)
    batch = torch.repeat_interleave(torch.arange(len(items)), sizes)
    labels = torch.tensor([label for _, _, label in items])
    return Graphs(torch.cat([x for x, _, _ in items]), edges, batch, len(items)), labels


class Recurrent(nn.Module):
    """An LSTM whose sequences are `[T, N, F]`, wide enough to be cut in two."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(FEATURES, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x_TNF: Tensor) -> Tensor:
        return self.last(self.cell(x_TNF)[0].mean(0))


def sequences(count: int) -> list[Any]:
    """The graphs' nodes, one after the other."""
    return [(x, label) for x, _, label in graphs(count)]


def by_time(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Sequences `[6, N, F]`: of one length, so that they do not depend on the others of a batch."""
    return pad_sequence([*(x for x, _ in items), torch.zeros(6, FEATURES)])[:, :-1], torch.tensor(
        [label for _, label in items]
    )
