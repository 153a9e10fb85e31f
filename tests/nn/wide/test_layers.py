"""Test the sparse layers: equal to dense ones if all labels are active, and the right active sets otherwise."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import idletrain.nn
from idletrain.errors import JobError
from idletrain.nn.data.csr import Rows
from idletrain.nn.optim.rowwise import RowAdagrad
from idletrain.nn.program import sampled_softmax
from idletrain.nn.wide.layers import SparseEmbeddingBag, SparseLinear

C, H, B = 500, 16, 12


def label_sets(sets: list[list[int]]) -> Rows:
    offsets = torch.tensor([0, *np.cumsum([len(s) for s in sets])])
    return Rows(offsets, torch.tensor([label for s in sets for label in s], dtype=torch.int64))


def pair(bias: bool = True) -> tuple[SparseLinear, nn.Linear]:
    """Our layer with every label active and torch's with the same values."""
    ours, dense = SparseLinear(H, C, bias=bias, sampler="all"), nn.Linear(H, C, bias=bias)
    with torch.no_grad():
        dense.weight.copy_(ours.weight)
        if ours.bias is not None:
            dense.bias.copy_(ours.bias.normal_())
    return ours, dense


@pytest.mark.parametrize("sampler", ["all", {"name": "uniform", "negatives": C}])
@pytest.mark.parametrize("bias", [True, False])
def test_with_all_labels_active_it_is_the_dense_layer_bit_for_bit(sampler: object, bias: bool) -> None:
    ours, dense = pair(bias)
    ours.sampler = SparseLinear(H, C, sampler=sampler).sampler
    classes = torch.randint(C, (B,))
    hidden = [torch.randn(B, H, requires_grad=True)]
    hidden.append(hidden[0].detach().clone().requires_grad_())
    losses = [ours(hidden[0]).loss(classes), functional.cross_entropy(dense(hidden[1]), classes)]
    for loss in losses:
        loss.backward()
    assert torch.equal(ours(hidden[0]).dense(), dense(hidden[0]))
    assert torch.equal(*losses)
    assert torch.equal(hidden[0].grad, hidden[1].grad)
    assert torch.equal(ours.weight.grad, dense.weight.grad)
    if bias:
        assert torch.equal(ours.bias.grad, dense.bias.grad)


def test_with_all_labels_named_one_by_one_it_is_the_dense_layer_too() -> None:
    """Through the gather and the row-sparse gradient: a batch whose own labels are all there are."""
    ours, dense = pair()
    ours.sampler = SparseLinear(H, C, sampler={"name": "uniform", "negatives": 1}).sampler
    sets = label_sets([list(range(C))])
    hidden = torch.randn(1, H)
    ours(hidden).loss(sets).backward()
    functional.cross_entropy(dense(hidden), torch.full((1, C), 1 / C)).backward()
    assert ours.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.grad.to_dense(), dense.weight.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours.bias.grad.to_dense(), dense.bias.grad, rtol=1e-4, atol=1e-7)


def test_a_gradient_has_the_active_rows_alone_each_once() -> None:
    torch.manual_seed(0)
    layer = SparseLinear(H, C, sampler={"name": "uniform", "negatives": 30})
    sets = label_sets([[3, 7], [7], [499]])
    layer(torch.randn(3, H)).loss(sets).backward()
    rows = layer.weight.grad._indices()[0].tolist()
    assert {3, 7, 499} <= set(rows)
    assert rows == sorted(rows)
    assert len(set(rows)) == len(rows) <= 33
    assert layer.weight.grad._values().shape == (len(rows), H)
    assert layer.bias.grad._indices()[0].tolist() == rows


def test_a_sampled_loss_estimates_the_full_one() -> None:
    torch.manual_seed(0)
    sampled, full = SparseLinear(H, C, sampler={"name": "uniform", "negatives": 100}), SparseLinear(H, C, sampler="all")
    full.load_state_dict(sampled.state_dict())
    hidden, sets = torch.randn(B, H), label_sets([[b, b + 20, b * 30] for b in range(1, B + 1)])
    seen = [float(sampled(hidden).loss(sets).detach()) for _ in range(300)]
    assert np.mean(seen) == pytest.approx(float(full(hidden).loss(sets).detach()), rel=0.01)
    assert np.std(seen) > 0


