"""Choose the sampler of `sampler: auto`: train the job's network on its data with each for equal times.

Successive halving (arXiv 1502.07943): all have half of the time, the best of them the other half, from the start again.
What is best on held-out rows is taken, however small its lead: where two are alike, it does not matter which. The last
two are scored on more rows, so that chance seldom decides between two that are not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from idletrain.errors import JobError
from idletrain.job import DataSettings, ModelSettings, TrainingSettings
from idletrain.nn.data.extreme import SparseSamples, only
from idletrain.nn.evaluate import assembled
from idletrain.nn.ist import groups
from idletrain.nn.ist.randomness import generator
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.memory import subnet_of_share
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.nn.wide import label_shards
from idletrain.nn.wide.ranking import hits

logger = logging.getLogger(__name__)
SamplerSetting = str | Mapping[str, Any]
TRIAL_SECONDS, PART_OF_RUN = 120.0, 0.05  # of all trials together, whichever is less: in time, and in steps of the run
FINALISTS = 2
SAMPLER_CANDIDATES: tuple[SamplerSetting, ...] = ("uniform", "log-uniform", "simhash", "dwta", "inverted-file")
HELD_OUT = 10_000  # rows: between finalists with a P@1 of 4 %, a standard error of about 0.2 points
SCORED_FIRST = 4000  # of them, in the first trials: to score all takes as long as such a trial where labels are many
SCORING_PRODUCTS = 2e12  # of a trial at most: a core ranks for a minute what takes so many multiplications
LEAST_SCORED = 1000
HELD_OUT_PART = 5  # of a small data set a fifth is held out


@dataclass(frozen=True)
class SamplerTrial:
    """A sampler's result.

    Attributes:
        sampler: The job's `sampler` setting.
        steps: Steps trained in the time.
        seconds: The time.
        hits: For each held-out row, whether its top-ranked label is one of its labels.
    """

    sampler: SamplerSetting
    steps: int
    seconds: float
    hits: NDArray[np.bool_]

    @property
    def precision(self) -> float:
        """Precision at 1 on the held-out rows."""
        return float(self.hits.mean())


def choose_sampler(
    model: ModelSettings,
    data: DataSettings,
    training: TrainingSettings,
    *,
    seconds: float | None = None,
    candidates: Sequence[SamplerSetting] | None = None,
) -> tuple[SamplerSetting, list[SamplerTrial]]:
    """Try samplers and choose the one that is best on held-out rows.

    Args:
        model: The job's model settings; the choice is for `sampler` in its `args`.
        data: The job's data settings.
        training: The job's training settings; each sampler is tried with its optimizer and batch size, on the whole
            network.
        seconds: Training time of all samplers together, without what scoring takes; if None, two minutes, or a
            twentieth of the run's steps where those take less.
        candidates: Samplers to try; `SAMPLER_CANDIDATES` if None.

    Returns:
        The chosen sampler, and the last trial of each.

    Raises:
        JobError: The job's settings contradict each other.
    """
    candidates = SAMPLER_CANDIDATES if candidates is None else candidates
    most_steps = math.inf if seconds else PART_OF_RUN * training.steps
    seconds = seconds or TRIAL_SECONDS

    def trial(scored: int, sampler: SamplerSetting, seconds: float, most_steps: float) -> SamplerTrial:
        settings = model.model_copy(update={"args": {**model.args, "sampler": sampler}})
        return _try(from_settings(settings, data, training), sampler, seconds, most_steps, scored)

    stages = 2 if len(candidates) > FINALISTS else 1
    scored = SCORED_FIRST if stages > 1 else HELD_OUT
    trials = _equally_long(partial(trial, scored), candidates, seconds / stages, most_steps / stages)
    if stages == 1:
        return best(trials, 1)[0].sampler, trials
    finalists = [one.sampler for one in best(trials, FINALISTS)]
    finals = _equally_long(partial(trial, HELD_OUT), finalists, seconds / stages, most_steps / stages)
    others = [one for one in trials if one.sampler not in finalists]
    return best(finals, 1)[0].sampler, [*finals, *others]


def best(trials: Sequence[SamplerTrial], count: int) -> list[SamplerTrial]:
    """Return the trials with the highest P@1, the best first; of equal ones the first."""
    return sorted(trials, key=lambda one: -one.precision)[:count]


def _equally_long(
    trial: Callable[[SamplerSetting, float, float], SamplerTrial],
    samplers: Sequence[SamplerSetting],
    seconds: float,
    most_steps: float,
) -> list[SamplerTrial]:
    """Try samplers for a part of some seconds each, or as long as the first takes for its part of some steps."""
    trials: list[SamplerTrial] = []
    each, steps = seconds / len(samplers), max(1.0, most_steps / len(samplers))
    for sampler in samplers:
        try:
            trials.append(trial(sampler, each, steps))
        except (JobError, ValueError) as error:  # its index would not fit, or rows are no longer finite
            if not trials:
                raise
            logger.info("sampler %s: %s", sampler, error)
            continue
        each, steps = trials[0].seconds, math.inf
        logger.info("sampler %s: P@1 %.4f after %d steps", sampler, trials[-1].precision, trials[-1].steps)
    return trials


def _try(prepared: Prepared, sampler: SamplerSetting, seconds: float, most_steps: float, scored: int) -> SamplerTrial:
    """Train the whole network for some seconds or steps, rebuilding its index every round, and score held-out rows.

    Of these at most `scored` are ranked, fewer where labels are so many that it would take minutes.
    """
    program = replace(prepared.program, layout=groups.whole(prepared.program.module))
    training, samples = program.training, program.source.open()
    if not isinstance(samples, SparseSamples):
        raise JobError("sampler: auto tries samplers on sparse rows; name one of them for arrays")
    if len(samples) < HELD_OUT_PART:
        raise JobError(f"sampler: auto needs {HELD_OUT_PART} rows or more; name a sampler")
    order = generator(training.seed, "trial").permutation(len(samples))
    count = min(HELD_OUT, len(samples) // HELD_OUT_PART)
    training_rows = only(samples, np.sort(order[count:]))
    module: Any = prepared.module
    if hasattr(module, "start_from"):  # without the held-out rows: a label's row may start as that of its only text
        module.start_from(training_rows)
    subnet = subnet_of_share(program, 1.0)
    pulled = Network.of(program, prepared.network).pull(subnet)
    flat = torch.zeros(program.buffer_size(subnet, persistent=False))
    flat[: len(pulled)] = pulled
    work = LocalSteps(program, subnet, flat, 0, 0)
    batches = BatchOrder(training.seed, len(training_rows), training.batch_size, 1)

    def rebuild(round_: int) -> None:
        label_shards.open_output(program, work.module, subnet, training_rows, flat, label_shards.ShardPlace(round_, 0))

    rebuild(0)
    work.step(training_rows, batches, 0)  # not counted, as it may compile
    started, steps, passed = time.perf_counter(), 0, 0.0
    while passed < seconds and steps < most_steps:
        if steps % training.local_steps == 0:
            rebuild(steps // training.local_steps)
        steps += 1
        work.step(training_rows, batches, steps)
        passed = time.perf_counter() - started
    network = assembled(prepared.module, [p.detach() for p in work.module.parameters() if p.requires_grad]).eval()
    ranked = min(count, scored_rows(scored, module.get_submodule(program.output).weight.numel()))
    return SamplerTrial(sampler, steps, passed, _hits(network, samples, np.sort(order[:ranked])))


def scored_rows(wanted: int, products: int) -> int:
    """Return how many rows a trial ranks, if a row takes so many multiplications."""
    return min(wanted, max(LEAST_SCORED, int(SCORING_PRODUCTS // products)))


def _hits(network: Any, samples: SparseSamples, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each row whether its top-ranked label is one of its labels."""
    parts = []
    for part in np.array_split(rows, -(-len(rows) // 256)):
        x, _ = samples.batch(part)
        top = network(x).topk(1)[1].numpy()
        parts.append(hits(top, samples.y.only(part))[:, 0])
    result: NDArray[np.bool_] = np.concatenate(parts)
    return result
