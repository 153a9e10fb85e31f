"""The order of samples, by a DataLoader's sampler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.data.datasets import Loading, MapStyleSource
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.orders import SamplerOrder, batch_order, unrepeatable

DATASET = TensorDataset(torch.zeros(10, 2), torch.arange(10))
TRAINING = TrainingSettings(subnets=2, batch_size=3)


def batches(sampler: Any, count: int, subnets: int = 2) -> list[list[int]]:
    order = SamplerOrder(0, sampler, 3, subnets)
    return [order.batch(n % subnets, n // subnets).tolist() for n in range(count)]


def test_samples_come_in_order_and_the_subnets_take_the_batches_in_turn() -> None:
    assert batches(SequentialSampler(DATASET), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


def test_a_subset_and_weights_are_kept_and_every_epoch_draws_anew() -> None:
    seen = batches(SubsetRandomSampler([1, 2, 3, 4, 5, 6]), 4)
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == [1, 2, 3, 4, 5, 6]
    assert seen[:2] != seen[2:]
    weights = [0.0] * 9 + [1.0]
    assert batches(WeightedRandomSampler(weights, 10), 4) == [[9, 9, 9]] * 4


def test_a_batch_sampler_s_batches_are_kept_whatever_their_size() -> None:
    assert batches([[0, 1], [2, 3, 4, 5]], 3) == [[0, 1], [2, 3, 4, 5], [0, 1]]
    assert batches(BatchSampler(SequentialSampler(DATASET), 5, drop_last=False), 2) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize("own_generator", [True, False])
def test_another_worker_that_starts_anywhere_gets_the_same_batches(own_generator: bool) -> None:
    def sampler() -> RandomSampler:
        return RandomSampler(DATASET, replacement=True, generator=torch.Generator() if own_generator else None)

    whole = batches(sampler(), 12)
    late = SamplerOrder(0, sampler(), 3, 2)
    torch.rand(3)
    assert [late.batch(n % 2, n // 2).tolist() for n in (9, 10, 4, 11)] == [whole[n] for n in (9, 10, 4, 11)]


class OfRandom:
    """A sampler of one's own."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return iter(self.source.sample(range(10), 10))


def test_an_order_that_differs_each_time_is_told_and_one_that_is_seeded_is_kept() -> None:
    assert unrepeatable(Loading(sampler=OfRandom(random)), TRAINING) == ""
    assert unrepeatable(Loading(), TRAINING) == ""
    note = unrepeatable(Loading(sampler=OfRandom(random.Random(0))), TRAINING)
    assert note.startswith("data: the DataLoader's OfRandom yields another order each time")


@pytest.mark.parametrize(("sampler", "fault"), [([], "list yields no samples"), ([None], "list fails")])
def test_a_sampler_that_yields_nothing_or_fails_is_refused(sampler: Any, fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        unrepeatable(Loading(sampler=sampler), TRAINING)


def test_without_a_sampler_samples_are_shuffled() -> None:
    assert type(batch_order(MapStyleSource(DATASET), TRAINING)) is BatchOrder
    assert isinstance(batch_order(MapStyleSource(DATASET, loading=Loading(sampler=[0, 1])), TRAINING), SamplerOrder)


@pytest.mark.parametrize("sampler", [None, SequentialSampler(DATASET)])
def test_a_phase_goes_on_with_the_batch_behind_the_last_phase_s(sampler: Any) -> None:
    phases = [{"rounds": 1, "subnets": 3, "local_steps": 2}, {"rounds": 2, "subnets": 2, "local_steps": 1}]
    training = TrainingSettings.model_validate({"batch_size": 3, "phases": phases})
    samples = MapStyleSource(DATASET, loading=Loading(sampler=sampler))
    order = batch_order(samples, training)
    whole = batch_order(samples, TrainingSettings(batch_size=3, subnets=1))
    taken = [order.batch(k, step).tolist() for step, subnets in enumerate((3, 3, 2, 2)) for k in range(subnets)]
    assert taken == [whole.batch(0, number).tolist() for number in range(10)]
