"""Snapshots are whole or not there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from idletrain.errors import DamageError
from idletrain.nn.ist.groups import whole
from idletrain.nn.network import Network
from idletrain.rounds.durable import snapshots


class KilledError(Exception):
    """Stands for a kill at a named point."""


def network(fill: float) -> Network:
    original = Network(whole(nn.Linear(30, 20)), 2)
    original.flat.fill_(fill)
    return original


def ignore(_name: str) -> None:
    """No test is interested in the points reached."""


def test_a_snapshot_holds_values_and_optimizer_state(tmp_path: Path) -> None:
    original = network(0)
    original.flat.normal_()
    snapshots.write(tmp_path, 7, original, ignore)
    again = network(0)
    snapshots.load(tmp_path, 7, again)
    assert torch.equal(again.flat, original.flat)
    assert snapshots.rounds(tmp_path) == [7]


def test_the_manifest_comes_last(tmp_path: Path) -> None:
    """Killed once the data is written, there is no snapshot yet; once the manifest is, there is."""

    def killed_at(point: str) -> Callable[[str], None]:
        def reached(name: str) -> None:
            if name == point:
                raise KilledError

        return reached

    with pytest.raises(KilledError):
        snapshots.write(tmp_path, 1, network(1.0), killed_at("snapshot-data-written"))
    assert snapshots.rounds(tmp_path) == []
    with pytest.raises(KilledError):
        snapshots.write(tmp_path, 1, network(2.0), killed_at("snapshot-written"))
    again = network(0)
    snapshots.load(tmp_path, 1, again)
    assert again.flat.unique().tolist() == [2.0]


def test_without_room_no_half_snapshot_stays(tmp_path: Path) -> None:
    def full(_name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        snapshots.write(tmp_path, 1, network(1.0), full)
    assert list((tmp_path / "snapshots").iterdir()) == []


@pytest.mark.parametrize("file", ["network", "manifest.json"])
def test_any_flipped_bit_makes_a_snapshot_refused(tmp_path: Path, file: str) -> None:
    original = network(3.0)
    snapshots.write(tmp_path, 1, original, ignore)
    path = tmp_path / "snapshots" / "00000001" / file
    sound = path.read_bytes()
    refused = 0
    for at in range(0, len(sound), 1 if file == "manifest.json" else 97):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        again = network(0)
        try:
            snapshots.load(tmp_path, 1, again)
        except DamageError:
            refused += 1
            assert again.flat.unique().tolist() == [0.0]
        else:  # a field that is for people, such as the number of bytes
            assert file == "manifest.json"
            assert torch.equal(again.flat, original.flat)
    assert refused >= (len(sound) // 97 if file == "network" else 64)


def test_a_snapshot_that_is_cut_or_absent_is_refused(tmp_path: Path) -> None:
    snapshots.write(tmp_path, 1, network(3.0), ignore)
    path = tmp_path / "snapshots" / "00000001" / "network"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DamageError):
        snapshots.load(tmp_path, 1, network(0))
    path.unlink()
    with pytest.raises(DamageError, match="is not whole"):
        snapshots.load(tmp_path, 1, network(0))


def test_prune_keeps_the_newest_and_removes_what_a_crash_left(tmp_path: Path) -> None:
    for round_ in (1, 2, 5, 9):
        snapshots.write(tmp_path, round_, network(1.0), ignore)
    (tmp_path / "snapshots" / "00000007").mkdir()
    (tmp_path / "snapshots" / "00000012").mkdir()  # one that is being written now
    snapshots.prune(tmp_path, 2)
    assert snapshots.rounds(tmp_path) == [5, 9]
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == ["00000005", "00000009", "00000012"]


def test_a_whole_snapshot_is_not_written_again_as_it_may_be_the_only_one(tmp_path: Path) -> None:
    def killed(_name: str) -> None:
        raise KilledError

    snapshots.write(tmp_path, 7, network(1), ignore)
    snapshots.write(tmp_path, 7, network(1), killed)
    with pytest.raises(KilledError):
        snapshots.write(tmp_path, 7, network(2), killed)


def test_prune_keeps_the_best_and_says_which_updates_the_newest_need(tmp_path: Path) -> None:
    for round_ in (1, 2, 5, 9):
        snapshots.write(tmp_path, round_, network(1.0), ignore)
    assert snapshots.prune(tmp_path, 2, 1) == 5
    assert snapshots.rounds(tmp_path) == [1, 5, 9]
    assert snapshots.prune(tmp_path, 1, 9) == 9
    assert snapshots.rounds(tmp_path) == [9]
