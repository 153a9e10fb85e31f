"""Time a local step of a subnet on this machine."""

from __future__ import annotations

import statistics
import time

import cloudpickle
import torch
from distributed import Worker
from torch import Tensor

from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import Prepared
from idletrain.nn.program import Program
from idletrain.worker.device import device_for

MEASURED_STEPS, MEASURED_SECONDS = 5, 0.2  # at least, after a warm-up step; a plan should take a second, no minute
PAIRS = 9  # of timings by turns, each a `MEASURED_SECONDS / PAIRS` long
FIRST_SPREAD = 0.01  # standard deviation of parameters whose values do not matter
STEP_PROBE_KEY = "idletrain-fabric-work"  # among a worker's extensions


class StepProbe:
    """A subnet whose steps are timed; its data is open and its first step done.

    Attributes:
        on_gpu: Whether it trains on a GPU.
    """

    def __init__(self, program: Program, subnet: Subnet, flat: Tensor, number: int, round_: int = 0) -> None:
        self._steps = LocalSteps(program, subnet, flat, number, round_)
        self._samples = program.source.open()
        self._order = batch_order(self._samples, program.training)
        if program.output:
            from idletrain.nn.wide import label_shards  # and with it Numba

            place = label_shards.ShardPlace(round_, number)
            self._order = label_shards.open_output(program, self._steps.module, subnet, self._samples, flat, place)
        self.on_gpu, self._next = flat.is_cuda, 0
        self.pace(1, 0.0)

    def pace(self, min_steps: int, seconds: float) -> float:
        """Return the mean seconds of a step, over at least `min_steps` steps and `seconds` seconds."""
        done, started = 0, time.perf_counter()
        while done < min_steps or time.perf_counter() - started < seconds:
            self._steps.step(self._samples, self._order, self._next)
            done, self._next = done + 1, self._next + 1
        if self.on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / done


def typical(program: Program) -> Subnet:
    """Return the first round's first subnet, with all subnets of equal size."""
    phase = program.training.phase(0)
    return program.subnets(0, program.specs(phase.equal_shares, phase.copies))[0]


def step_seconds(prepared: Prepared, subnet: Subnet, number: int, round_: int = 0) -> float:
    """Return the seconds of one local step of a round's subnet on this machine."""
    return _probe(prepared, subnet, number, round_).pace(MEASURED_STEPS, MEASURED_SECONDS)


def times_longer(prepared: Prepared, than: Prepared) -> float:
    """Return how many times as long a step of one typical subnet takes as one of another.

    Times both by turns, and takes the median of the ratios: other processes slow both steps of a pair alike.
    """
    probes = [_probe(each, typical(each.program)) for each in (prepared, than)]
    pairs = [[probe.pace(1, MEASURED_SECONDS / PAIRS) for probe in probes] for _ in range(PAIRS)]
    return statistics.median(one / other for one, other in pairs)


def _probe(prepared: Prepared, subnet: Subnet, number: int = 0, round_: int = 0) -> StepProbe:
    """Return a subnet of a prepared job's network, to be timed on this machine."""
    program = prepared.program
    flat = torch.zeros(program.buffer_size(subnet, persistent=False), device=device_for(program))
    flat[: subnet.parameters] = Network(program.layout, 1, prepared.network).pull(subnet)
    return StepProbe(program, subnet, flat, number, round_)


def open_work(worker: Worker, content: bytes) -> None:
    """Prepare a pickled program's typical subnet on a worker, on the device that a run would use."""
    program: Program = cloudpickle.loads(content)
    subnet = typical(program)
    flat = torch.zeros(program.buffer_size(subnet, persistent=False), device=device_for(program))
    flat[: subnet.parameters].normal_(std=FIRST_SPREAD, generator=torch.Generator(flat.device).manual_seed(0))
    worker.extensions[STEP_PROBE_KEY] = StepProbe(program, subnet, flat, 0)


def close_work(worker: Worker) -> None:
    """Drop a worker's prepared subnet, if it has one."""
    worker.extensions.pop(STEP_PROBE_KEY, None)
