"""Shared state of one run: its job and program, its durable side, its records and the state of its rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.job import Job
from idletrain.nn.program import Program
from idletrain.observe.records import Recorder
from idletrain.rounds.durable.run_directory import RunDirectory
from idletrain.rounds.durable.stream_positions import StreamPositions
from idletrain.rounds.progress_checkpoints import ProgressCheckpoints
from idletrain.rounds.protocol import RoundEvent
from idletrain.rounds.reassembly import DecodedPush
from idletrain.rounds.table import RoundState
from idletrain.rounds.worker_events import check_lease


class EventHandler(Protocol):
    """Advance the state by an event and carry out the commands that follow."""

    def __call__(self, event: RoundEvent, push: DecodedPush | None = None) -> Reply:
        """Return the reply to a push or heartbeat."""


@dataclass(kw_only=True)
class RunContext:
    """One run; only the coordinator sets its state.

    Attributes:
        job: The job.
        program: Its network, data and settings, as workers get them.
        directory: Its durable side, with the committed network.
        record: Takes what happens.
        handle: Takes events.
        spawn: Runs a coroutine beside the others; an error in it ends the run.
        checkpoints: The open round's progress checkpoints.
        positions: How far the subnets' parts of a stream were read.
        state: The state of the rounds; None before the run is open and after it is over.
    """

    job: Job
    program: Program
    directory: RunDirectory
    record: Recorder
    handle: EventHandler
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    checkpoints: ProgressCheckpoints
    positions: StreamPositions
    state: RoundState | None = None
    _reasons: set[str] = field(default_factory=set)

    def check_lease(self, lease: LeaseId) -> Reply:
        """Return ACCEPTED if a lease holds, else why it does not."""
        return check_lease(self.state, lease) if self.state else Reply.STALE_ROUND

    def record_waiting(self, reason: str) -> None:
        """Record, once per reason, that the run waits for something."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            self.record("waiting", reason=reason)
