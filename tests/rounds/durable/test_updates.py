"""Staged updates on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from idletrain.errors import DamageError
from idletrain.exchange.messages import checksum
from idletrain.rounds.durable import updates
from idletrain.rounds.durable.updates import StagedUpdate


def staged(path: Path, subnet: int, offset: int, values: NDArray[np.float32]) -> StagedUpdate:
    """Write values as two frames, as the comm layer may split them."""
    content = values.tobytes()
    frames = [memoryview(content[:8]), memoryview(content[8:])]
    updates.write(path, offset, frames)
    return StagedUpdate(subnet, 50, offset, len(content), checksum(frames))


def test_updates_come_back_from_their_offsets_in_any_order_of_arrival(tmp_path: Path) -> None:
    first, second = np.arange(10, dtype=np.float32), -np.arange(7, dtype=np.float32)
    later = staged(tmp_path / "u", 1, 40, second)
    earlier = staged(tmp_path / "u", 0, 0, first)
    updates.sync(tmp_path / "u")
    assert np.array_equal(updates.read(tmp_path / "u", earlier), first)
    assert np.array_equal(updates.read(tmp_path / "u", later), second)


def test_what_is_read_may_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    update = staged(tmp_path / "u", 0, 0, np.ones(4, np.float32))
    updates.read(tmp_path / "u", update).fill(0)
    assert np.array_equal(updates.read(tmp_path / "u", update), np.ones(4, np.float32))


def test_damaged_missing_and_cut_updates_are_refused_by_subnet(tmp_path: Path) -> None:
    path = tmp_path / "u"
    update = staged(path, 3, 0, np.ones(16, np.float32))
    content = bytearray(path.read_bytes())
    content[17] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamageError, match="update of subnet 3 at byte 0 is damaged"):
        updates.read(path, update)
    path.write_bytes(content[:40])
    with pytest.raises(DamageError, match="ends before the update of subnet 3"):
        updates.read(path, update)
    path.unlink()
    with pytest.raises(DamageError, match="subnet 3 is missing"):
        updates.read(path, update)


def test_short_writes_are_continued_and_no_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: real(file, content[:5], offset))
    values = np.arange(9, dtype=np.float32)
    assert np.array_equal(updates.read(tmp_path / "u", staged(tmp_path / "u", 0, 8, values)), values)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="No space left") as caught:
        updates.write(tmp_path / "u", 0, [np.zeros(4).data.cast("B")])
    assert caught.value.errno == errno.ENOSPC


def test_prune_removes_the_rounds_that_a_kept_snapshot_holds(tmp_path: Path) -> None:
    (tmp_path / "updates").mkdir()
    for round_ in range(12):
        updates.write(updates.path_of(tmp_path, round_), 0, [b"1234"])
    updates.prune(tmp_path, 10)
    assert sorted(p.name for p in (tmp_path / "updates").iterdir()) == ["00000010", "00000011"]
