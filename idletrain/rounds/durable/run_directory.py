"""The durable side of a run: write-ahead log, updates and snapshots on disk, and the network in memory.

Every write waits for disk space when there is none. The network changes in `commit` alone, after the log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from idletrain.errors import DamageError, RunError
from idletrain.nn.evaluate import assembled
from idletrain.nn.ist.schemes import SubnetPlace, SubnetSpec
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.nn.rolling import RollingSubnets
from idletrain.observe.records import Recorder
from idletrain.rounds.durable import history, module_state, recovery, snapshots, updates, write_ahead_log
from idletrain.rounds.durable.stream_positions import StreamPositions
from idletrain.storage import NO_SPACE_ERRORS, CrashPoint, make_private

logger = logging.getLogger(__name__)
ROOM_RETRY_SECONDS = 1.0
ROUNDS_REMEMBERED = 16  # late rows come at most a few rounds after their update
INLINE_BYTES = 1 << 22  # written and checked in 3 ms, where a thread's turn on a busy head takes as long or longer
INLINE_SECONDS = 0.005  # that the last write took, at most: a disk that is slow must not stop the head's loop


@dataclass(frozen=True)
class Payload:
    """A push that passed its checks: its frames, training seconds and checksum."""

    frames: Sequence[memoryview]
    train_seconds: float
    checksum: int

    @property
    def size_bytes(self) -> int:
        """Bytes in all frames."""
        return sum(len(frame) for frame in self.frames)


class RunDirectory:
    """A run directory, opened by the one head that holds it.

    Args:
        run_dir: The run directory.
        prepared: The program and, for a run's first head, the network's first values; see `Prepared.share` for what
            becomes of these.
        record: Takes what happens.
        reached: Called at named points around every durable write.
        keep: Snapshots to keep.
        metric: What tells the best network, whose snapshot is kept, too; None if nothing does.

    Attributes:
        network: The network after `round` committed rounds.
        module: The module with the network's values; snapshots hold its other state as it is then.
        epoch: This head's number; leases of older heads are void.
        specs: The open round's subnets, or empty if it is not planned yet.
        planned: Per phase, the subnets of its rounds as the first head planned them; empty without phases.
        places: The places of the open round's subnets, as leases carry them, once it has begun.
        subnets: The same as layouts of tensors.
        staged: The open round's durable updates, by subnet.
        scores: By the number of rounds done, what tells the best network, as earlier heads measured it.
        best_round: The round after which the network was the best so far, or None.
        rolling: The open subnets of a run that commits each by itself (see `rolling_directory`); None before it begins.

    Raises:
        DamageError: No snapshot is sound.
        RunError: A file is there and cannot be read.
        OSError: There is no room for the first snapshot.
    """

    def __init__(
        self,
        run_dir: Path,
        prepared: Prepared,
        record: Recorder,
        reached: CrashPoint,
        keep: int,
        metric: str | None = None,
    ) -> None:
        self.run_dir, self._program = run_dir, prepared.program
        self._record, self._reached, self._keep = record, reached, keep
        for folder in ("updates", "snapshots"):
            make_private(run_dir / folder)
        self.rolling: RollingSubnets | None = None
        self._wal = write_ahead_log.WriteAheadLog(run_dir / "wal")
        self._went_back = False
        past = history.collect(self._wal.records)
        if past.epochs or snapshots.rounds(run_dir) or updates.rounds(run_dir):
            past = self._restore(past)
        else:
            self.network = Network.of(self._program, prepared.network)
            snapshots.write(run_dir, 0, self.network, reached)
            module_state.write(run_dir, 0, prepared.module)
        self.module = assembled(prepared.module, self.network.averaged)
        prepared.share(self.network.values)
        self.round = past.rounds
        # Where the log lost heads, a number that none of them had.
        self.epoch = max(past.epochs + 1, int(time.time())) if self._went_back else past.epochs + 1
        self._specs = past.specs
        self.specs = past.specs.get(past.rounds, ())
        self.planned = past.planned
        self.places: Sequence[SubnetPlace] = ()
        self.subnets: Sequence[Subnet] = ()
        self.staged = self._sound(past.staged.get(past.rounds, {}))
        self._metric, self.best_round = metric, past.best_round(metric)
        self.scores = {round_: kept.score for round_, kept in past.scores.get(metric or "", {}).items()}
        if self.best_round not in (None, self.round, *snapshots.rounds(run_dir)):  # damage took it: seek it anew
            self.best_round, self.scores = None, {}
        self._steps = past.steps
        self._late_count = past.late_count
        self._late_updates = self._sound_late_updates(past.late_updates.get(past.rounds, ()))
        self._writing = asyncio.Lock()
        self._stopping, self._write_seconds = False, 0.0  # the latter of the last update
        written = [*self.staged.values(), *(late.change for late in self._late_updates)]
        self._next_offset = max((u.offset + u.size_bytes for u in written), default=0)

    def _restore(self, past: history.History) -> history.History:
        """Take up the newest sound state; where rounds are lost, record that and forget what is left of them."""
        restored = recovery.restore(self.run_dir, self._program, replace(past, damage=self._wal.damage))
        self.network, self.rolling = restored.network, restored.rolling
        for round_ in restored.damaged_snapshots:
            snapshots.set_aside(self.run_dir, round_)
        if not restored.note:
            return past
        self._went_back = True
        self._record("warning", round=restored.rounds, reason=restored.note)
        if restored.rounds != past.rounds and not restored.rolling:
            updates.drop(self.run_dir, restored.rounds)
        fields = {"round": restored.rounds, "updates": restored.rolling.commits if restored.rolling else 0}
        self._wal.append("restored", durable=True, reason=restored.note, **fields)
        return history.collect((*self._wal.records, {"kind": "restored", **fields}))

    def round_of(self, subnet: int) -> int:
        """Return the round of a subnet."""
        del subnet
        return self.round

    def first_step_of(self, subnet: int) -> int | None:
        """Return the step from which a subnet's schedule goes on, if its round does not say."""
        del subnet
        return None

    def began(self, subnet: int) -> Callable[[], Tensor]:
        """Return a function that returns the values that a subnet begins with, as a flat buffer."""
        return functools.partial(self.network.pull, self.subnets[subnet])

    def unchanged(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return a context in which nothing is committed."""
        return self._writing

    def close(self) -> None:
        """Close the write-ahead log."""
        self._wal.close()

    def stop_waiting(self) -> None:
        """Wait no longer for disk space: the run is to end."""
        self._stopping = True

    async def begin(
        self, specs: tuple[SubnetSpec, ...], *, planned: tuple[tuple[SubnetSpec, ...], ...] = (), drop: bool = False
    ) -> None:
        """Begin a new epoch, so that pushes on older heads' leases are refused.

        Args:
            specs: The open round's subnets.
            planned: Per phase, those of its rounds.
            drop: Whether to forget the updates that older heads staged of it.
        """
        self.specs, self.planned = specs, planned
        self.staged = {} if drop else self.staged
        self._draw()
        fields = {"epoch": self.epoch, "round": self.round, "subnets": [asdict(spec) for spec in specs], "drop": drop}
        if self.rolling:
            fields["rolling"] = True
        if planned:
            fields["phases"] = [[asdict(spec) for spec in of_phase] for of_phase in planned]
        await self._append("epoch", durable=True, format=history.FORMAT, **fields)
        self._reached("epoch-recorded")

    async def stage(self, subnet: int, attempt: int, steps: int, payload: Payload, norm_fraction: float) -> None:
        """Make an update durable: the payload first, then the log's record of it."""
        path = updates.path_of(self.run_dir, self.round)
        staged = updates.StagedUpdate(subnet, steps, self._next_offset, payload.size_bytes, payload.checksum)
        self.staged[subnet] = staged
        self._next_offset += staged.size_bytes
        inline = staged.size_bytes <= INLINE_BYTES and self._write_seconds <= INLINE_SECONDS

        def write() -> None:
            started = time.perf_counter()
            updates.write(path, staged.offset, payload.frames)
            self._write_seconds = time.perf_counter() - started

        await self._durably(write, inline=inline)
        self._reached("update-written")
        await self._append("stage", round=self.round, attempt=attempt, norm_fraction=norm_fraction, **asdict(staged))
        self._reached("update-recorded")

    async def late_rows(self, of: int, subnet: int, payload: Payload) -> None:
        """Make late rows of an update of round `of` durable; the open round's commit adds them to the network."""
        async with self._writing:
            path = updates.path_of(self.run_dir, self.round)
            size = payload.size_bytes
            change = updates.StagedUpdate(subnet, 0, self._next_offset, size, payload.checksum)
            self._next_offset += size
            await self._durably(lambda: updates.write(path, change.offset, payload.frames))
            self._late_count += 1
            await self._append("late_rows", round=self.round, of=of, number=self._late_count, **asdict(change))
            self._late_updates.append(history.LateUpdate(self._late_count, of, change))

    async def commit(self, staged: Sequence[tuple[int, int]], next_specs: tuple[SubnetSpec, ...]) -> None:
        """Commit the open round: record it in the log, then change the network."""

        def seal() -> None:
            updates.sync(updates.path_of(self.run_dir, self.round))
            numbers = [late.number for late in self._late_updates]
            fields = {"round": self.round, "staged": staged, "late_updates": numbers}
            fields["next_subnets"] = [asdict(spec) for spec in next_specs]
            self._wal.append("commit", durable=True, **fields)

        async with self._writing:
            await self._durably(seal)
            self._reached("commit-recorded")
            self._steps[self.round] = dict(staged)
            self._forget_rounds()
            await asyncio.to_thread(self._apply)
            self.round, self.specs, self.staged, self._next_offset = self.round + 1, next_specs, {}, 0
            self._late_updates = []
            self._draw()

    async def keep_positions(self, positions: StreamPositions) -> None:
        """Write how far streams were read, if that is known, for the head that resumes the run."""
        if positions:
            await self._durably(positions.write)

    async def snapshot(self) -> None:
        """Write the network and its module's state, then remove what is needed no more."""
        await self.snapshot_network()
        await self.complete_snapshot(self.round, self.module)

    async def snapshot_network(self) -> None:
        """Write the network, from which a run can be resumed; `complete_snapshot` writes what an export needs, too."""
        started, round_ = time.monotonic(), self.round
        await self._durably(lambda: snapshots.write(self.run_dir, round_, self.network, self._reached))
        self._record("snapshot", round=round_, seconds=time.monotonic() - started)

    async def complete_snapshot(self, round_: int, module: nn.Module) -> None:
        """Write a module's state beside the network, then remove old snapshots and the updates that only they needed.

        Args:
            round_: The snapshot's round.
            module: The module with that network's values and buffers.
        """
        await self._durably(lambda: module_state.write(self.run_dir, round_, module))
        await self._durably(self._prune)
        self._reached("updates-pruned")

    async def keep_score(self, score: float | None, *, best: bool) -> None:
        """Record the network's score; if it is the best, write its snapshot before and keep it until there is a better.

        An older best's snapshot is removed last: whatever a crash leaves, the recorded best has its snapshot.
        """
        if best:
            await self.snapshot()
        await self._append("evaluated", durable=True, round=self.round, metric=self._metric, score=score, best=best)
        self._reached("score-recorded")
        if best:
            self.best_round = self.round
            await self._durably(self._prune)

    def _prune(self) -> None:
        updates.prune(self.run_dir, snapshots.prune(self.run_dir, self._keep, self.best_round))

    async def end(self, status: str) -> str:
        """Record how the run ended; return the parameters' SHA-256."""
        digest = await asyncio.to_thread(self.network.sha256)
        await self._append("end", durable=True, status=status, rounds=self.round, params_sha256=digest)
        return digest

    def _apply(self) -> None:
        recovery.apply(self.run_dir, self.subnets, self.network, self.round, self.staged, self._steps[self.round])
        for late in self._late_updates:
            recovery.apply_late(self.run_dir, self._program, self.network, self.round, late, self._specs, self._steps)

    def _forget_rounds(self) -> None:
        """Forget the specs and steps of rounds whose late rows are no longer taken."""
        for by_round in (self._specs, self._steps):
            for old in [round_ for round_ in by_round if round_ < self.round - ROUNDS_REMEMBERED]:
                del by_round[old]

    def _draw(self) -> None:
        self._specs[self.round] = self.specs
        self.places = self._program.places(self.specs)
        self.subnets = self._program.subnets(self.round, self.specs)

    def _sound(self, staged: dict[int, updates.StagedUpdate]) -> dict[int, updates.StagedUpdate]:
        """Return the updates of the open round that an earlier head staged, without those that a power cut damaged."""
        sound = {}
        for k, update in staged.items():
            try:
                updates.read(updates.path_of(self.run_dir, self.round), update)
            except DamageError as error:
                logger.warning("%s; it is trained again", error)
            else:
                sound[k] = update
        return sound

    def _sound_late_updates(self, recorded: Sequence[history.LateUpdate]) -> list[history.LateUpdate]:
        """Return the late updates that an earlier head recorded, without those that a power cut damaged."""
        sound = []
        for late in recorded:
            try:
                updates.read(updates.path_of(self.run_dir, self.round), late.change)
            except DamageError as error:
                logger.warning("%s; it is left out", error)
            else:
                sound.append(late)
        return sound

    async def _append(self, kind: str, *, durable: bool = False, **fields: object) -> None:
        await self._durably(lambda: self._wal.append(kind, durable=durable, **fields), inline=not durable)

    async def _durably(self, write: Callable[[], None], *, inline: bool = False) -> None:
        """Write, in a thread or `inline`; while there is no disk space, record that once and try again.

        Raises:
            RunError: There is none, and the run is to end; or the directory cannot be written.
        """
        paused = False
        while True:
            try:
                write() if inline else await asyncio.to_thread(write)
            except OSError as error:
                if error.errno not in NO_SPACE_ERRORS:
                    where = error.filename or self.run_dir
                    raise RunError(f"{where} cannot be written ({error.strerror}); fix that and add --resume") from None
                reason = f"no room left in {self.run_dir} ({errno.errorcode[error.errno or 0]})"
                if self._stopping:
                    raise RunError(f"stopped with {reason}; free some and add --resume") from None
                if not paused:
                    self._record("paused", reason=f"{reason}; free some and the run goes on")
                paused = True
                await asyncio.sleep(ROOM_RETRY_SECONDS)
            else:
                break
        if paused:
            self._record("resumed", reason=f"there is room in {self.run_dir} again")