def test_a_row_without_labels_counts_for_nothing() -> None:
    layer, hidden = SparseLinear(H, C, sampler="all"), torch.randn(3, H)
    with_empty = layer(hidden).loss(label_sets([[4], [], [9, 1]]))
    without = layer(hidden[[0, 2]]).loss(label_sets([[4], [9, 1]]))
    torch.testing.assert_close(with_empty, without)
    nothing = layer(hidden.requires_grad_()).loss(label_sets([[], [], []]))
    nothing.backward()
    assert float(nothing.detach()) == 0
    assert not hidden.grad.any()


def test_a_shard_takes_its_own_labels_and_leaves_the_others() -> None:
    whole = SparseLinear(H, C, sampler="all")
    mine = np.array([2, 5, 30, 31, 400])
    shard = SparseLinear(H, len(mine), sampler="all")
    with torch.no_grad():
        shard.weight.copy_(whole.weight[mine])
    shard.hold(mine)
    hidden = torch.randn(3, H)
    loss = shard(hidden).loss(label_sets([[2, 3], [499], [31, 400]]))
    logits = whole(hidden).dense()[:, mine]
    logp = logits.log_softmax(1)
    torch.testing.assert_close(loss, -(logp[0, 0] + (logp[2, 3] + logp[2, 4]) / 2) / 2)


def test_exact_loss_and_best_labels_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, dense = pair()
    hidden, classes = torch.randn(B, H), torch.randint(C, (B,))
    monkeypatch.setattr("idletrain.nn.wide.layers.LOGITS_BLOCK_BYTES", 4 * B * 33)
    scores, ids = ours.eval()(hidden).topk(5)
    best = dense(hidden).topk(5)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(scores, best.values)
    torch.testing.assert_close(ours(hidden).loss(classes), functional.cross_entropy(dense(hidden), classes))
    assert SparseLinear(H, 3)(hidden).topk(5)[1].shape == (B, 3)


def test_labels_and_features_beyond_the_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="label 500 is beyond the layer's 500"):
        SparseLinear(H, C)(torch.randn(1, H)).loss(label_sets([[500]]))
    with pytest.raises(ValueError, match="feature 9 is beyond the layer's 9"):
        SparseEmbeddingBag(9, H)(label_sets([[9]]))


def test_tables_beyond_their_budget_are_refused_with_the_numbers() -> None:
    with torch.device("meta"):
        layer = SparseLinear(H, 670_091, sampler={"name": "simhash", "k": 18}, most_table_bytes=100 << 20)
    message = r"its tables over 670091 labels take 178\.\d MiB and 100\.0 MiB are allowed"
    with pytest.raises(JobError, match=message):
        layer.train()(torch.zeros(1, H, device="meta")).loss(label_sets([[0]]))


