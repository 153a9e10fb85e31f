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
    home = StateFile(tmp_path, SHAPES, 3)
    covered = torch.zeros(3 * home.parameters)
    for numbers in ([0, 1], [4, 2], [3]):
        for start, stop in home.parts(numbers, 3):
            assert 0 < stop - start <= PART_VALUES
            covered[start:stop] += 1
    assert covered.eq(1).all()
    assert list(home.parts([0, 1], 1)) == [(0, 20)]  # neighbours travel together
    assert len(list(home.parts([2], 1))) == 2


def test_what_is_put_is_found_tensor_by_tensor_and_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    home = StateFile(tmp_path, SHAPES, 2)
    values = torch.randn(2 * home.parameters)
    for start, stop in home.parts(range(5), 2):
        home.put(start, values[start:stop])
    assert torch.equal(home.flat, values)
    assert torch.equal(home.slot(4, 1), values[-4:].view(2, 2))
    assert home.slot(2).shape == (1500, 1000)
    for start, stop in home.parts([1, 2, 4], 2):
        assert torch.equal(home.read(start, stop), values[start:stop])
    assert checksum(home.frames(2)) == checksum([values.numpy().data.cast("B")])
    assert list(tmp_path.iterdir()) == []
    home.close()
    assert not home.flat.any()  # its place on the disk is free again


@pytest.mark.parametrize("at", [2, 1_400_000])
def test_what_the_disk_changed_is_never_taken_nor_sent(tmp_path: Path, at: int) -> None:
    home = StateFile(tmp_path, SHAPES, 2)
    for start, stop in home.parts(range(5), 1):
        home.put(start, torch.randn(stop - start))
    number = 0 if at < 15 else 2
    written = torch.randn(home.slot(number, 1).shape)
    home.write(number, 1, written)
    assert torch.equal(home.read_slot(number, 1), written.reshape(-1))
    for slot in range(2):
        home.flat[slot * home.parameters + at] += 1
        with pytest.raises(DamageError, match="scratch disk changed"):
            home.read_slot(number, slot)
    *before, last = home.parts([number], 1)
    for part in before:
        home.read(*part)
    with pytest.raises(DamageError, match="scratch disk changed"):
        home.read(*last)


def test_a_home_for_which_there_is_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ScratchError, match=r"has \d+ MiB free and \d+ MiB are needed"):
        StateFile(tmp_path, [(1 << 25, 1 << 20)], 1)


def test_a_wait_ends_when_the_tensors_are_there_or_when_no_more_will_come(tmp_path: Path) -> None:
    home = StateFile(tmp_path, SHAPES, 1)
    home.mark_arrived([1])
    assert home.has_arrived([1])
    assert not home.has_arrived([0, 1])
    told = threading.Timer(0.05, home.mark_arrived, [[0]])
    told.start()
    home.wait([0, 1])
    told.join()
    failing = threading.Timer(0.05, home.fail, [ConnectionError("gone")])
    failing.start()
    with pytest.raises(ConnectionError, match="gone"):
        home.wait([0, 2])
    failing.join()
    home.wait([0])  # what is there is there
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
