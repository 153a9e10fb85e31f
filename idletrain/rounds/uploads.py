"""Takes what workers push, part by part, until it is a progress checkpoint or a durable update."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any

from idletrain.exchange.codec import ReceivedMask
from idletrain.exchange.messages import (
    AcceptanceRule,
    LeaseId,
    PartialPayload,
    PushHeader,
    Receipt,
    Reply,
    checksum,
)
from idletrain.rounds import protocol
from idletrain.rounds.durable.rolling_directory import RollingDirectory
from idletrain.rounds.durable.run_directory import INLINE_BYTES, Payload
from idletrain.rounds.late_rows import LateRows
from idletrain.rounds.reassembly import Baseline, DecodedPush, Reassembly, persistent_part
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.table import RoundState
from idletrain.worker.encoding import ROUNDS_KEPT

EVALUATION_POLL_SECONDS = 0.05
ANSWER_SECONDS = 0.001  # in which the answer to a push is mostly sent


class Uploads:
    """The pushes of the open round, and the late rows of the last ones.

    Args:
        run: The run.
        reassembly: Puts parts together and decodes them.

    Attributes:
        losses: The training loss in the last steps of each of the open round's subnets.
        steps_since: Under `rolling`, by lane, the steps committed since the last round.
    """

    def __init__(self, run: RunContext, reassembly: Reassembly) -> None:
        self._run, self._reassembly = run, reassembly
        self._late_rows = LateRows(run.program)
        self._late_updates: dict[LeaseId, asyncio.Task[Reply]] = {}
        self._staging: dict[int, asyncio.Task[None]] = {}
        self.losses: dict[int, float] = {}
        self.steps_since: dict[int, int] = {}

    def open_round(self) -> None:
        """Forget the pushes of the committed round; its late rows are still taken."""
        self._staging, self.losses = {}, {}

    def take_steps(self) -> list[tuple[int, int]]:
        """Return `steps_since` as pairs, and begin to count anew."""
        taken, self.steps_since = [*self.steps_since.items()], {}
        return taken

    # --- parts (see `StoreBackend`) -------------------------------------------------------------------------------

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """See `StoreBackend`."""
        lease = header.lease
        reply = self._run.check_lease(lease)
        if reply is not Reply.ACCEPTED:
            return reply
        subnet = self._run.directory.subnets[lease.subnet]
        if not self._reassembly.hold(header, start, frames, subnet):
            return self._refuse(lease, Reply.WRONG_SHAPE)
        reply = self._report_part(header)
        enough = header.update and self._reassembly.is_enough(lease.attempt, header.steps, subnet)
        return Reply.ENOUGH if enough and reply is Reply.ACCEPTED else reply

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        """See `StoreBackend`."""
        reply = self._run.check_lease(header.lease)
        if reply is not Reply.ACCEPTED:
            return reply
        rule = self._reassembly.acceptance_rule(header, size, self._run.directory.subnets[header.lease.subnet])
        return self._refuse(header.lease, rule) if isinstance(rule, Reply) else rule

    def part_arrived(self, header: PushHeader, content: memoryview, pieces: ReceivedMask, piece: int) -> bool:
        """See `StoreBackend`."""
        if self._run.check_lease(header.lease) is not Reply.ACCEPTED:
            return False
        self._reassembly.note(header, content, pieces, piece, self._run.directory.subnets[header.lease.subnet])
        return self._report_part(header) is Reply.ACCEPTED

    def _report_part(self, header: PushHeader) -> Reply:
        lease, fraction = header.lease, 0.0
        if header.update:
            subnet = self._run.directory.subnets[lease.subnet]
            fraction = self._reassembly.norm_fraction(lease.attempt, header.steps, subnet)
        return self._run.handle(
            protocol.PartArrived(now=time.monotonic(), lease=lease, steps=header.steps, norm_fraction=fraction)
        )

    # --- pushes -----------------------------------------------------------------------------------------------------

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """See `StoreBackend`."""
        directory, lease = self._run.directory, header.lease
        current = 0 <= lease.subnet < len(directory.subnets) and lease.round == directory.round_of(lease.subnet)
        if current and lease.subnet in self._staging:  # sent again because the reply was lost, or too late
            await asyncio.shield(self._staging[lease.subnet])
        if missing := self._late_rows.missing(lease):
            return Receipt(Reply.DUPLICATE, missing)
        baseline = self._baseline(lease.subnet) if current else None
        size = 4 * self._run.program.buffer_size(baseline.subnet, persistent=False) if baseline else 0
        read = functools.partial(self._reassembly.read, header, frames, baseline)
        inline = size <= INLINE_BYTES and self._run.check_lease(lease) is Reply.ACCEPTED
        push = read() if inline else await asyncio.to_thread(read)
        event = protocol.Pushed(
            now=time.monotonic(), lease=lease, steps=header.steps, update=header.update, fault=push.fault
        )
        reply = self._run.handle(event, push)
        if reply is Reply.ACCEPTED and header.loss is not None:
            self.losses[lease.subnet] = header.loss
        if reply is Reply.ACCEPTED:
            steps_before = self._run.program.steps_before(lease.round)
            self._run.positions.keep(lease.subnet, steps_before + header.steps, header.position)
        if reply not in (Reply.ACCEPTED, Reply.DUPLICATE):
            self._refuse(lease, reply, push.where)
        elif lease.subnet in self._staging:
            await asyncio.shield(self._staging[lease.subnet])  # the reply promises that the update is durable
        return Receipt(reply, self._late_rows.missing(lease))

    def _refuse(self, lease: LeaseId, reply: Reply, where: str = "") -> Reply:
        self._run.record("refused", **_names(lease), reply=reply.value, where=where)
        return reply

    def _baseline(self, k: int) -> Baseline:
        return Baseline(self._run.directory.subnets[k], self._run.directory.began(k))

    # --- late rows --------------------------------------------------------------------------------------------------

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:
        """See `StoreBackend`."""
        directory = self._run.directory
        if lease.epoch != directory.epoch or lease.run != self._run.job.name:
            return Reply.STALE_EPOCH
        if lease.round == directory.round:  # the update that they complete is not in the network yet
            return Reply.STALE_ROUND
        if lease not in self._late_updates:
            if not self._late_rows.missing(lease):
                return Reply.NOT_LEASED
            self._late_updates = {k: v for k, v in self._late_updates.items() if k.round >= lease.round - ROUNDS_KEPT}
            self._late_updates[lease] = self._run.spawn(
                self._add_late_rows(lease, memoryview(bytearray().join(frames)))
            )
        return await asyncio.shield(self._late_updates[lease])  # also if sent again because the reply was lost

    async def _add_late_rows(self, lease: LeaseId, rows: memoryview) -> Reply:
        """Make the change durable that late rows mean for the network."""
        incomplete = self._late_rows.pop(lease)
        change = await asyncio.to_thread(self._late_rows.change, incomplete, rows) if incomplete else None
        if change is None or not change.isfinite().all():
            return Reply.NOT_LEASED
        values = [change.numpy().data.cast("B")]
        await self._run.directory.late_rows(lease.round, lease.subnet, Payload(values, 0.0, checksum(values)))
        self._run.record("late_rows_added", **_names(lease), bytes=len(rows))
        return Reply.ACCEPTED

    # --- commands ---------------------------------------------------------------------------------------------------

    def keep_progress(self, command: protocol.KeepProgress, checkpoint: Payload) -> None:
        """Hold a pushed payload as the subnet's latest progress checkpoint."""
        run, k = self._run, command.subnet
        assert run.state is not None
        subnet = run.state.subnets[k]
        run.checkpoints.keep(k, subnet.steps, checkpoint)
        if subnet.steps < run.state.rules.local_steps:  # else it is the update, recorded when it is stored
            run.record("progress_saved", round=subnet.round, subnet=k, attempt=command.attempt, steps=subnet.steps)

    def persist(self, command: protocol.Persist, push: DecodedPush | None) -> None:
        """Make a subnet's update durable.

        Args:
            command: Which; with a norm fraction, the rows that arrived of an update in flight.
            push: The update, if it was pushed just now; else it is the subnet's latest checkpoint.
        """
        k = command.subnet
        if command.norm_fraction:
            arrived = self._reassembly.arrived(command.attempt, command.steps, self._baseline(k))
            self._staging[k] = self._run.spawn(self._salvage(command, arrived))
            return
        update = push or self._latest_checkpoint(k)
        if isinstance(self._run.directory, RollingDirectory):
            staging = self._commit_one(self._run.directory, command, update, reported=push is None)
        else:
            staging = self._stage(command, update, reported=push is None)
        self._staging[k] = self._run.spawn(staging)

    def kept_seconds(self, lost: protocol.LeaseLost) -> float:
        """Return the training time of a lost lease's steps that are in the store."""
        if lost.norm_fraction:
            assert self._run.state
            return self._reassembly.train_seconds(lost.attempt, self._run.state.subnets[lost.subnet].steps)
        return self._run.checkpoints.latest(lost.subnet).train_seconds if lost.kept_steps else 0.0

    def _latest_checkpoint(self, k: int) -> DecodedPush:
        """Return the part of the latest checkpoint that goes from round to round, as an update."""
        size = 4 * self._run.program.buffer_size(self._run.directory.subnets[k], persistent=True)
        return DecodedPush(persistent_part(self._run.checkpoints.latest(k), size))

    async def _salvage(self, command: protocol.Persist, arrived: PartialPayload) -> None:
        """Store the rows that arrived of an update whose worker is gone."""
        payload = await asyncio.to_thread(self._reassembly.salvaged, arrived, self._baseline(command.subnet))
        # Its worker may only have been slow: then the missing rows follow.
        missing_rows = None if arrived.received.all() else arrived
        push = DecodedPush(payload, None, command.norm_fraction, missing_rows)
        await self._stage(command, push, reported=True)

    async def _stage(self, command: protocol.Persist, push: DecodedPush, *, reported: bool) -> None:
        """Write an update, to be committed with its round; see `_record_staged`."""
        run, k = self._run, command.subnet
        assert run.state is not None
        if push.missing_rows is not None:
            lease = LeaseId(run.state.run, run.state.epoch, run.state.round, k, command.attempt)
            self._late_rows.add(lease, run.directory.subnets[k], push.missing_rows)
        await run.directory.stage(k, command.attempt, command.steps, push.payload, push.norm_fraction)
        self._record_staged(run.state, command, push, reported=reported and not run.state.rules.lockstep)
        run.spawn(self._report_persisted(k))

    async def _report_persisted(self, k: int) -> None:
        """Report an update as durable, once its worker has its answer: what follows, such as leases, takes longer."""
        await asyncio.sleep(ANSWER_SECONDS)
        self._run.handle(protocol.Persisted(now=time.monotonic(), subnet=k))

    async def _commit_one(
        self, directory: RollingDirectory, command: protocol.Persist, push: DecodedPush, *, reported: bool
    ) -> None:
        """Commit an update by itself, once the network may change: where scores decide, not while it is evaluated."""
        run, k = self._run, command.subnet

        def may() -> bool:
            return not (run.state and run.state.evaluating and run.state.rules.depends_on_scores)

        while not await directory.commit_one(k, command.attempt, command.steps, push.payload, may=may):
            await asyncio.sleep(EVALUATION_POLL_SECONDS)
        if run.state is None:
            return
        self._record_staged(run.state, command, push, reported=reported)
        run.checkpoints.forget(k)
        assert directory.rolling
        self.steps_since[k] = self.steps_since.get(k, 0) + command.steps
        run.handle(protocol.Persisted(now=time.monotonic(), subnet=k, neuron_steps=directory.rolling.neuron_steps))

    def _record_staged(
        self, opened: RoundState, command: protocol.Persist, push: DecodedPush, *, reported: bool
    ) -> None:
        """Record a durable update; `reported` says that its seconds already were, when its lease was lost."""
        subnet = opened.subnets[command.subnet]
        names = {"round": subnet.round, "subnet": command.subnet, "attempt": command.attempt}
        self._run.record(
            "staged",
            **names,
            worker=subnet.lease.worker,
            steps=command.steps,
            train_seconds=0.0 if reported else push.payload.train_seconds,
            norm_fraction=push.norm_fraction,
            missing_rows=1 - float(push.missing_rows.received.mean()) if push.missing_rows else 0.0,
        )


def _names(lease: LeaseId) -> dict[str, Any]:
    return {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt}
