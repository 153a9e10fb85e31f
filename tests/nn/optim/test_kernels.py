"""The compiled loops, against torch and plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from idletrain.nn.optim import kernels

RANDOM = np.random.default_rng(0)


def test_a_bag_s_gradient_is_torch_s() -> None:
    weight = torch.randn(20, 6, requires_grad=True)
    offsets, indices = np.array([0, 3, 3, 8]), np.array([1, 5, 7, 0, 1, 5, 5, 19])
    values = RANDOM.normal(size=8).astype(np.float32)
    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(indices),
        weight,
        torch.from_numpy(offsets[:-1]),
        mode="sum",
        per_sample_weights=torch.from_numpy(values),
    )
    grad = torch.randn(3, 6)
    expected.backward(grad)
    unique, places = np.unique(indices, return_inverse=True)
    rows = np.zeros((len(unique), 6), np.float32)
    kernels.bag_backward(offsets, places, values, grad.numpy(), rows)
    assert weight.grad is not None
    torch.testing.assert_close(torch.from_numpy(rows), weight.grad[torch.from_numpy(unique)])


def test_distinct_numbers_come_in_the_order_of_their_first_appearance() -> None:
    find = kernels.Distinct(100)
    for _ in range(2):  # what one call leaves does not disturb the next
        ids = RANDOM.integers(0, 100, 60)
        unique, places = find(ids)
        assert unique.tolist() == list(dict.fromkeys(ids.tolist()))
        assert np.array_equal(unique[places], ids)
    assert len(find(np.empty(0, np.int64))[0]) == 0


@pytest.mark.parametrize("odd", [-1, 100])
def test_numbers_beyond_are_refused(odd: int) -> None:
    with pytest.raises(ValueError, match="are not all within 0 to 99"):
        kernels.Distinct(100)(np.array([5, odd]))


def test_rows_move_each_at_its_own_rate_and_others_stay() -> None:
    weight, sums = torch.randn(20, 6), torch.rand(20)
    index, grad = torch.tensor([7, 0, 19]), torch.randn(3, 6)
    summed = sums.index_add(0, index, grad.square().mean(1))
    rates = 0.1 / ((summed[index] + 0.01).sqrt() + 0.001)
    expected = weight.index_add(0, index, -rates[:, None] * grad)
    kernels.adagrad_rows(*(t.numpy() for t in (weight, sums, index, grad)), 0.1, 0.01, 0.001)
    torch.testing.assert_close((weight, sums), (expected, summed))
