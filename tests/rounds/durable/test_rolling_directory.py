"""A run directory without rounds: every head goes on from the last committed update, or the newest that is sound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idletrain.exchange.messages import checksum
from idletrain.nn.prepare import Prepared
from idletrain.nn.rolling import equal_specs
from idletrain.rounds.durable import recovery, snapshots, updates
from idletrain.rounds.durable.rolling_directory import RollingDirectory
from idletrain.rounds.durable.run_directory import Payload

STEPS = 3
Open = Callable[[], RollingDirectory]


@pytest.fixture
def prepared(small_program: Callable[..., Prepared]) -> Prepared:
    return small_program(
        widths=(6, 12, 12, 3), norm="batch", subnets=2, rounds=9, optimizer={"name": "adamw", "lr": 1e-3}
    )


@pytest.fixture
def opened(tmp_path: Path, prepared: Prepared) -> Open:
    (tmp_path / "run").mkdir()

    def open_() -> RollingDirectory:
        return RollingDirectory(tmp_path / "run", prepared, lambda *_, **__: None, lambda _: None, 2)

    return open_


async def begin(directory: RollingDirectory, prepared: Prepared) -> None:
    await directory.begin(directory.specs or equal_specs(prepared.program))


async def commit(directory: RollingDirectory, lanes: str) -> None:
    """Commit made-up updates of these lanes."""
    for lane in map(int, lanes):
        began = directory.began(lane)()
        frames = [(began + 1 + directory.round_of(lane)).numpy().data.cast("B")]
        assert await directory.commit_one(lane, 1, STEPS, Payload(frames, 1.0, checksum(frames)))


def state(directory: RollingDirectory) -> tuple[Any, ...]:
    rolling = directory.rolling
    assert rolling
    opened = [(one.members.tobytes(), one.number, one.first_step, one.began.tolist()) for one in rolling.opened]
    return directory.network.flat.tolist(), opened, rolling.commits, rolling.neuron_steps, directory.round


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_head_goes_on_where_the_last_one_ended(opened: Open, prepared: Prepared, snapshot: bool) -> None:
    async def run() -> None:
        directory = opened()
        await begin(directory, prepared)
        await commit(directory, "0010")
        if snapshot:
            async with directory.unchanged():
                await directory.snapshot_network()
        await commit(directory, "110")
        before = state(directory)
        directory.close()
        again = opened()
        assert state(again) == before
        assert again.epoch == directory.epoch + 1
        await begin(again, prepared)
        await commit(again, "01")
        ended = state(again)
        again.close()
        assert state(opened()) == ended
        assert snapshots.rounds(again.run_dir) == ([0, 1] if snapshot else [0])

    asyncio.run(run())


def test_what_follows_a_damaged_update_is_lost_and_trained_again(opened: Open, prepared: Prepared) -> None:
    async def run() -> None:
        directory = opened()
        await begin(directory, prepared)
        await commit(directory, "01")
        before = state(directory)
        await commit(directory, "0101")
        directory.close()
        path, third = updates.path_of(directory.run_dir, 0), 2 * 4 * len(directory.began(0)())
        content = bytearray(path.read_bytes())
        content[third + 9] ^= 1
        path.write_bytes(content)
        note = recovery.load_network(directory.run_dir, prepared.program).note
        assert "4 updates are lost and --resume trains them again" in note
        again = opened()
        assert state(again) == before
        await begin(again, prepared)
        await commit(again, "11")
        ended = state(again)
        again.close()
        assert state(opened()) == ended

    asyncio.run(run())


def test_a_damaged_snapshot_is_passed_over(opened: Open, prepared: Prepared, tmp_path: Path) -> None:
    async def run() -> None:
        directory = opened()
        await begin(directory, prepared)
        await commit(directory, "000")
        await directory.snapshot_network()
        await commit(directory, "1")
        ended = state(directory)
        directory.close()
        for name in (snapshots.ARRAYS, "network", "manifest.json"):
            path = tmp_path / "run" / "snapshots" / "00000001" / name
            sound = path.read_bytes()
            path.write_bytes(sound[:40] + b"x" + sound[41:])
            again = opened()
            assert state(again) == ended
            assert directory.epoch < again.epoch
            again.close()
            aside = path.parent.with_name("00000001.damaged")
            if aside.exists():
                aside.rename(path.parent)
            path.write_bytes(sound)

    asyncio.run(run())


def test_a_log_that_ends_before_the_snapshot_counts_no_further(
    opened: Open, prepared: Prepared, tmp_path: Path
) -> None:
    async def run() -> None:
        directory = opened()
        await begin(directory, prepared)
        await commit(directory, "000")
        log = (tmp_path / "run" / "wal").read_bytes()
        await commit(directory, "101")
        await directory.snapshot_network()
        ended = state(directory)
        directory.close()
        (tmp_path / "run" / "wal").write_bytes(log)
        again = opened()
        assert state(again) == ended
        await begin(again, prepared)
        await commit(again, "00")
        last = state(again)
        again.close()
        assert state(opened()) == last

    asyncio.run(run())


def test_nothing_is_committed_while_it_must_not_change(opened: Open, prepared: Prepared) -> None:
    async def run() -> None:
        directory = opened()
        await begin(directory, prepared)
        before = state(directory)
        frames = [directory.began(0)().numpy().data.cast("B")]
        update = Payload(frames, 1.0, checksum(frames))
        assert not await directory.commit_one(0, 1, STEPS, update, may=lambda: False)
        assert state(directory) == before
        async with directory.unchanged():
            waiting = asyncio.ensure_future(directory.commit_one(0, 1, STEPS, update))
            await asyncio.sleep(0.05)
            assert state(directory) == before
        assert await waiting
        assert state(directory) != before
        directory.close()

    asyncio.run(run())
