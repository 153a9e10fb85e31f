"""An attempt at a subnet larger than its worker's memory: it is pulled, trained and pushed unit by unit over a disk.

The first step begins when its first unit has arrived; in the last step, final values are sent while the rest still
computes (KARMA, arXiv 2008.11421, section III-D). The store accepts the parts as an update only when all have arrived.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from idletrain.errors import RefusedError
from idletrain.exchange.messages import Activity, PushHeader, Receipt, Reply, checksum
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import LocalSteps, Update
from idletrain.nn.memory import SCRATCH_BYTES
from idletrain.nn.outofcore.executing.backing_file import StateFile, order_of
from idletrain.nn.outofcore.executing.compiled import CompiledPlan
from idletrain.nn.outofcore.executing.disk import ScratchError, in_memory
from idletrain.nn.outofcore.executing.trainer import MemoryRoom, PlannedSteps
from idletrain.nn.outofcore.planning.plan import InfeasibleError
from idletrain.worker.attempt import Attempt
from idletrain.worker.device import pick_device
from idletrain.worker.memory_limits import unused_bytes
from idletrain.worker.node import Loaded

logger = logging.getLogger(__name__)
LARGE_FILES = Path("/var/tmp")  # noqa: S108 (files without names)


class OutOfCoreAttempt(Attempt):
    """An attempt that keeps the subnet in a file on disk.

    The account also holds the plan; it ends as `out_of_memory` where this node cannot train such a subnet. Transfers
    during the steps do not count as its seconds of pull and push.
    """

    _planned: PlannedSteps

    def run(self) -> dict[str, Any]:
        """Pull, train and push as `Attempt` does; return the account."""
        self._sent: list[tuple[Sequence[int], Future[None]]] = []
        self._sending = asyncio.Lock()  # one part at a time
        self._arriving: Future[None] | None = None
        self._is_compiling: Callable[[], bool] = lambda: False
        self._state_files: list[StateFile] = []
        try:
            return super().run()
        except (ScratchError, InfeasibleError) as error:
            logger.warning("subnet %d: %s", self._spec.lease.subnet, error)
            return self.report("out_of_memory", reason=str(error))
        finally:
            for call in (self._arriving, *(sent for _, sent in self._sent)):
                if call:
                    call.cancel()
            for state_file in self._state_files:
                state_file.close()

    # --- pull ---------------------------------------------------------------------------------------------------

    def _pull(self, loaded: Loaded, subnet: Subnet) -> None:
        """Start the pull; each step waits for the parts that it needs."""
        program = loaded.program
        scratch = _scratch(loaded)
        if in_memory(scratch):
            raise ScratchError(f"memory.scratch: {scratch} is in memory (tmpfs); name a directory on a disk")
        for _ in ("the subnet", "its progress checkpoints"):
            self._state_files.append(StateFile(scratch, subnet.shapes, len(program.slots), self._transfers.is_unwanted))
        self._state_file, self._checkpoint_file = self._state_files
        self._order = order_of(program.module, program.memory.units)
        self.steps, _ = self._transfers.call(self._run.client.pull(self._spec.lease, 0, 0))
        slots = len(program.slots) if self.steps else program.persistent_slots[0]
        self._arriving = self._transfers.start(self._receive_parts(slots))
        self._arriving.add_done_callback(lambda _: self._state_file.fail(RefusedError("the pull was given up")))

    async def _receive_parts(self, slots: int) -> None:
        """Pull `slots` slots into the state file, in the order in which units run."""
        try:
            for numbers in self._order:
                for start, stop in self._state_file.parts(numbers, slots):
                    _, values = await self._run.client.pull(self._spec.lease, start, stop)
                    await asyncio.to_thread(self._state_file.put, start, values)
                    self.account["pull_bytes"] += values.nbytes
                self._state_file.mark_arrived(numbers)
        except Exception as error:  # noqa: BLE001 (raised where the parameters are needed)
            self._state_file.fail(error)

    def _activity(self) -> Activity:
        """Return what the attempt does now: its first steps wait for the parts that they need, or for a compiler."""
        if self._is_compiling():
            return "load"
        arriving = self._arriving is None or not self._arriving.done()
        return "move" if arriving and self._doing == "train" else self._doing

    # --- train --------------------------------------------------------------------------------------------------

    def _train(self, loaded: Loaded, subnet: Subnet) -> None:
        program, lease = loaded.program, self._spec.lease
        memory, free, slots = program.memory, self._node.free_bytes, program.persistent_slots[0]

        def plan_steps(module: nn.Module, update: Update) -> PlannedSteps:
            self._planned = PlannedSteps(
                module,
                program.training_loss,
                self._state_file,
                update,
                MemoryRoom(min(memory.budget or free, free), SCRATCH_BYTES, _scratch(loaded)),
                on_leave=(slots, lambda numbers: self._send_final(numbers, slots)),
                known=loaded.plans,
                units=memory.units,
                compiler_room=unused_bytes if memory.compile == "auto" else None,
            )
            self._is_compiling = lambda: self._planned.compiling
            return self._planned

        flat, first = self._state_file.flat, self._spec.first_step
        work = LocalSteps(program, subnet, flat, lease.subnet, lease.round, pick_device(), plan_steps, first)
        try:
            self._train_steps(loaded, work, self._batch_order(loaded))
            if self.steps < program.local_steps(lease.round):
                self._planned.store(self._state_file)
        finally:
            self._planned.close()
        plan = self._planned.plan
        self.account |= {
            "plan": "".join(plan.unit_modes) if plan else "",
            "compiled": plan.part if isinstance(plan, CompiledPlan) else None,
            "streamed": bool(plan and plan.streamed),
            "swapped_bytes": self._planned.swapped_bytes,
            "saved_peak_bytes": self._planned.peak_bytes,
        }

    # --- push ---------------------------------------------------------------------------------------------------

    def _send_final(self, numbers: Sequence[int], slots: int) -> None:
        """Start to send tensors that have their final values, in the state file."""
        self._sent.append(
            (
                numbers,
                self._transfers.start(
                    self._send_parts(self._state_file, [numbers], slots, self.steps + 1, update=True)
                ),
            )
        )

    def _save_progress(self, seconds: float) -> Coroutine[Any, Any, Receipt]:
        self._planned.store(self._checkpoint_file)
        return self._send_all(self._checkpoint_file, self._checkpoint_file.slots, self.steps, seconds, update=False)

    def _push(self, loaded: Loaded, _subnet: Subnet, *, whole: bool) -> Reply:
        seconds = self.account["train_seconds"]
        if not whole:
            return self._transfers.call(
                self._send_all(self._state_file, self._state_file.slots, self.steps, seconds, update=False)
            ).reply
        slots, _ = loaded.program.persistent_slots
        for numbers, sent in self._sent:
            try:
                sent.result()
            except ConnectionError:  # all its steps are done: once more
                self._transfers.call(self._send_parts(self._state_file, [numbers], slots, self.steps, update=True))
        return self._transfers.call(self._seal(self._state_file, slots, self.steps, seconds, update=True)).reply

    async def _send_all(
        self, state_file: StateFile, slots: int, steps: int, seconds: float, *, update: bool
    ) -> Receipt:
        await self._send_parts(state_file, self._order, slots, steps, update=update)
        return await self._seal(state_file, slots, steps, seconds, update=update)

    async def _send_parts(
        self, state_file: StateFile, groups: Iterable[Sequence[int]], slots: int, steps: int, *, update: bool
    ) -> None:
        for numbers in groups:
            for start, stop in state_file.parts(numbers, slots):
                async with self._sending:
                    values = await asyncio.to_thread(state_file.read, start, stop)
                    header = PushHeader(self._spec.lease, steps, self.account["train_seconds"], 0, update)
                    reply = await self._run.client.part(header, values.element_size() * start, values)
                if reply is not Reply.ACCEPTED:
                    raise RefusedError(f"a part of subnet {self._spec.lease.subnet}: {reply.value}")
                if state_file is self._state_file:
                    self.account["push_bytes"] += values.nbytes

    async def _seal(self, state_file: StateFile, slots: int, steps: int, seconds: float, *, update: bool) -> Receipt:
        """Push the header that declares all parts sent, with the checksum of their values; return the receipt."""
        digest = await asyncio.to_thread(checksum, state_file.frames(slots))
        progress = self._progress(seconds)
        return await self._run.client.push(
            PushHeader(self._spec.lease, steps, seconds, digest, update, progress.loss, progress.position), None
        )


def _scratch(loaded: Loaded) -> Path:
    """Return the job's scratch directory or the system's: /var/tmp is on a disk where /tmp is not."""
    default = LARGE_FILES if LARGE_FILES.is_dir() else tempfile.gettempdir()
    return Path(loaded.program.memory.scratch or default)
