"""Convert a job's passes over the data into rounds."""

from __future__ import annotations

import math
from dataclasses import replace

from idletrain.errors import JobError
from idletrain.job import Job, TrainingSettings
from idletrain.nn.data.streams import known_length
from idletrain.nn.prepare import Prepared


def with_rounds(job: Job, prepared: Prepared) -> tuple[Job, Prepared]:
    """Return the job and its program with the rounds that its `epochs` take; both as they are if it has none.

    Raises:
        JobError: its data are a stream of unknown length.
    """
    if job.training.epochs is None:
        return job, prepared
    samples = known_length(prepared.program.source.open())
    if samples is None:
        raise JobError("training.epochs: how many samples the stream has is not known; give rounds instead")
    slack = job.training.slack if job.preemption.policy == "rolling" else 0.0
    rounds = _rounds_of(job.training.epochs, samples, prepared.program.training, slack)
    training = job.training.model_copy(update={"rounds": rounds})
    program = replace(prepared.program, training=prepared.program.training.model_copy(update={"rounds": rounds}))
    return job.model_copy(update={"training": training}), replace(prepared, program=program)


def _rounds_of(epochs: float, samples: int, training: TrainingSettings, slack: float) -> int:
    """Return the fewest rounds in which all subnets together draw `epochs` times the samples.

    With slack, more subnets take a round's steps before each neuron has.
    """
    together = 1.0 if training.mode == "lockstep" else training.subnets * (1 + slack)  # lockstep shares each batch
    return max(1, math.ceil(epochs * samples / (training.batch_size * training.local_steps * together)))
