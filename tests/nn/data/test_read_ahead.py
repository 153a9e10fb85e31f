"""Processes that read ahead."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset

from idletrain.errors import JobError
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.data.read_ahead import ReadAhead, can_read_ahead, stream_position
from idletrain.nn.data.seeding import seed_everything
from idletrain.nn.data.streams import StreamPlace, StreamSource


def noisy() -> Any:
    """A Dataset of a class that other processes cannot import, as one of a notebook."""

    class Noisy:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            if i == 7:
                raise OSError("image file is truncated")
            noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            return {"x": torch.tensor([float(i), *noise]), "mask": torch.tensor([True]), "labels": i}

    return Noisy()


def test_batches_are_the_same_bits_as_without_processes_and_faults_come_at_their_step() -> None:
    samples = MapStyleSource(noisy())
    reads = [(np.array([i, i + 1]), 100 + i) for i in range(5)]
    ahead = ReadAhead(samples, samples, 2)
    for _lease in range(2):  # the second one drops what is left of the first
        ahead.start(reads)
        for index, seed in reads[: 5 - _lease]:
            inputs, target = ahead.batch(index)
            seed_everything(seed)
            expected = samples.batch(index)[0]
            assert target is inputs
            assert {name: part.dtype for name, part in inputs.items()} == {
                name: p.dtype for name, p in expected.items()
            }
            assert all(torch.equal(inputs[name], part) for name, part in expected.items())
    ahead.start([(np.array([6, 7]), 0), (np.array([1]), 0)])
    with pytest.raises(RuntimeError, match=r"^image file is truncated$"):
        ahead.batch(np.array([6, 7]))
    assert ahead.batch(np.array([1]))[0]["labels"].tolist() == [1]
    children = [psutil.Process(child.pid) for child in multiprocessing.active_children() if child.pid]
    assert len(children) == 2
    del ahead
    assert psutil.wait_procs(children, timeout=10)[1] == []


class Letters(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        if torch.utils.data.get_worker_info():
            raise JobError("data: is dealt out twice")
        return ((torch.tensor([float(n)]), n) for n in range(20))


def seed_of(number: int) -> int:
    return number


def test_a_stream_is_read_ahead_by_one_process_that_sees_all_of_it() -> None:
    samples = StreamSource(Letters())
    ahead = ReadAhead(samples, samples, 3)
    places = [StreamPlace(1, 2, number, 2, seed_of) for number in (1, 2)]
    ahead.start([(place, 0) for place in places])
    assert [ahead.batch(place)[1].tolist() for place in places] == [[5, 7], [9, 11]]  # type: ignore[arg-type]
    assert len(multiprocessing.active_children()) == 1


class Placed(Letters):
    """Letters that keep their place."""

    place = 0

    def state_dict(self) -> Any:
        return self.place

    def load_state_dict(self, state: Any) -> None:
        self.place = state

    def __iter__(self) -> Iterator[Any]:
        while self.place < 20:
            self.place += 1
            yield torch.tensor([float(self.place)]), self.place - 1


def test_the_position_is_that_of_the_batch_and_not_of_what_was_read_ahead() -> None:
    samples = StreamSource(Placed(), resumes=True)
    places = [StreamPlace(1, 2, number, 2, seed_of) for number in range(5)]
    ahead = ReadAhead(samples, samples, 1)
    assert stream_position(ahead) == ""
    ahead.start([(place, 0) for place in places])
    for place in places:
        ahead.batch(place)  # type: ignore[arg-type]
        samples.batch(place)
        assert stream_position(ahead) == samples.position() != ""
    assert stream_position(MapStyleSource(Slow())) == ""


class Slow:
    """Samples that take a while to decode."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.05)
        return torch.zeros(1), i


def test_reading_overlaps_with_what_the_steps_do() -> None:
    samples = MapStyleSource(Slow())
    ahead = ReadAhead(samples, samples, 1)
    ahead.start([(np.array([0]), 0)] * 11)
    ahead.batch(np.array([0]))  # the process has started
    waited = 0.0
    for _ in range(10):
        time.sleep(0.05)  # a step
        asked = time.perf_counter()
        ahead.batch(np.array([0]))
        waited += time.perf_counter() - asked
    assert waited < 0.6 * 0.5  # most of the 0.5 s of decoding went by during the steps


def test_a_daemon_may_not_start_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_read_ahead()
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert not can_read_ahead()
