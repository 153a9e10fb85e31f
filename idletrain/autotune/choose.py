"""Choose the training settings that a job leaves open, by the forecast of its rounds on a fleet and a short trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from idletrain.autotune import forecast, learning_trial, step_time
from idletrain.autotune.forecast import AutotuneChoice, FleetFigures, RoundForecast, TrainingOption
from idletrain.errors import JobError
from idletrain.job import ExchangeSettings, Job, TrainingSettings
from idletrain.nn.memory import subnet_need
from idletrain.nn.prepare import Prepared, prepare_job
from idletrain.nn.program import Program
from idletrain.nn.threads import one_thread
from idletrain.observe.record_fields import ROUND_PARTS
from idletrain.worker import encoding

CHOSEN_SETTINGS = ("method", "subnets", "local_steps")  # and with them `exchange`, `copies` and `finish_whole`
COPIES = 2  # of every neuron, tried beside one: with more, a node has more of the network (benchmarks/finishing.py)
SPARE_LANES = 4  # nodes to one more lane under `rolling`, whose subnet is pulled while all others train
Prepare = Callable[[Job], Prepared]


def remembering(prepare: Prepare) -> Prepare:
    """Return a function that prepares no training settings of one job twice: the search for cuts takes seconds."""
    known: list[tuple[TrainingSettings, Prepared]] = []

    def prepared(job: Job) -> Prepared:
        for settings, before in known:
            if settings == job.training:
                return before
        known.append((job.training, prepare(job)))
        return known[-1][1]

    return prepared


def has_forecast(job: Job) -> bool:
    """Return whether a job can be forecast: very wide outputs and lockstep have rules of their own, phases differ."""
    training = job.training
    return training.loss != "sampled_softmax" and training.mode == "rounds" and not training.listed_phases


def can_choose_method(job: Job) -> bool:
    """Return whether a launch chooses the method, if the job leaves it open: copies and blocks are of subnets."""
    given, rolling = job.training.model_fields_set, job.preemption.policy == "rolling"
    return has_forecast(job) and "copies" not in given and job.model.split == "neurons" and not rolling


def leaves_open(job: Job) -> bool:
    """Return whether the job leaves a setting open that can be chosen."""
    return has_forecast(job) and not set(CHOSEN_SETTINGS) <= job.training.model_fields_set


@one_thread()
def choose_settings(
    job: Job,
    fleet: FleetFigures,
    report: Callable[[str], None] | None = None,
    prepare: Prepare = prepare_job,
) -> tuple[Job, AutotuneChoice]:
    """Return the job with every open setting filled in, and the choice with its reasons.

    Args:
        job: The job.
        fleet: Speeds of its nodes.
        report: Called with a line before a trial of what the methods teach, which takes seconds; without it there is
            no trial, and the forecast alone decides.
        prepare: Builds the network and opens the data of a job with other settings.

    Raises:
        JobError: The job's settings contradict each other in every way that it leaves open.
    """
    given = job.training.model_fields_set
    allowed = (job.training.local_steps,) if "local_steps" in given or not leaves_open(job) else forecast.TRIED_STEPS
    options = _options(job, fleet, prepare)
    choice = forecast.choose_option(options, fleet, allowed)
    if not leaves_open(job):
        return job, choice
    whole = [option for option in options if option.method == "local-sgd"]
    if choice.option.method != "local-sgd" and whole:
        last = _candidate(job, forecast.choose_option(whole, fleet, allowed), prepare)
        choices = [choice, *_in_copies(job, choice, fleet, prepare)]
        first = [_finishing(job, _candidate(job, each, prepare), options, fleet) for each in choices]
        choice, why = learning_trial.pick([*first, last], job.training.rounds, report)
        choice = replace(choice, why=(why, *choice.why))
    return _with_choice(job, choice), choice


def _in_copies(job: Job, choice: AutotuneChoice, fleet: FleetFigures, prepare: Prepare) -> Iterator[AutotuneChoice]:
    """Yield a choice of ist with every neuron in COPIES subnets, if the job leaves that open and nodes have room."""
    one = choice.option
    if "copies" in job.training.model_fields_set or one.subnets <= COPIES:
        return
    copied = prepare(_with_choice(job, replace(choice, option=replace(one, copies=COPIES))))
    if not copied.fallback and _fits(copied.program, fleet.memory_bytes):
        times = step_time.times_longer(copied, prepare(_with_choice(job, choice)))
        scaled = one.step_seconds * times  # as nodes were timed with every neuron in one subnet
        yield forecast.in_copies(choice, _option(copied.program, one.pull, one.push, scaled), fleet)


def _finishing(
    job: Job, candidate: learning_trial.Candidate, options: list[TrainingOption], fleet: FleetFigures
) -> learning_trial.Candidate:
    """Return a candidate of ist that trains whole networks in the end, if the job leaves that open and nodes can."""
    if job.training.exchange.loss or "finish_whole" in job.training.model_fields_set:
        return candidate
    return replace(candidate, choice=forecast.finished_whole(candidate.choice, options, fleet) or candidate.choice)


def _with_choice(job: Job, choice: AutotuneChoice) -> Job:
    """Return the job with a choice's settings wherever it leaves them open."""
    settings = forecast.training_settings(choice)
    settings["exchange"] = ExchangeSettings(**settings["exchange"])
    given = job.training.model_fields_set
    training = job.training.model_copy(update={k: v for k, v in settings.items() if k not in given})
    return job.model_copy(update={"training": training})