def test_tables_are_rebuilt_by_schedule_and_when_told() -> None:
    layer = SparseLinear(H, C, sampler={"name": "simhash", "k": 3, "tables": 2}, rebuild_every=3, rebuild_growth=2.0)
    built = []
    layer.rebuild = lambda seed, rows=None: (built.append(seed), SparseLinear.rebuild(layer, seed, rows))
    at = []
    for step in range(12):
        layer(torch.randn(1, H)).loss(torch.tensor([step]))
        at.append(len(built))
    assert built == [0, 1, 2]
    assert at == [1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    layer.hold(None)
    layer(torch.randn(1, H)).loss(torch.tensor([0]))
    assert len(built) == 3


def test_fallbacks_are_counted() -> None:
    layer = SparseLinear(H, C, sampler={"name": "simhash", "k": 18, "tables": 1, "negatives": 0}, rebuild_every=1)
    with torch.no_grad():
        layer.weight.abs_()
    for _ in range(5):
        layer(-torch.rand(1, H)).loss(torch.tensor([0]))
    assert layer.drawn_batches == 5
    assert layer.fallbacks == 5


def test_sparse_inference_needs_tables_and_finds_a_near_row() -> None:
    layer = SparseLinear(H, C, bias=False, sampler={"name": "simhash", "k": 4, "tables": 30})
    with torch.no_grad():
        layer.weight.copy_(functional.normalize(layer.weight, dim=1))
    layer.rebuild(0)
    best = layer(layer.weight.detach()[:20]).retrieved_topk(3, keep=50)
    assert best.shape == (20, 3)
    assert (best[:, 0] == torch.arange(20)).sum() >= 18
    with pytest.raises(JobError, match="sparse inference needs tables"):
        SparseLinear(H, C)(torch.randn(1, H)).retrieved_topk(3, 5)


@pytest.mark.parametrize("sampler", [{"name": "uniform", "negatives": 50}, {"name": "inverted-file", "lists": 8}])
def test_bfloat16_rows_take_half_the_memory_and_learn(sampler: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = SparseLinear(H, C, sampler=sampler, dtype=torch.bfloat16)
    assert layer.weight.nbytes == C * H * 2
    hidden, classes = torch.randn(64, H), torch.arange(64)
    optimizer = RowAdagrad(layer.parameters(), lr=0.3, start=1e-4)
    before = float(layer.eval()(hidden).loss(classes).detach())
    for _ in range(30):
        optimizer.zero_grad()
        layer.train()(hidden).loss(classes).backward()
        optimizer.step()
    assert float(layer.eval()(hidden).loss(classes).detach()) < before / 2


def test_a_bag_of_bfloat16_is_one_of_float32() -> None:
    bag, half = SparseEmbeddingBag(20, H), SparseEmbeddingBag(20, H)
    half.weight.data = bag.weight.data.bfloat16()
    bag.weight.data = half.weight.data.float()
    x = Rows(torch.tensor([0, 2, 5]), torch.tensor([3, 7, 0, 3, 19]), torch.randn(5))
    torch.testing.assert_close(bag(x), half(x))
    for layer in (bag, half):
        layer(x).square().sum().backward()
    torch.testing.assert_close(half.weight.grad.to_dense().float(), bag.weight.grad.to_dense(), rtol=1e-2, atol=1e-2)


def test_any_network_can_end_in_it() -> None:
    """Several positions a sample, as a language model has them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, H), nn.ReLU(), SparseLinear(H, C, sampler="all"))
    x, classes = torch.randn(2, 3, 4), torch.randint(C, (2, 3))
    loss = sampled_softmax(network(x), classes)
    dense = functional.linear(network[:2](x).flatten(0, 1), network[2].weight, network[2].bias)
    torch.testing.assert_close(loss, functional.cross_entropy(dense, classes.flatten()))


def test_the_layers_are_idletrain_nn_s_own() -> None:
    assert idletrain.nn.wide.SparseLinear is SparseLinear
    assert idletrain.nn.wide.SparseEmbeddingBag is SparseEmbeddingBag
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = idletrain.nn.Nothing


# --- shards that train together --------------------------------------------------------------------------------------


class Meeting:
    """Shards in threads of this process, who pass each other what `Together` exchanges."""

    def __init__(self, shards: int) -> None:
        self._barrier = threading.Barrier(shards, timeout=10)
        self._passed: dict[int, torch.Tensor] = {}

    def all_of(self, me: int, own: torch.Tensor) -> torch.Tensor:
        self._passed[me] = own.detach()
        self._barrier.wait()
        everything = torch.stack([self._passed[k] for k in sorted(self._passed)])
        self._barrier.wait()
        return everything


class Member(NamedTuple):
    """One shard's side of it."""

    meeting: Meeting
    me: int

    def logsumexp(self, own_B: torch.Tensor) -> torch.Tensor:
        return self.meeting.all_of(self.me, own_B).logsumexp(0)

    def sum(self, own_BH: torch.Tensor) -> torch.Tensor:
        return self.meeting.all_of(self.me, own_BH).sum(0)


@pytest.mark.parametrize("sets", ["one label each", "several labels, some rows without"])
def test_shards_that_train_together_have_the_gradients_of_one_softmax(sets: str) -> None:
    whole = SparseLinear(H, C, sampler="all")
    labels = [[k * 37 % C] for k in range(B)] if sets == "one label each" else [[], [3, 4, 499], [250], []] * (B // 4)
    given, hidden = label_sets(labels), torch.randn(B, H)
    held = [torch.arange(k, C, 3) for k in range(3)]
    meeting = Meeting(3)

    def train(k: int) -> tuple[torch.Tensor, SparseLinear]:
        shard = SparseLinear(H, len(held[k]), sampler="all")
        with torch.no_grad():
            shard.weight.copy_(whole.weight[held[k]])
        shard.hold(held[k].numpy())
        shard.together = Member(meeting, k)
        mine = hidden.clone().requires_grad_()
        shard(mine).loss(given).backward()
        return mine.grad, shard

    with ThreadPoolExecutor(3) as threads:
        trained = list(threads.map(train, range(3)))
    expected = hidden.clone().requires_grad_()
    whole(expected).loss(given).backward()
    for k, (gradient, shard) in enumerate(trained):
        assert torch.equal(gradient, trained[0][0]), "members' hidden layers would drift apart"
        assert torch.allclose(gradient, expected.grad, atol=1e-6)
        assert torch.allclose(shard.weight.grad, whole.weight.grad[held[k]], atol=1e-6)
        assert torch.allclose(shard.bias.grad, whole.bias.grad[held[k]], atol=1e-6)
