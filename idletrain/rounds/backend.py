"""Answers the requests of a run's workers: passes each on to the part of the run that does what it wants."""

from __future__ import annotations

import time
from collections.abc import Sequence

from idletrain.exchange.messages import Activity, LeaseId, LockstepGroup, Reply
from idletrain.nn import travel
from idletrain.rounds import protocol
from idletrain.rounds.downloads import Downloads
from idletrain.rounds.rendezvous import Rendezvous
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.uploads import Uploads


class RunBackend:
    """The store's `StoreBackend`: passes each request of a worker on to the part of the run that answers it.

    Args:
        run: The run.
        downloads: Answers pulls.
        uploads: Takes pushes, their parts and late rows.
        rendezvous: Forms lockstep groups.
    """

    def __init__(self, run: RunContext, downloads: Downloads, uploads: Uploads, rendezvous: Rendezvous) -> None:
        self._run, self._rendezvous = run, rendezvous
        self._pickled = travel.dumps(run.program, run.program.parts)
        self.pull = downloads.pull
        self.push, self.late_rows = uploads.push, uploads.late_rows
        self.part, self.expect, self.part_arrived = uploads.part, uploads.expect, uploads.part_arrived

    def program(self) -> bytes:
        """See `StoreBackend`."""
        return self._pickled

    def stream_position(self, lease: LeaseId) -> str | Reply:
        """See `StoreBackend`."""
        run = self._run
        reply = run.check_lease(lease)
        if run.state is None or reply is not Reply.ACCEPTED:
            return reply
        held = run.state.subnets[lease.subnet].lease_of(lease.attempt)
        steps_before = run.program.steps_before(lease.round)
        return run.positions.at(lease.subnet, steps_before + (held.base_steps if held else 0))

    def beat(self, lease: LeaseId, steps: int, doing: Activity) -> Reply:
        """See `StoreBackend`."""
        return self._run.handle(protocol.Heartbeat(now=time.monotonic(), lease=lease, steps=steps, doing=doing))

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:
        """See `StoreBackend`."""
        if why:
            self._run.record_waiting(f"lockstep: {address} was cut off: {why}")
        stored = self._run.checkpoints.steps(lease.subnet)
        return await self._rendezvous.join(lease, address, {*steps, *stored}, self._run.state)