def _candidate(job: Job, choice: AutotuneChoice, prepare: Prepare) -> learning_trial.Candidate:
    """Return a choice with its network, to be tried."""
    return learning_trial.Candidate(choice, prepare(_with_choice(job, choice)))


def _options(job: Job, fleet: FleetFigures, prepare: Prepare) -> list[TrainingOption]:
    """Return every option that the job leaves open, the simplest and most exact first.

    Raises:
        JobError: None is possible.
    """
    possible = variants(job, fleet.nodes, fleet.memory_bytes, prepare)
    by_variant = [list(_by_wire(job, variant, fleet)) for variant in possible]
    # First all that exchange float32, then the encoded ones.
    longest = max(len(options) for options in by_variant)
    return [options[wire] for wire in range(longest) for options in by_variant if wire < len(options)]


class Variant(NamedTuple):
    """A method and number of subnets that the job allows, and whether a subnet fits a node's memory."""

    prepared: Prepared
    fits: bool

    @property
    def key(self) -> str:
        """See `forecast.option_key`."""
        training = self.prepared.program.training
        return forecast.option_key(training.method, training.subnets)


def variants(job: Job, nodes: int, memory_bytes: int, prepare: Prepare = prepare_job) -> list[Variant]:
    """Return the possible methods and numbers of subnets; whole networks only where they fit, or the job sets them.

    Raises:
        JobError: None is possible.
    """
    possible: list[Variant] = []
    faults: list[JobError] = []
    for training in _variants(job, nodes):
        try:
            prepared = prepare(job.model_copy(update={"training": training}))
        except JobError as fault:
            faults.append(fault)
            continue
        if prepared.fallback and "method" not in job.training.model_fields_set:
            faults.append(JobError(f"model: {prepared.fallback}"))
            continue
        fits = _fits(prepared.program, memory_bytes)
        if fits or training.method == "ist" or "method" in job.training.model_fields_set:
            possible.append(Variant(prepared, fits))
    if not possible:
        raise faults[0]
    return possible


def _fits(program: Program, memory_bytes: int) -> bool:
    """Return whether one of the program's subnets fits a node's memory."""
    share = program.training.phase(0).equal_shares[0] if program.layout.groups else 1.0
    return subnet_need(program)(share) <= memory_bytes


def _variants(job: Job, nodes: int) -> Iterator[TrainingSettings]:
    """Yield the job's training settings with each method and number of subnets that it leaves open."""
    training, given, free = job.training, job.training.model_fields_set, leaves_open(job)
    open_method = free and "method" not in given and can_choose_method(job)
    rolling = job.preemption.policy == "rolling"
    methods = ("local-sgd", "ist") if open_method else (training.method,)
    for method in methods:
        counts = (nodes,) if method == "local-sgd" else (nodes, 2 * nodes)
        counts = (nodes + math.ceil(nodes / SPARE_LANES),) if rolling else counts
        for subnets in counts if free and "subnets" not in given else (training.subnets,):
            yield training.model_copy(update={"method": method, "subnets": subnets})


def _by_wire(job: Job, variant: Variant, fleet: FleetFigures) -> Iterator[TrainingOption]:
    """Yield a variant's options: one for each encoding of pulls and pushes."""
    prepared, training = variant.prepared, variant.prepared.program.training
    subnet = step_time.typical(prepared.program)
    # A variant that does not fit a node was not timed there, so time it here.
    seconds = fleet.step_seconds.get(variant.key) or step_time.step_seconds(prepared, subnet, 0)
    free = leaves_open(job) and "exchange" not in training.model_fields_set and not prepared.program.output
    exchange = training.exchange
    for pull, push in forecast.WIRES if free else ((exchange.pull, exchange.push),):
        settings = ExchangeSettings.model_validate({"pull": pull, "push": push})
        program = replace(prepared.program, training=training.model_copy(update={"exchange": settings}))
        if free and variant.fits and not _fits(program, fleet.memory_bytes):  # encoding takes memory, too
            continue
        yield _option(program, pull, push, seconds)


def _option(program: Program, pull: str, push: str, step_seconds: float) -> TrainingOption:
    """Return a program's option with the bytes of its subnets."""
    training, subnet = program.training, step_time.typical(program)
    plain = 4 * program.buffer_size(subnet, persistent=True)
    down, up = (encoding.nbytes(program, subnet, direction) for direction in encoding.DIRECTIONS)
    return TrainingOption(training.method, training.subnets, pull, push, down, up, plain, step_seconds, training.copies)


def choice_lines(choice: AutotuneChoice) -> list[str]:
    """Return lines for people: the expected round, then the reasons for the choice."""
    finish = [f"  then {_round(choice.finish.expected)}"] if choice.finish else []
    return [_round(choice.expected), *finish, *(f"  {reason}" for reason in choice.why)]


def _round(expected: RoundForecast) -> str:
    parts = ", ".join(f"{getattr(expected, part):.3f} s {part}" for part in ROUND_PARTS)
    return f"expected {expected.round:.3f} s a round on this fleet: {parts}"
