"""Test the file that holds a subnet trained out of core: on the disk, arriving part by part."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from idletrain.errors import DamageError, RefusedError
from idletrain.exchange.messages import checksum
from idletrain.nn import models
from idletrain.nn.outofcore.executing.backing_file import PART_VALUES, StateFile, order_of
from idletrain.nn.outofcore.executing.disk import ScratchError

SHAPES = [(3, 5), (5,), (1500, 1000), (7,), (2, 2)]


def test_parts_are_every_value_once_and_no_larger_than_they_should_be(tmp_path: Path) -> None:
    state_file = StateFile(tmp_path, SHAPES, 3)
    written = torch.zeros(3 * state_file.parameters)
    for numbers in ([0, 1], [4, 2], [3]):
        for start, stop in state_file.parts(numbers, 3):
            assert 0 < stop - start <= PART_VALUES
            written[start:stop] += 1
    assert written.eq(1).all()
    assert list(state_file.parts([0, 1], 1)) == [(0, 20)]  # neighbours travel together
    assert len(list(state_file.parts([2], 1))) == 2


def test_what_is_put_is_found_tensor_by_tensor_and_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    state_file = StateFile(tmp_path, SHAPES, 2)
    values = torch.randn(2 * state_file.parameters)
    for start, stop in state_file.parts(range(5), 2):
        state_file.put(start, values[start:stop])
    assert torch.equal(state_file.flat, values)
    assert torch.equal(state_file.slot(4, 1), values[-4:].view(2, 2))
    assert state_file.slot(2).shape == (1500, 1000)
    for start, stop in state_file.parts([1, 2, 4], 2):
        assert torch.equal(state_file.read(start, stop), values[start:stop])
    assert checksum(state_file.frames(2)) == checksum([values.numpy().data.cast("B")])
    assert list(tmp_path.iterdir()) == []
    state_file.close()
    assert not state_file.flat.any()  # its place on the disk is free again


@pytest.mark.parametrize("at", [2, 1_400_000])
def test_what_the_disk_changed_is_never_taken_nor_sent(tmp_path: Path, at: int) -> None:
    state_file = StateFile(tmp_path, SHAPES, 2)
    for start, stop in state_file.parts(range(5), 1):
        state_file.put(start, torch.randn(stop - start))
    number = 0 if at < 15 else 2
    written = torch.randn(state_file.slot(number, 1).shape)
    state_file.write(number, 1, written)
    assert torch.equal(state_file.read_slot(number, 1), written.reshape(-1))
    for slot in range(2):
        state_file.flat[slot * state_file.parameters + at] += 1
        with pytest.raises(DamageError, match="scratch disk changed"):
            state_file.read_slot(number, slot)
    *before, last = state_file.parts([number], 1)
    for part in before:
        state_file.read(*part)
    with pytest.raises(DamageError, match="scratch disk changed"):
        state_file.read(*last)


def test_a_state_file_for_which_there_is_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ScratchError, match=r"has \d+ MiB free and \d+ MiB are needed"):
        StateFile(tmp_path, [(1 << 25, 1 << 20)], 1)


def test_a_wait_ends_when_the_tensors_are_there_or_when_no_more_will_come(tmp_path: Path) -> None:
    state_file = StateFile(tmp_path, SHAPES, 1)
    state_file.mark_arrived([1])
    assert state_file.has_arrived([1])
    assert not state_file.has_arrived([0, 1])
    timer = threading.Timer(0.05, state_file.mark_arrived, [[0]])
    timer.start()
    state_file.wait([0, 1])
    timer.join()
    failing = threading.Timer(0.05, state_file.fail, [ConnectionError("gone")])
    failing.start()
    with pytest.raises(ConnectionError, match="gone"):
        state_file.wait([0, 2])
    failing.join()
    state_file.wait([0])  # what is there is there
    with pytest.raises(RefusedError, match="leaving"):
        StateFile(tmp_path, SHAPES, 1, unwanted=lambda: True).wait([0])


def test_tensors_come_in_the_order_in_which_units_use_them() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = models.mlp([4, 8, 8, 2])
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.chain(x)

    module = Loose().to("meta")
    names = [name for name, _ in module.named_parameters()]
    order = [[names[i] for i in numbers] for numbers in order_of(module)]
    assert order[0] == ["scale"]
    assert [len(numbers) for numbers in order[1:]] == [1, 3, 4]  # a linear layer, then a norm with each that follows
    assert sorted(name for numbers in order for name in numbers) == sorted(names)
