"""An attempt pulls and pushes a subnet unit by unit, and survives faults of its parts on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from idletrain.errors import DamageError, RefusedError
from idletrain.exchange.messages import LeaseId, PushHeader, Receipt, Reply, checksum
from idletrain.exchange.parts import Parts
from idletrain.job_file import parse_job
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.outofcore.executing.trainer import PlannedSteps
from idletrain.nn.prepare import from_settings
from idletrain.worker.attempt import Attempt
from idletrain.worker.lease_spec import LeaseSpec
from idletrain.worker.node import WorkerNode
from idletrain.worker.out_of_core import OutOfCoreAttempt

LEASE = LeaseId("here", 1, 0, 0, 1)
STEPS = 3


class Head:
    """A subnet and its program, leased and accepted as a head does, with faults where a test sets them."""

    def __init__(self, scratch: Path, progress_seconds: float = 3600.0) -> None:
        job = parse_job(
            {
                "name": "here",
                "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 256, 256, 256, 10]}},
                "data": {"name": "digits"},
                "training": {
                    "subnets": 2,
                    "local_steps": STEPS,
                    "rounds": 1,
                    "optimizer": {"name": "adamw", "lr": 0.001},
                },
                "nodes": {"count": 1, "memory": "1GiB"},
                "memory": {"budget": "160MiB", "out_of_core": "always", "scratch": str(scratch)},
            }
        )
        prepared = from_settings(job.model, job.data, job.training, memory=job.memory)
        self.program, self.parts = prepared.program, Parts()
        own = self.program.places(by_neurons((0.5, 0.5)))[0]
        self.spec = LeaseSpec(LEASE, "tcp://127.0.0.1:9", own, "out-of-core", progress_seconds, 3600.0)
        self.subnet = self.program.subnet(0, own)
        self.flat = Network.of(self.program, prepared.network).pull(self.subnet)
        self.pushed: list[tuple[int, bytes]] = []
        self.broken: list[int] = []  # steps of parts that do not arrive, each once
        self.pulls = 0
        self.at_pull = lambda _count: None

    async def program_bytes(self) -> bytes:
        return cloudpickle.dumps(self.program)

    async def pull(self, _lease: LeaseId, start: int = 0, stop: int | None = None) -> tuple[int, Tensor]:
        self.pulls += 1
        self.at_pull(self.pulls)
        return 0, self.flat[start:stop].clone()

    async def part(self, header: PushHeader, start: int, values: Tensor) -> Reply:
        if header.steps in self.broken:
            self.broken.remove(header.steps)
            raise ConnectionError("the parameter store: made up")
        what, frames = (header.steps, header.update), [values.numpy().data.cast("B")]
        self.parts.hold(header.lease.attempt, what, start, frames, 1 << 30)
        return Reply.ACCEPTED

    async def push(self, header: PushHeader, flat: Tensor | None) -> Receipt:
        assert flat is None
        assert header.update == (header.steps == STEPS)
        frames = self.parts.payload(header.lease.attempt, (header.steps, header.update))
        if checksum(frames) != header.checksum:
            return Receipt(Reply.CORRUPT)
        self.pushed.append((header.steps, b"".join(frames)))
        return Receipt(Reply.ACCEPTED)

    async def beat(self, _lease: LeaseId, _steps: int, _doing: str) -> Reply:
        return Reply.ACCEPTED

    def in_core(self) -> bytes:
        """Return the update of the subnet trained in memory."""
        program = self.program
        flat = torch.zeros(len(program.slots) * self.subnet.parameters)
        flat[: len(self.flat)] = self.flat
        samples = program.source.open()
        work = LocalSteps(program, self.subnet, flat, 0, 0)
        training = program.training
        for step in range(STEPS):
            work.step(samples, BatchOrder(training.seed, len(samples), training.batch_size, training.subnets), step)
        return flat[: len(self.flat)].numpy().tobytes()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A worker's event loop, on its own thread."""
    created = asyncio.new_event_loop()
    thread = threading.Thread(target=created.run_forever)
    thread.start()
    yield created
    created.call_soon_threadsafe(created.stop)
    thread.join()
    created.close()


def attempt(head: Head, loop: asyncio.AbstractEventLoop, kind: type[Attempt] = OutOfCoreAttempt) -> Attempt:
    security = SimpleNamespace(get_connection_args=lambda _role: {})
    worker: Any = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop), security=security, address="tcp://here")
    node = WorkerNode()
    node.free_bytes = 1 << 30
    created = kind(head.spec, node, worker)
    created._run.client = SimpleNamespace(  # type: ignore[assignment]
        pull=head.pull, part=head.part, push=head.push, beat=head.beat, program=head.program_bytes, transport="tcp"
    )
    return created


def test_its_update_is_that_of_training_in_core_and_its_space_is_given_back(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    head = Head(tmp_path)
    created = attempt(head, loop)
    account = created.run()
    assert account["ended"] == "done"
    assert head.pushed == [(STEPS, head.in_core())]
    assert head.pulls > 3  # it came in parts
    assert isinstance(created, OutOfCoreAttempt)
    assert all(not file.flat.any() for file in created._state_files)  # holes in a file that has no name
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_the_last_step_that_does_not_arrive_is_sent_again(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    head = Head(tmp_path)
    head.broken = [STEPS, STEPS]
    assert attempt(head, loop).run()["ended"] == "done"
    assert head.broken == []
    assert head.pushed == [(STEPS, head.in_core())]


def test_a_node_that_leaves_while_parts_arrive_pushes_nothing(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    head = Head(tmp_path)
    created = attempt(head, loop)
    head.at_pull = lambda count: created._node.draining.set() if count == 3 else None
    try:
        assert created.run()["ended"] == "drained"
    except RefusedError as refused:  # where a step waits for its parts already
        assert "leaving" in str(refused)  # noqa: PT017 (it is not always raised)
    assert created._node.draining.is_set()
    assert created.steps == 0
    assert head.pushed == []
    assert not created._node.computing.locked()
    assert not created._node.moving.locked()


def test_a_checkpoint_that_fails_releases_the_transfer_lock(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_args: Any) -> None:
        raise DamageError("made up")

    monkeypatch.setattr(PlannedSteps, "store", damaged)
    created = attempt(Head(tmp_path, progress_seconds=0.0), loop)
    with pytest.raises(DamageError, match="made up"):
        created.run()
    assert not created._node.computing.locked()
    assert not created._node.moving.locked()


def test_checkpoints_hold_all_slots_and_can_be_resumed_from(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    head = Head(tmp_path, progress_seconds=0.0)
    assert attempt(head, loop).run()["ended"] == "done"
    checkpoint_bytes = [len(payload) for steps, payload in head.pushed if steps < STEPS]
    assert checkpoint_bytes
    assert set(checkpoint_bytes) == {4 * len(head.program.slots) * head.subnet.parameters}
    assert head.pushed[-1] == (STEPS, head.in_core())


def test_an_attempt_whose_steps_are_being_compiled_has_the_time_of_one_that_loads(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    created = attempt(Head(tmp_path), loop)
    assert isinstance(created, OutOfCoreAttempt)
    seen = []

    class Compiling(PlannedSteps):
        @property
        def compiling(self) -> bool:
            return True

        def step(self, inputs: Any, target: Any, *, last: bool = False) -> Tensor:
            seen.append(created._activity())
            return super().step(inputs, target, last=last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("idletrain.worker.out_of_core.PlannedSteps", Compiling)
        account = created.run()
    assert (account["ended"], account["compiled"]) == ("done", None)
    assert set(seen) == {"load"}
