"""Streams: dealt out to subnets, read again by whoever goes on."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.data import streams
from idletrain.nn.data.given import as_samples
from idletrain.nn.data.streams import StreamSource, check_stream, keeps_state, state_fault
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


class Once(IterableDataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.items = iter([(float(n), n) for n in range(9)])

    def __iter__(self) -> Iterator[Any]:
        return self.items


class Broken(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield from ((float(n), n) for n in range(9))
        raise OSError("disk gone")


@pytest.mark.parametrize(
    ("dataset", "fault"),
    [
        (((x, 0) for x in range(9)), "the generator can be read only once and by one process; give an IterableDataset"),
        (Count(1), "the Count ends after 1 items; 2 subnets need at least one each"),
        (Count(0), "the Count yields no items; give one that yields samples"),
        (Once(), "the Once can be read only once and by one process; give an IterableDataset whose __iter__ begins"),
        (Broken(), r"the Broken cannot be read \(__iter__ at .*test_streams.py:\d+ raised OSError: disk gone\); corr"),
        (Unseeded(), "the Unseeded yields other items each time it is read, though random, numpy and torch are seeded"),
    ],
)
def test_a_stream_that_cannot_be_dealt_out_is_refused(dataset: Any, fault: str) -> None:
    samples = as_samples(dataset)
    assert isinstance(samples, StreamSource)
    with pytest.raises(JobError, match=fault):
        check_stream(samples, 2)


def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    """Nine rows in three shards."""
    for shard in shards:
        yield from ({"x": [float(n)], "label": n} for n in range(3 * shard, 3 * shard + 3))


@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")  # dill's, of pyarrow
def test_a_stream_of_hugging_face_is_read_like_any_other() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})
    samples = as_samples(stream.shuffle(seed=1, buffer_size=4))
    assert isinstance(samples, StreamSource)
    check_stream(samples, 2)
    whole = [read(samples, 0, step)["label"].tolist() for step in range(6)]
    assert read(StreamSource(samples.dataset), 0, 4)["label"].tolist() == whole[4]
    assert whole[:2] != whole[3:5]


class Resumable(Count):
    """A stream that keeps its state, and counts how often an item was made."""

    made_items = 0

    def __init__(self, items: int = 9) -> None:
        super().__init__(items)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.items:
            self.place += 1
            Resumable.made_items += 1
            yield self.made(self.place - 1, self.epoch)
        self.place = 0


def test_reading_a_part_of_a_stream_that_keeps_its_place_does_not_change_what_is_read_next() -> None:
    samples = StreamSource(Resumable())
    check_stream(samples, 2)
    assert len(samples) == 9
    assert samples.dataset.place == 0


def read_from(samples: StreamSource, subnet: int, step: int, position: str) -> Any:
    return samples.batch(StreamOrder(TRAINING).going_on(position).batch(subnet, step))[0]


def test_whoever_gets_a_position_reads_the_same_bits_and_nothing_before_it() -> None:
    whole, there, positions = StreamSource(Resumable(), resumes=True), [], [""]
    for step in range(9):
        there.append(read(whole, 1, step))
        positions.append(whole.position())
    assert [float(x[0, 1]) for x in there] == [0, 0, 1, 1, 2, 2, 3, 3, 4]  # four items a pass, so two batches
    for step in range(9):
        for known in range(step + 1):
            late = pickle.loads(pickle.dumps(whole))
            Resumable.made_items = 0
            assert torch.equal(read_from(late, 1, step, positions[known]), there[step]), (step, known)
            assert Resumable.made_items <= 5 * (step + 1 - known), (step, known)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"number": 1}', "[" * 9999, "another", "later"])
def test_a_position_that_is_none_of_this_batch_s_is_left_out(text: str) -> None:
    whole = StreamSource(Resumable(), resumes=True)
    there = [read(whole, 1, step) for step in range(4)]
    if text == "later":
        text = whole.position()
    elif text == "another":
        read(whole, 0, 1)
        text = whole.position()
    assert torch.equal(read_from(StreamSource(Resumable(), resumes=True), 1, 2, text), there[2])


def test_two_subnets_on_one_worker_have_positions_of_their_own() -> None:
    both, alone = StreamSource(Resumable(), resumes=True), StreamSource(Resumable(), resumes=True)
    for step in range(4):
        read(alone, 1, step)
        expected = alone.position()
        read(both, 0, step)
        read(both, 1, step)
        assert both.position() == expected


class Redrawn(Resumable):
    """An order that is drawn anew where it goes on, as a buffer that shuffles is filled anew."""

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(99), 99)
        for item in order[self.place :]:
            self.place += 1
            yield self.made(item, 0)


class Tensors(Resumable):
    def state_dict(self) -> Any:
        return {"place": torch.tensor(self.place)}


class Tuples(Resumable):
    def state_dict(self) -> Any:
        return {"place": self.place, "of": (1, 2)}


class Long(Resumable):
    def state_dict(self) -> Any:
        return {"place": self.place, "buffer": "x" * 70_000}


class Failing(Resumable):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError(sorted(state))


@pytest.mark.parametrize(
    ("dataset", "fault"),
    [
        (Resumable(), ""),
        (Resumable(3), ""),
        (Redrawn(), "it goes on from its state with other items than without"),
        (Tensors(), "its state is not made of plain values (Object of type Tensor is not JSON serializable)"),
        (Tuples(), "its state is not made of dicts by strings, lists, strings, numbers, booleans and None"),
        (Long(), "its state takes 70,111 characters and may take 65,536"),
        (Failing(), "KeyError: ['place']"),
    ],
)
def test_a_state_is_used_only_if_it_is_plain_and_leads_to_the_same_items(dataset: Any, fault: str) -> None:
    assert keeps_state(dataset)
    assert state_fault(dataset) == fault


def test_a_stream_without_state_keeps_none() -> None:
    assert not keeps_state(Count())
    samples = StreamSource(Count())
    read(samples, 0, 1)
    assert samples.position() == ""


@pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")
def test_a_stream_of_hugging_face_goes_on_from_its_state_unless_a_buffer_shuffles_it() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})
    assert state_fault(stream) == ""
    assert (
        state_fault(stream.shuffle(seed=1, buffer_size=2)) == "it goes on from its state with other items than without"
    )
    whole, there, positions = StreamSource(stream, resumes=True), [], [""]
    for step in range(14):
        there.append(read(whole, 1, step)["label"].tolist())
        positions.append(whole.position())
    for step in range(14):
        for known in range(step + 1):
            late = StreamSource(stream, resumes=True)
            assert read_from(late, 1, step, positions[known])["label"].tolist() == there[step], (step, known)


class InOrder(IterableDataset):  # type: ignore[type-arg]
    """Items 0 to 11."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.tensor(item), item) for item in range(12))


