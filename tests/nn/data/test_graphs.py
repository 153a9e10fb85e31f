"""Graphs of torch_geometric: joined to one, measured, moved and given to modules that its users write."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import joined
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import idletrain
from idletrain.nn.data import batches
from idletrain.nn.data.given import as_samples

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # a part of it is compiled by torch.jit
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCN, GCNConv, global_mean_pool


def graphs(count: int) -> list[Data]:
    """Rings of 3 to 6 nodes, and their class: the largest of three features' sums."""
    return [Data(x=x, edge_index=edges, y=torch.tensor([label])) for x, edges, label in joined.graphs(count)]


class OneArgument(nn.Module):
    """A classifier of graphs that takes a `Batch`."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.second = GCNConv(joined.FEATURES, hidden), GCNConv(hidden, hidden)
        self.last = nn.Linear(hidden, joined.CLASSES)

    def forward(self, batch: Any) -> Tensor:
        hidden = torch.relu(self.first(batch.x, batch.edge_index))
        hidden = torch.relu(self.second(hidden, batch.edge_index))
        return self.last(global_mean_pool(hidden, batch.batch))


class ByName(OneArgument):
    """The same, which takes a graph's parts by their names."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return super().forward(Data(x=x, edge_index=edge_index, batch=batch))


GIVEN = {
    "a list": graphs,
    "a DataLoader": lambda count: DataLoader(graphs(count), batch_size=4),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("count", [2, 7])
def test_graphs_are_joined_as_torch_geometric_joins_them(given: Any, count: int) -> None:
    samples = as_samples(given(count))
    assert len(samples) == count
    inputs, target = samples.batch(np.arange(count))
    expected = Batch.from_data_list(graphs(count))
    assert target is inputs
    assert isinstance(inputs, Batch)
    assert inputs.keys() == expected.keys()
    for name, part in expected.to_dict().items():
        assert torch.equal(inputs[name], part), name
        assert inputs[name].dtype == part.dtype
    assert batches.sample_count(inputs, target) == count
    assert batches.is_joined(inputs, target)
    assert torch.equal(batches.labels_of(target), expected.y)


def test_a_graph_alone_is_a_sample() -> None:
    (graph,) = graphs(1)
    samples = as_samples(graph)
    assert len(samples) == 1
    inputs, _ = samples.batch(np.arange(1))
    assert torch.equal(inputs.x, graph.x)


def test_a_module_takes_a_graph_whole_or_its_parts_by_name() -> None:
    (inputs, _) = as_samples(graphs(5)).batch(np.arange(5))
    torch.manual_seed(0)
    whole = OneArgument()
    by_name = ByName()
    by_name.load_state_dict(whole.state_dict())
    assert batches.call(whole, inputs).shape == (5, joined.CLASSES)
    assert torch.equal(batches.call(by_name, inputs), batches.call(whole, inputs))
    nodes = GCN(joined.FEATURES, 8, 2, joined.CLASSES)
    assert batches.call(nodes, inputs).shape == (len(inputs.x), joined.CLASSES)


def test_a_copy_of_a_graph_leaves_the_graph_as_it_was() -> None:
    (inputs, _) = as_samples(graphs(3)).batch(np.arange(3))
    before = inputs.x.clone()
    copy = batches.fresh(inputs)
    copy.x.zero_()
    there, target = batches.moved((inputs, inputs), "cpu")
    assert there is target
    assert isinstance(there, Batch)
    assert there.num_graphs == copy.num_graphs == 3
    assert torch.equal(inputs.x, before)


@pytest.mark.parametrize(("module", "form"), [(OneArgument, "a DataLoader"), (ByName, "a list")])
def test_a_classifier_of_graphs_learns_on_workers(module: type[OneArgument], form: str, tmp_path: Path) -> None:
    given = GIVEN[form]
    torch.manual_seed(0)
    result = idletrain.fit(
        module(32),
        given(240),
        test=given(60),
        optimizer={"name": "adamw", "lr": 0.01},
        method="local-sgd",
        batch_size=24,
        subnets=2,
        workers=2,
        rounds=8,
        local_steps=10,
        run_dir=tmp_path,
    )
    assert result.summary["accuracy"] > 0.7
    inputs, _ = as_samples(graphs(60)).batch(np.arange(60))
    outputs = batches.call(result.module.eval(), inputs)
    assert float((outputs.argmax(1) == inputs.y).float().mean()) > 0.7
