"""The durable side of a run whose subnets are committed each by itself: an entry of the log says so, then the network
changes, and another subnet is drawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idletrain.nn.rolling import RollingSubnets
from idletrain.rounds.durable import history, snapshots, updates
from idletrain.rounds.durable.run_directory import Payload, RunDirectory


class RollingDirectory(RunDirectory):
    """A run directory; see `RunDirectory`. Its round is the one that a neuron is in on average."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        past = history.collect(self._wal.records)
        self.specs = past.lanes
        written = (rolled.update for rolled in past.rolled.values() if rolled.round == self.round)
        self._next_offset = max((update.offset + update.size_bytes for update in written), default=0)
        if self.rolling:
            self.round = self.rolling.rounds

    def round_of(self, subnet: int) -> int:
        """Return how many subnets a lane had before its open one."""
        return self._open.opened[subnet].number

    def first_step_of(self, subnet: int) -> int | None:
        """Return the steps that a neuron had on average when a subnet was drawn."""
        return self._open.opened[subnet].first_step

    def began(self, subnet: int) -> Callable[[], Tensor]:
        """Return a function that returns the values that a subnet began with, as a flat buffer."""
        return self._open.opened[subnet].began.clone

    async def commit_one(
        self, lane: int, attempt: int, steps: int, payload: Payload, *, may: Callable[[], bool] = lambda: True
    ) -> bool:
        """Make an update durable, write it into the network and draw another subnet in its lane.

        Args:
            lane: Its lane.
            attempt: The attempt that pushed it.
            steps: Local steps in it.
            payload: Its values.
            may: Whether the network may change now.

        Returns:
            Whether it might.
        """
        async with self._writing:
            if not may():
                return False
            path, number = updates.path_of(self.run_dir, self.round), self._open.commits
            update = updates.StagedUpdate(lane, steps, self._next_offset, payload.size_bytes, payload.checksum)
            await self._durably(lambda: updates.write(path, update.offset, payload.frames))
            self._reached("update-written")
            rounds = self._open.rounds_after(lane, steps)

            def seal() -> None:
                updates.sync(path)
                fields = {"round": self.round, "rounds": rounds, "number": number, "attempt": attempt}
                self._wal.append("rolled", durable=True, **fields, **update.__dict__)

            await self._durably(seal)
            self._reached("commit-recorded")
            await asyncio.to_thread(self._commit, path, update)
            self._next_offset += update.size_bytes
            if self._open.rounds > self.round:
                self.round, self._next_offset = self._open.rounds, 0
        return True

    def _commit(self, path: Any, update: updates.StagedUpdate) -> None:
        self._open.commit(update.subnet, torch.from_numpy(updates.read(path, update)), update.steps)
        self._locate()

    async def snapshot_network(self) -> None:
        """Write the network and its open subnets, from which a run can be resumed; see `unchanged`."""
        started, round_, arrays = time.monotonic(), self.round, self._open.arrays()
        await self._durably(lambda: snapshots.write(self.run_dir, round_, self.network, self._reached, arrays))
        self._record("snapshot", round=round_, seconds=time.monotonic() - started)

    def _draw(self) -> None:
        if self.rolling is None:
            self.rolling = RollingSubnets(self._program, self.network, self.specs)
        self._locate()

    def _locate(self) -> None:
        """Take note of which subnet is in which lane."""
        self.places = self._open.places()
        self.subnets = [opened.subnet for opened in self._open.opened]

    @property
    def _open(self) -> RollingSubnets:
        assert self.rolling
        return self.rolling