def test_a_phase_goes_on_in_the_stream_where_the_one_before_ended() -> None:
    phases = [{"rounds": 1, "subnets": 2, "local_steps": 2}, {"rounds": 1, "subnets": 1, "local_steps": 2}]
    order = StreamOrder(TrainingSettings.model_validate({"batch_size": 2, "phases": phases}))
    whole = StreamSource(InOrder())
    places = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3))  # subnet and step
    taken = [whole.batch(order.batch(*place))[0].tolist() for place in places]
    assert taken == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 9], [10, 11]]
    assert StreamSource(InOrder()).batch(order.batch(0, 3))[0].tolist() == [10, 11]


def test_a_position_of_an_earlier_phase_is_left_out() -> None:
    phases = [{"rounds": 1, "subnets": 2, "local_steps": 2}, {"rounds": 1, "subnets": 1, "local_steps": 2}]
    order = StreamOrder(TrainingSettings.model_validate({"batch_size": 2, "phases": phases}))
    whole, late = StreamSource(Resumable(12), resumes=True), StreamSource(Resumable(12), resumes=True)
    for step in range(2):
        whole.batch(order.batch(0, step))
    place = order.going_on(whole.position()).batch(0, 2)
    assert place.from_where() is None
    assert torch.equal(late.batch(place)[0], whole.batch(order.batch(0, 2))[0])


def test_a_stream_of_hugging_face_can_be_copied_in_any_thread() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "label": [0, 1]})
    stream = rows.to_iterable_dataset(num_shards=2)
    assert keeps_state(stream)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(streams.own_copy, stream).result()
    assert copied is not stream
    assert [row["label"] for row in copied] == [0, 1]
