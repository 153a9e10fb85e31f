"""Count a job's rounds: those of the passes that it names, or as many as are of use where it names none."""

from __future__ import annotations

import math
from dataclasses import replace

from idletrain.errors import JobError
from idletrain.job import Job, TrainingSettings
from idletrain.nn.data.streams import known_length
from idletrain.nn.prepare import Prepared

MOST_EPOCHS, LEAST_ROUNDS = 50, 10  # where a job says neither rounds nor epochs; at most the default number of rounds
FAR_MORE = 1.2  # times the passes that a job names, above which a note says so


def with_rounds(job: Job, prepared: Prepared) -> tuple[Job, Prepared]:
    """Return the job and its program with the rounds that its `epochs` take, or its data are worth if it names none.

    Raises:
        JobError: it has `epochs`, and its data are a stream of unknown length.
    """
    epochs = job.training.epochs
    if epochs is None and (job.training.phases or "rounds" in job.training.model_fields_set):
        return job, prepared
    samples = known_length(prepared.program.source.open())
    if samples is None:
        if epochs is None:
            return job, prepared
        raise JobError("training.epochs: how many samples the stream has is not known; give rounds instead")
    drawn = _drawn_in_a_round(job, prepared.program.training)
    if epochs is None:
        rounds = min(job.training.rounds, max(LEAST_ROUNDS, math.ceil(MOST_EPOCHS * samples / drawn)))
    else:
        rounds = max(1, math.ceil(epochs * samples / drawn))
        if (passes := rounds * drawn / samples) > FAR_MORE * epochs:
            note = f"training.epochs: whole rounds make {passes:.3g} of {epochs:g}; fewer local_steps come closer"
            prepared = replace(prepared, notes=(*prepared.notes, note))
    training = job.training.model_copy(update={"rounds": rounds})
    program = replace(prepared.program, training=prepared.program.training.model_copy(update={"rounds": rounds}))
    return job.model_copy(update={"training": training}), replace(prepared, program=program)


def _drawn_in_a_round(job: Job, training: TrainingSettings) -> float:
    """Return how many samples all subnets together draw in a round.

    With the slack of rolling rounds, more subnets take a round's steps before each neuron has.
    """
    slack = job.training.slack if job.preemption.policy == "rolling" else 0.0
    together = 1.0 if training.mode == "lockstep" else training.subnets * (1 + slack)  # lockstep shares each batch
    return training.batch_size * training.local_steps * together
