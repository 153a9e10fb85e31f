"""Row-sparse steps against torch's dense or sparse optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from idletrain.nn.optim import rowwise
from idletrain.nn.optim.rowwise import RowAdagrad, round_at_random


@pytest.fixture(autouse=True)
def _drawn_alike() -> None:
    """A gradient drawn near zero would make more of where each optimizer adds epsilon than the tolerance allows."""
    torch.manual_seed(0)


def sparse(index: list[int], rows: Tensor, size: int = 6) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([index]), rows, (size, *rows.shape[1:]), check_invariants=True)


def test_sgd_moves_the_rows_of_the_gradient_alone() -> None:
    parameter, rows = torch.randn(6, 3), torch.randn(2, 3)
    before = parameter.clone()
    rowwise.sgd(parameter, sparse([4, 1], rows), lr=0.1, weight_decay=0.5)
    expected = before.clone()
    expected[[4, 1]] -= 0.1 * (rows + 0.5 * before[[4, 1]])
    torch.testing.assert_close(parameter, expected)


def test_lazy_adam_is_torch_s_sparse_adam() -> None:
    ours, theirs = torch.randn(6, 3), None
    theirs = nn.Parameter(ours.clone())
    optimizer = torch.optim.SparseAdam([theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    state = torch.zeros(6, 3), torch.zeros(6, 3)
    for step, index in enumerate(([0, 2], [2, 5], [0, 5]), 1):
        gradient = sparse(index, torch.randn(2, 3))
        theirs.grad = gradient
        optimizer.step()
        rowwise.lazy_adam(ours, gradient, state, step, lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def by_definition(parameter: Tensor, gradients: list[tuple[list[int], Tensor]], lr: float, start: float) -> Tensor:
    """One sum a row, in plain float64."""
    result, sums = parameter.double().clone(), [start] * len(parameter)
    for index, rows in gradients:
        for row, grad in zip(index, rows.double(), strict=True):
            sums[row] += float((grad**2).mean())
            result[row] -= lr * grad / sums[row] ** 0.5
    return result.float()


@pytest.mark.parametrize("shape", [(6, 3), (6,)])
def test_row_wise_adagrad_is_its_definition(shape: tuple[int, ...]) -> None:
    parameter, sums = torch.randn(shape), torch.zeros(6)
    gradients = [(index, torch.randn(2, *shape[1:])) for index in ([0, 2], [2, 5], [0, 5])]
    expected = by_definition(parameter, gradients, 0.3, 1e-4)
    for index, rows in gradients:
        rowwise.row_adagrad(parameter, sparse(index, rows), sums, lr=0.3, start=1e-4)
    torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_row_that_a_gradient_names_twice_moves_once_by_the_sum() -> None:
    rows, parameter = torch.randn(3, 3), torch.randn(6, 3)
    expected = by_definition(parameter, [([1, 4], torch.stack([rows[1], rows[0] + rows[2]]))], 0.3, 1e-4)
    rowwise.row_adagrad(parameter, sparse([4, 1, 4], rows), torch.zeros(6), lr=0.3, start=1e-4)
    torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_dense_gradient_is_one_of_all_rows() -> None:
    parameter, gradient = torch.randn(6, 3), torch.randn(6, 3)
    twin, sums, others = parameter.clone(), torch.zeros(6), torch.zeros(6)
    rowwise.row_adagrad(parameter, gradient, sums, lr=0.3, start=1e-4)
    rowwise.row_adagrad(twin, sparse([0, 1, 2, 3, 4, 5], gradient), others, lr=0.3, start=1e-4)
    assert torch.equal(parameter, twin)
    assert torch.equal(sums, others)


def test_bfloat16_rows_follow_float32_ones_in_the_mean() -> None:
    """Steps of a thousandth of the weight are lost when rounded to the nearest."""
    parameter = torch.ones(400, 8, dtype=torch.bfloat16)
    sums = torch.zeros(400)
    for _ in range(20):
        rowwise.row_adagrad(parameter, sparse(list(range(400)), torch.ones(400, 8), 400), sums, lr=1e-3, start=1.0)
    exact = by_definition(torch.ones(1, 8), [([0], torch.ones(1, 8))] * 20, 1e-3, 1.0)
    assert float(exact[0, 0]) < 1 - 0.005
    assert float(parameter.float().mean()) == pytest.approx(float(exact[0, 0]), abs=2e-4)


def test_rounding_at_random_keeps_what_bfloat16_can_say() -> None:
    x = torch.tensor([1.0, -2.5, 0.0, 3e-30])
    assert torch.equal(round_at_random(x.to(torch.bfloat16).float(), torch.bfloat16), x.to(torch.bfloat16))
    between = round_at_random(torch.full((10_000,), 1 + 1 / 512), torch.bfloat16).float()
    assert set(between.tolist()) == {1.0, 1.0078125}
    assert float(between.mean()) == pytest.approx(1 + 1 / 512, abs=2e-4)


def test_the_optimizer_steps_every_parameter_that_has_a_gradient() -> None:
    embedding, idle = nn.Embedding(6, 3, sparse=True), nn.Linear(2, 2)
    before = embedding.weight.detach().clone()
    optimizer = RowAdagrad([*embedding.parameters(), *idle.parameters()], lr=0.5, start=1e-3)
    loss = optimizer.step(lambda: embedding(torch.tensor([1, 1, 4])).sum().backward())
    assert loss is None
    moved = (embedding.weight.detach() != before).any(1)
    assert moved.tolist() == [False, True, False, False, True, False]
    expected = by_definition(before, [([1, 4], torch.tensor([[2.0] * 3, [1.0] * 3]))], 0.5, 1e-3)
    torch.testing.assert_close(embedding.weight.detach(), expected)
