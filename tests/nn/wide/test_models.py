"""Test the network for extreme classification: initial values, training and ranking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from idletrain.nn.data.extreme import SparseFiles, SparseSamples
from idletrain.nn.optim.rowwise import RowAdagrad
from idletrain.nn.wide.models import rank_labels, recall, wide

FEATURES, LABELS = 120, 80


@pytest.fixture
def samples(tmp_path: Path) -> SparseSamples:
    """Each label but the last has words of its own, and noise."""
    random = np.random.default_rng(0)
    lines = ["1000 120 80\n"]
    for label in random.integers(0, LABELS - 1, 1000):
        features = sorted({int(label), *random.integers(0, FEATURES, 3).tolist()})
        lines.append(f"{label} {' '.join(f'{word}:1' for word in features)}\n")
    (tmp_path / "train.txt").write_text("".join(lines))
    return SparseFiles((str(tmp_path / "train.txt"),)).open()


def test_label_rows_start_as_the_centred_mean_of_their_rows_hidden_vectors(samples: SparseSamples) -> None:
    torch.manual_seed(0)
    network = wide(FEATURES, 16, LABELS)
    network.start_from(samples)
    x, _ = samples.batch(np.arange(len(samples)))
    hidden = functional.normalize(network.hidden(x), dim=1).detach()
    mine = torch.from_numpy(samples.holding(np.array([7])))
    expected = functional.normalize(hidden[mine].mean(0) - hidden.mean(0), dim=0)
    torch.testing.assert_close(network.output.weight[7].detach(), expected, rtol=1e-4, atol=1e-5)
    assert not network.output.weight[LABELS - 1].detach().any()
    untouched = wide(FEATURES, 16, LABELS, start="random")
    before = untouched.output.weight.detach().clone()
    untouched.start_from(samples)
    assert torch.equal(untouched.output.weight.detach(), before)


@pytest.mark.parametrize(
    "sampler",
    ["uniform", "log-uniform", {"name": "simhash", "k": 4, "tables": 8}, {"name": "inverted-file", "lists": 8}],
)
def test_it_learns_from_the_data_s_start_and_from_a_random_one(samples: SparseSamples, sampler: Any) -> None:
    reached = {}
    for start in ("data", "random"):
        torch.manual_seed(0)
        small = {"name": sampler, "negatives": 30} if isinstance(sampler, str) else {**sampler, "negatives": 15}
        network = wide(FEATURES, 16, LABELS, sampler=small, start=start)
        network.start_from(samples)
        initial = rank_labels(network, samples).precision[0]
        optimizer = RowAdagrad(network.parameters(), lr=0.05, start=1e-4)
        order = np.random.default_rng(0)
        network.train()
        for _ in range(100):
            x, y = samples.batch(order.integers(0, len(samples), 64))
            optimizer.zero_grad()
            network(x).loss(y).backward()
            optimizer.step()
        reached[start] = initial, rank_labels(network, samples).precision[0]
    assert reached["data"][0] > 0.3 > 0.05 > reached["random"][0]
    assert all(after > before + 0.1 and after > 0.6 for before, after in reached.values()), reached


def test_a_ranking_has_all_figures_up_to_five(samples: SparseSamples) -> None:
    network = wide(FEATURES, 16, LABELS)
    network.start_from(samples)
    ranking = rank_labels(network, samples)
    assert ranking.precision.shape == ranking.ndcg.shape == ranking.propensity_precision.shape == (5,)
    assert ranking.precision[0] > ranking.precision[4] * 2
    assert ranking.ndcg[4] >= ranking.precision[0] == ranking.ndcg[0]


def test_sparse_inference_tells_its_recall(samples: SparseSamples) -> None:
    torch.manual_seed(0)
    network = wide(FEATURES, 16, LABELS, sampler={"name": "simhash", "k": 3, "tables": 20}, bias=False)
    network.start_from(samples)
    network.output.rebuild(0)
    few, many = (recall(network, samples, keep) for keep in (5, LABELS))
    assert few[0] < many[0] <= 1
    assert many[0] > 0.9
    assert many[1] == pytest.approx(rank_labels(network, samples).precision[0], abs=0.02)


@pytest.mark.parametrize(
    ("changes", "fault"), [({"hidden": 0}, "should be positive"), ({"start": "zero"}, "should be data or random")]
)
def test_odd_sizes_and_starts_are_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        wide(**{"features": 3, "hidden": 3, "labels": 3, **changes})
