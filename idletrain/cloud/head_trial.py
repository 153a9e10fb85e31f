"""Train a trial of a sweep in the head's own process, as a run with a record and a prefix of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from idletrain.cloud import record
from idletrain.cloud.controller import FleetController
from idletrain.cloud.head_run import RunHooks, train
from idletrain.cloud.record import RUN_RECORD_KEY, RunRecord
from idletrain.cloud.workdir import RUNS
from idletrain.cluster.identity import Identity
from idletrain.errors import IdletrainError, RunError
from idletrain.job import Job
from idletrain.observe.records import Record, Recorder
from idletrain.observe.summary import Summary
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
IDLE_SLACK_SECONDS = 2.0  # a run that waits for nodes may give up a moment before


async def train_trial(
    sweep: RunRecord, prefix: S3Prefix, job: Job, identity: Identity, scheduler: str, hooks: RunHooks
) -> None:
    """Train a trial and store its state and results.

    Args:
        sweep: The sweep's record.
        prefix: The trial's prefix.
        job: The trial's job.
        identity: The head's certificates.
        scheduler: The address of a scheduler whose nodes train it.
        hooks: Functions that are called meanwhile.

    Raises:
        RunError: it cannot be trained; a run that is no trial of the sweep has its name, for one.
    """
    stored = await asyncio.to_thread(prefix.get, RUN_RECORD_KEY)
    if stored and RunRecord.from_json(stored.content).of_sweep != sweep.run:
        raise RunError(f"{prefix.url} holds a run that is no trial of this sweep; name the sweep with --name")
    run = replace(sweep, run=job.name, job=job.as_tree(), sweep=None, of_sweep=sweep.run)
    await asyncio.to_thread(prefix.put, RUN_RECORD_KEY, run.as_json())
    try:
        await train(run, prefix, identity, scheduler, hooks)
    except Exception as error:
        with contextlib.suppress(IdletrainError):  # the first error is the one to be seen
            await asyncio.to_thread(record.update, prefix, state="ended", failure=why_failed(error))
        if isinstance(error, RunError):  # what is there was copied
            await asyncio.to_thread(shutil.rmtree, RUNS / job.name, ignore_errors=True)
        raise
    await asyncio.to_thread(record.update, prefix, state="ended")
    await asyncio.to_thread(shutil.rmtree, RUNS / job.name, ignore_errors=True)  # of many trials a disk would be full


def why_failed(error: BaseException) -> str:
    """Return why a trial failed, as a sentence."""
    return str(error) if isinstance(error, IdletrainError) else f"the head met a bug, not your fault: {error!r}"


class HeadTrial:
    """A trial that trains in this process (see `TrialUnderWay`).

    Args:
        train_with: Trains it with hooks.
        controller: Gets every event.
        give_up: Stops the sweep, with the reason.
        idle_duration: Seconds without a node after which no other trial is tried.

    Attributes:
        trains: Whether it has started, and not ended.
    """

    def __init__(
        self,
        train_with: Callable[[RunHooks], Coroutine[Any, Any, None]],
        controller: FleetController,
        give_up: Callable[[str], None],
        idle_duration: float,
    ) -> None:
        self._controller, self._give_up, self._idle_duration = controller, give_up, idle_duration
        self.trains = False
        self._summary, self._interrupted = Summary(), False
        self._records: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._stop: Callable[[], object] | None = None
        self._training = asyncio.ensure_future(
            train_with(RunHooks((controller, self._take), self._on_start, self._on_end, self._summary))
        )
        self._training.add_done_callback(lambda _: self._records.put_nowait(None))

    async def records(self) -> AsyncIterator[dict[str, Any]]:
        """Yield its summary after each round and at its end."""
        while (taken := await self._records.get()) is not None:
            yield taken

    def interrupt(self) -> None:
        """Stop it so that it can be resumed."""
        self._interrupted = True
        (self._stop or self._training.cancel)()

    async def wait(self) -> str:
        """Wait for its end; return why it failed, if it did."""
        await asyncio.wait((self._training,))
        if self._training.cancelled():
            return "it was stopped before it began"
        if (error := self._training.exception()) is None:
            return ""
        if not isinstance(error, IdletrainError):
            logger.error("a bug", exc_info=error)
        elif self._stop and self._controller.idle_seconds > self._idle_duration - IDLE_SLACK_SECONDS:
            self._give_up(str(error))  # the next trial would wait for nodes as long
        return why_failed(error)

    async def end(self) -> None:
        """End it at once, if it still trains."""
        if not self._training.done():
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)

    def _on_start(self, stop: Callable[[], None], _record: Recorder) -> None:
        self._stop, self.trains = stop, True

    def _on_end(self) -> None:
        self.trains = False

    def _take(self, event: Record) -> None:
        if event["kind"] == "round_committed":
            self._records.put_nowait(self._summary.round_record(event))
        elif event["kind"] == "run_ended":
            self._records.put_nowait(self._summary.as_record())
            if event["status"] == "stopped" and not self._interrupted:
                self._give_up("the head's machine ends")
