"""Streams: dealt out to subnets, read again by whoever goes on."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.data import streams
from idletrain.nn.data.given import as_samples
from idletrain.nn.data.streams import StreamSource, check_stream
from idletrain.nn.orders import StreamOrder

TRAINING = TrainingSettings(subnets=2, local_steps=3, batch_size=2, seed=5)


class Count(IterableDataset):  # type: ignore[type-arg]
    """Items 0 to 8, with noise, a number of the pass, and a buffer that shuffles."""

    def __init__(self, items: int = 9) -> None:
        self.items, self.epoch = items, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, buffer = self.epoch, []
        for item in range(self.items):
            buffer.append(item)
            if len(buffer) == 3:
                yield self.made(buffer.pop(random.randrange(3)), epoch)
        yield from (self.made(item, epoch) for item in buffer)

    def made(self, item: int, epoch: int) -> Any:
        return torch.tensor([item, epoch, random.random(), float(np.random.rand()), float(torch.rand(()))]), item


def read(samples: StreamSource, subnet: int, step: int) -> Any:
    return samples.batch(StreamOrder(TRAINING).batch(subnet, step))[0]


def test_subnets_get_parts_that_make_up_the_stream_pass_after_pass() -> None:
    samples = StreamSource(Count())
    seen = {k: torch.cat([read(samples, k, step) for step in range(6)])[:, :2].tolist() for k in (0, 1)}
    assert seen[0][4][1] == 0  # the fifth item of subnet 0 is the last of the first pass
    assert seen[0][5][1] == 1  # in the middle of a batch, the second begins
    assert [item[1] for item in seen[1]] == [0] * 4 + [1] * 4 + [2] * 4


def test_whoever_goes_on_reads_the_same_bits() -> None:
    whole = StreamSource(Count())
    there = [read(whole, 1, step) for step in range(7)]
    late = pickle.loads(pickle.dumps(whole))
    random.seed(0)
    for step in (4, 5, 2, 6):  # in the middle, on, back, and on with what lies between skipped
        assert torch.equal(read(late, 1, step), there[step]), step
    assert not torch.equal(read(late, 0, 4), there[4])


def test_leading_items_can_be_looked_up_and_are_the_same_every_time() -> None:
    samples = as_samples(DataLoader(Count(), batch_size=4))
    assert isinstance(samples, StreamSource)
    assert (len(samples), samples.is_whole, samples.loading.batch_size) == (9, True, 4)
    assert not StreamSource(Count(streams.LEADING_ITEMS)).is_whole
    once, again = (s.batch(np.array([3, 0]))[0] for s in (samples, StreamSource(Count())))
    assert torch.equal(once, again)


class Unseeded(IterableDataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.dice = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        return ((self.dice.random(), 0) for _ in range(9))


@pytest.mark.parametrize(
    ("dataset", "fault"),
    [
        (((x, 0) for x in range(9)), "the generator can be read only once and by one process; give an IterableDataset"),
        (Count(1), "the Count ends after 1 items; 2 subnets need at least one each"),
        (Count(0), "the Count ends after 0 items"),
        (Unseeded(), "the Unseeded yields other items each time it is read, though random, numpy and torch are seeded"),
    ],
)
def test_a_stream_that_cannot_be_dealt_out_is_refused(dataset: Any, fault: str) -> None:
    samples = as_samples(dataset)
    assert isinstance(samples, StreamSource)
    with pytest.raises(JobError, match=fault):
        check_stream(samples, 2)


@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")  # dill's, of pyarrow
def test_a_stream_of_hugging_face_is_read_like_any_other() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[float(n)] for n in range(9)], "label": list(range(9))})
    samples = as_samples(rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4))
    assert isinstance(samples, StreamSource)
    check_stream(samples, 2)
    whole = [read(samples, 0, step)["label"].tolist() for step in range(6)]
    assert read(StreamSource(samples.dataset), 0, 4)["label"].tolist() == whole[4]
    assert whole[:2] != whole[3:5]
