"""How long a local step of a subnet takes on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.nn.subnets import Subnet

MEASURED_STEPS, MEASURED_SECONDS = 5, 0.2  # at least, after one to warm up; a plan should take a second, not a minute


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As a local worker computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def step_seconds(prepared: Prepared, subnet: Subnet, number: int) -> float:
    """Time of one local step of a subnet on this machine."""
    program = prepared.program
    flat = torch.zeros(program.buffer_size(subnet, travelling=False))
    flat[: subnet.parameters] = Network(program.layout, 1, prepared.network).pull(subnet)
    work = LocalSteps(program, subnet, flat, number, 0)
    samples, training = program.source.open(), program.training
    order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
    if program.output:
        from idletrain.nn import shards  # and with it Numba

        order = shards.open_output(program, work.module, subnet, samples, flat, shards.Place(0, number))
    work.step(samples, order, 0)
    step, started = 0, time.perf_counter()
    while step < MEASURED_STEPS or time.perf_counter() - started < MEASURED_SECONDS:
        step += 1
        work.step(samples, order, step)
    return (time.perf_counter() - started) / step
