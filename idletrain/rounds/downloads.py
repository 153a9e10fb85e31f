"""Serve what workers pull: a subnet as the round began with it, or its progress checkpoint."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds.durable.run_directory import Payload
from idletrain.rounds.run_context import RunContext
from idletrain.worker import encoding


class Downloads:
    """The buffers of the attempts that pull, each made once.

    Args:
        run: The run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._buffers: dict[int, asyncio.Future[Tensor]] = {}
        self._checkpoints: dict[int, Payload] = {}

    def prepare(self, lease: LeaseId, step: int) -> None:
        """Get ready for an attempt from `step` on.

        The subnet is cut out while the lease is on its way: a column gather runs at a third of the link's speed. A
        checkpoint is held, because another attempt at the subnet may replace it before this one pulls.
        """
        if step:
            self._checkpoints[lease.attempt] = self._run.checkpoints.latest(lease.subnet)
            return
        cutting = asyncio.to_thread(self._cut, lease.subnet)
        self._buffers[lease.attempt] = asyncio.ensure_future(cutting)

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._buffers.pop(attempt, None)
        self._checkpoints.pop(attempt, None)

    def cancel(self) -> None:
        """Cancel what is being made."""
        for buffer in self._buffers.values():
            buffer.cancel()

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """See `StoreBackend`."""
        run = self._run
        reply = run.check_lease(lease)
        if run.state is None or reply is not Reply.ACCEPTED:
            return reply
        if at is not None:
            return await self._pull_step(lease.subnet, at)
        held = run.state.subnets[lease.subnet].lease_of(lease.attempt)
        step = held.base_steps if held else 0
        if lease.attempt not in self._buffers:
            checkpoint = self._checkpoints[lease.attempt]
            self._buffers[lease.attempt] = asyncio.ensure_future(asyncio.to_thread(_as_tensor, checkpoint))
        part = (await self._buffers[lease.attempt])[start:stop]
        if stop is None and step:  # the last part: nobody asks again
            self._buffers.pop(lease.attempt, None)
        return step, part

    async def _pull_step(self, k: int, step: int) -> tuple[int, Tensor] | Reply:
        if not step:
            return 0, await asyncio.to_thread(self._cut, k)
        checkpoint = self._run.checkpoints.at(k, step)
        return (step, await asyncio.to_thread(_as_tensor, checkpoint)) if checkpoint else Reply.NOT_LEASED

    def _cut(self, k: int) -> Tensor:
        """Return the values that a subnet begins with, encoded as the job says that pulls travel."""
        directory = self._run.directory
        return encoding.encode_pull(self._run.program, directory.subnets[k], directory.began(k)())


def _as_tensor(checkpoint: Payload) -> Tensor:
    """Return a checkpoint as one float32 tensor `[P]`."""
    return torch.frombuffer(bytearray().join(checkpoint.frames), dtype=torch.float32)
