"""An attempt at a subnet that its worker cannot hold: it comes, is trained and leaves unit by unit, by way of a disk.

The first step begins when its first unit is there; in the last, what is final is sent while the rest still computes
(KARMA, arXiv 2008.11421, section III-D). The store takes the parts for an update only when all of them are there.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from idletrain.errors import RefusedError
from idletrain.exchange.messages import PushHeader, Receipt, Reply, checksum
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import LocalSteps, Update
from idletrain.nn.memory import SCRATCH_BYTES
from idletrain.nn.outofcore.executing.backing_file import StateFile, order_of
from idletrain.nn.outofcore.executing.disk import ScratchError, in_memory
from idletrain.nn.outofcore.executing.trainer import MemoryRoom, PlannedSteps
from idletrain.nn.outofcore.planning.plan import InfeasibleError
from idletrain.worker.attempt import Attempt, Loaded, pick_device

logger = logging.getLogger(__name__)
LARGE_FILES = Path("/var/tmp")  # noqa: S108 (files without names)


class OutOfCoreAttempt(Attempt):
    """See `Attempt`; its account tells the plan, too, and `unfit` where this node cannot train such a subnet.

    What comes and goes while it computes is not in the account's seconds of pull and push.
    """

    _planned: PlannedSteps

    def run(self) -> dict[str, Any]:
        """See `Attempt`."""
        self._sent: list[tuple[Sequence[int], Future[None]]] = []
        self._line = asyncio.Lock()  # one part at a time
        self._arriving: Future[None] | None = None
        self._homes: list[StateFile] = []
        try:
            return super().run()
        except (ScratchError, InfeasibleError) as lack:
            logger.warning("subnet %d: %s", self._lease_spec.lease.subnet, lack)
            return self.report("out_of_memory", reason=str(lack))
        finally:
            for call in (self._arriving, *(sent for _, sent in self._sent)):
                if call:
                    call.cancel()
            for home in self._homes:
                home.close()

    # --- pull ---------------------------------------------------------------------------------------------------

    def _pull(self, loaded: Loaded, subnet: Subnet) -> None:
        """Begin to pull; what follows waits for what it needs."""
        program = loaded.program
        scratch = _scratch(loaded)
        if in_memory(scratch):
            raise ScratchError(f"memory.scratch: {scratch} is in memory (tmpfs); name a directory on a disk")
        for _ in ("the subnet", "its marks"):
            self._homes.append(StateFile(scratch, subnet.shapes, len(program.slots), self._is_unwanted))
        self._state_file, self._marked = self._homes
        self._order = order_of(program.module, program.memory.units)
        self.steps, _ = self._call(self._run.client.pull(self._lease_spec.lease, 0, 0))
        slots = len(program.slots) if self.steps else program.persistent_slots[0]
        self._arriving = self._start(self._fill(slots))
        self._arriving.add_done_callback(lambda _: self._state_file.fail(RefusedError("the pull was given up")))

    async def _fill(self, slots: int) -> None:
        try:
            for numbers in self._order:
                for start, stop in self._state_file.parts(numbers, slots):
                    _, values = await self._run.client.pull(self._lease_spec.lease, start, stop)
                    await asyncio.to_thread(self._state_file.put, start, values)
                    self.account["pull_bytes"] += values.nbytes
                self._state_file.mark_arrived(numbers)
        except Exception as error:  # noqa: BLE001 (raised where the parameters are needed)
            self._state_file.fail(error)

    # --- train --------------------------------------------------------------------------------------------------

    def _train(self, loaded: Loaded, subnet: Subnet) -> None:
        program, lease = loaded.program, self._lease_spec.lease
        memory, free, slots = program.memory, self._node.free_bytes, program.persistent_slots[0]

        def planned(module: nn.Module, update: Update) -> PlannedSteps:
            self._planned = PlannedSteps(
                module,
                program.loss,
                self._state_file,
                update,
                MemoryRoom(min(memory.budget or free, free), SCRATCH_BYTES, _scratch(loaded)),
                on_leave=(slots, lambda numbers: self._leave(numbers, slots)),
                known=loaded.plans,
                units=memory.units,
            )
            return self._planned

        work = LocalSteps(program, subnet, self._state_file.flat, lease.subnet, lease.round, pick_device(), planned)
        try:
            self._steps(loaded, work, loaded.order)
            if self.steps < program.training.local_steps:
                self._planned.store(self._state_file)
        finally:
            self._planned.close()
        plan = self._planned.plan
        self.account |= {
            "plan": "".join(plan.unit_modes) if plan else "",
            "streamed": bool(plan and plan.streamed),
            "swapped_bytes": self._planned.swapped_bytes,
            "saved_peak_bytes": self._planned.peak_bytes,
        }

    # --- push ---------------------------------------------------------------------------------------------------

    def _leave(self, numbers: Sequence[int], slots: int) -> None:
        """Send tensors that are final, and at home."""
        self._sent.append(
            (numbers, self._start(self._parts(self._state_file, [numbers], slots, self.steps + 1, update=True)))
        )

    def _save_progress(self, seconds: float) -> Coroutine[Any, Any, Receipt]:
        self._planned.store(self._marked)
        return self._send_all(self._marked, self._marked.slots, self.steps, seconds, update=False)

    def _push(self, loaded: Loaded, _subnet: Subnet, *, whole: bool) -> Reply:
        seconds = self.account["train_seconds"]
        if not whole:
            return self._call(
                self._send_all(self._state_file, self._state_file.slots, self.steps, seconds, update=False)
            ).reply
        slots, _ = loaded.program.persistent_slots
        for numbers, sent in self._sent:
            try:
                sent.result()
            except ConnectionError:  # all its steps are done: once more
                self._call(self._parts(self._state_file, [numbers], slots, self.steps, update=True))
        return self._call(self._seal(self._state_file, slots, self.steps, seconds, update=True)).reply

    async def _send_all(
        self, state_file: StateFile, slots: int, steps: int, seconds: float, *, update: bool
    ) -> Receipt:
        await self._parts(state_file, self._order, slots, steps, update=update)
        return await self._seal(state_file, slots, steps, seconds, update=update)

    async def _parts(
        self, state_file: StateFile, groups: Iterable[Sequence[int]], slots: int, steps: int, *, update: bool
    ) -> None:
        for numbers in groups:
            for start, stop in state_file.parts(numbers, slots):
                async with self._line:
                    values = await asyncio.to_thread(state_file.read, start, stop)
                    header = PushHeader(self._lease_spec.lease, steps, self.account["train_seconds"], 0, update)
                    reply = await self._run.client.part(header, values.element_size() * start, values)
                if reply is not Reply.ACCEPTED:
                    raise RefusedError(f"a part of subnet {self._lease_spec.lease.subnet}: {reply.value}")
                if state_file is self._state_file:
                    self.account["push_bytes"] += values.nbytes

    async def _seal(self, state_file: StateFile, slots: int, steps: int, seconds: float, *, update: bool) -> Receipt:
        """Say that all parts are sent, and what they add up to."""
        digest = await asyncio.to_thread(checksum, state_file.frames(slots))
        return await self._run.client.push(
            PushHeader(self._lease_spec.lease, steps, seconds, digest, update, self._loss), None
        )


def _scratch(loaded: Loaded) -> Path:
    """Where to, by the job or the system: /var/tmp is on a disk where /tmp is not."""
    default = LARGE_FILES if LARGE_FILES.is_dir() else tempfile.gettempdir()
    return Path(loaded.program.memory.scratch or default)
