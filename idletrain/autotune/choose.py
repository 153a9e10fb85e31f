"""What a job's rounds will take on a fleet, and what is chosen of what the job leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from idletrain.autotune import forecast, step_time
from idletrain.autotune.forecast import AutotuneChoice, FleetFigures, RoundForecast, TrainingOption
from idletrain.autotune.step_time import one_thread
from idletrain.errors import JobError
from idletrain.job import ExchangeSettings, Job, TrainingSettings
from idletrain.nn.memory import subnet_need
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.nn.program import Program
from idletrain.observe.time_use import ROUND_PARTS
from idletrain.worker import encoding

CHOSEN_SETTINGS = ("method", "subnets", "local_steps")  # and with them how parameters travel


def has_forecast(job: Job) -> bool:
    """Whether a forecast holds for it; very wide outputs and lockstep have rules of their own."""
    return job.training.loss != "sampled_softmax" and job.training.mode == "rounds"


def leaves_open(job: Job) -> bool:
    """Whether there is something to choose."""
    return has_forecast(job) and not set(CHOSEN_SETTINGS) <= job.training.model_fields_set


@one_thread()
def choose_settings(job: Job, fleet: FleetFigures) -> tuple[Job, AutotuneChoice]:
    """The job with everything decided, and why.

    Raises:
        JobError: the job does not fit together, in no way that is open.
    """
    said = job.training.model_fields_set
    allowed = (job.training.local_steps,) if "local_steps" in said or not leaves_open(job) else forecast.TRIED_STEPS
    choice = forecast.choose_option(_options(job, fleet), fleet, allowed)
    if not leaves_open(job):
        return job, choice
    found = forecast.training_settings(choice)
    found["exchange"] = ExchangeSettings(**found["exchange"])
    training = job.training.model_copy(update={k: v for k, v in found.items() if k not in said})
    return job.model_copy(update={"training": training}), choice


def _options(job: Job, fleet: FleetFigures) -> list[TrainingOption]:
    """What the job leaves open, the simplest and most exact first.

    Raises:
        JobError: nothing of it is possible.
    """
    found = [list(_by_wire(job, variant, fleet)) for variant in variants(job, fleet.nodes, fleet.memory_bytes)]
    # First all that travel as they are, then those that are coded.
    most = max(len(options) for options in found)
    return [options[wire] for wire in range(most) for options in found if wire < len(options)]


class Variant(NamedTuple):
    """A way to train that the job leaves open, and whether a subnet of it fits a node's memory."""

    prepared: Prepared
    fits: bool

    @property
    def key(self) -> str:
        """See `forecast.key_of`."""
        training = self.prepared.program.training
        return forecast.option_key(training.method, training.subnets)


def variants(job: Job, nodes: int, memory_bytes: int) -> list[Variant]:
    """Methods and numbers of subnets that are possible; whole networks only where they fit, or the job says so.

    Raises:
        JobError: none is.
    """
    found: list[Variant] = []
    faults: list[JobError] = []
    for training in _variants(job, nodes):
        try:
            prepared = from_settings(job.model, job.data, training, job.memory)
        except JobError as fault:
            faults.append(fault)
            continue
        fits = _fits(prepared.program, memory_bytes)
        if fits or training.method == "ist" or "method" in job.training.model_fields_set:
            found.append(Variant(prepared, fits))
    if not found:
        raise faults[0]
    return found


def _fits(program: Program, memory_bytes: int) -> bool:
    """Whether a node has the room for one of its subnets."""
    return subnet_need(program)(1 / program.training.subnets if program.layout.groups else 1.0) <= memory_bytes


def _variants(job: Job, nodes: int) -> Iterator[TrainingSettings]:
    """Methods and numbers of subnets, as far as the job does not say them."""
    training, said, free = job.training, job.training.model_fields_set, leaves_open(job)
    methods = ("local-sgd", "ist") if free and "method" not in said else (training.method,)
    for method in methods:
        counts = (nodes,) if method == "local-sgd" else (nodes, 2 * nodes)
        for subnets in counts if free and "subnets" not in said else (training.subnets,):
            yield training.model_copy(update={"method": method, "subnets": subnets})


def _by_wire(job: Job, variant: Variant, fleet: FleetFigures) -> Iterator[TrainingOption]:
    """A way to train with each way for parameters to travel."""
    prepared, training = variant.prepared, variant.prepared.program.training
    subnet = step_time.typical(prepared.program)
    # What does not fit a node is not tried there.
    seconds = fleet.step_seconds.get(variant.key) or step_time.step_seconds(prepared, subnet, 0)
    free = leaves_open(job) and "exchange" not in training.model_fields_set and not prepared.program.output
    exchange = training.exchange
    for pull, push in forecast.WIRES if free else ((exchange.pull, exchange.push),):
        coded = training.model_copy(update={"exchange": ExchangeSettings.model_validate({"pull": pull, "push": push})})
        program = replace(prepared.program, training=coded)
        if free and variant.fits and not _fits(program, fleet.memory_bytes):  # coding takes memory, too
            continue
        plain = 4 * program.buffer_size(subnet, persistent=True)
        down, up = (encoding.nbytes(program, subnet, way) for way in encoding.DIRECTIONS)
        yield TrainingOption(training.method, training.subnets, pull, push, down, up, plain, seconds)


def choice_lines(choice: AutotuneChoice) -> list[str]:
    """What is expected, and why it was chosen, for people."""
    return [_round(choice.expected), *(f"  {reason}" for reason in choice.why)]


def _round(expected: RoundForecast) -> str:
    parts = ", ".join(f"{getattr(expected, part):.3f} s {part}" for part in ROUND_PARTS)
    return f"expected {expected.round:.3f} s a round on this fleet: {parts}"
