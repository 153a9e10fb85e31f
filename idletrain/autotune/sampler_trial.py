"""Choose the sampler of `sampler: auto`: train the job's network on its data with each for equal times.

Uniform negatives with the correction stay unless another sampler is significantly better on held-out rows. On most data
sets none is (many labels with one or two rows); on confusable labels, retrieval is much better.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
TRIAL_SECONDS = 60.0
SAMPLER_CANDIDATES: tuple[SamplerSetting, ...] = ("uniform", "log-uniform", "simhash", "dwta", "inverted-file")
HELD_OUT = 4000  # rows: a standard error of 0.5 percentage points at a P@1 of 10 %
HELD_OUT_PART = 5  # of a small data set a fifth is held out
SIGNIFICANT_ERRORS = 2.0  # standard errors of the difference row by row, beyond which it is significant


@dataclass(frozen=True)
class SamplerTrial:
    """A sampler's result.

    Attributes:
        sampler: The job's `sampler` setting.
        steps: Steps trained in the time.
        hits: For each held-out row, whether its top-ranked label is one of its labels.
    """

    sampler: SamplerSetting
    steps: int
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
    """Try samplers and choose the first one unless another is significantly better.

    Args:
        model: The job's model settings; the choice is for `sampler` in its `args`.
        data: The job's data settings.
        training: The job's training settings; each sampler is tried with its optimizer and batch size, on the whole
            network.
        seconds: Training time of all samplers together; a minute if None.
        candidates: Samplers to try; `SAMPLER_CANDIDATES` if None.

    Returns:
        The chosen sampler, and every trial.

    Raises:
        JobError: The job's settings contradict each other.
    """
    trials: list[SamplerTrial] = []
    candidates = SAMPLER_CANDIDATES if candidates is None else candidates
    for sampler in candidates:
        settings = model.model_copy(update={"args": {**model.args, "sampler": sampler}})
        try:
            prepared = from_settings(settings, data, training)
            trials.append(_try(prepared, sampler, (seconds or TRIAL_SECONDS) / len(candidates)))
        except (JobError, ValueError) as error:  # its index would not fit, or rows are no longer finite
            if not trials:
                raise
            logger.info("sampler %s: %s", sampler, error)
            continue
        logger.info("sampler %s: P@1 %.4f after %d steps", sampler, trials[-1].precision, trials[-1].steps)
    return best_trial(trials).sampler, trials


def best_trial(trials: Sequence[SamplerTrial]) -> SamplerTrial:
    """Return the trial with the highest P@1 among those significantly better than the first; else the first."""
    return max((t for t in trials if t is trials[0] or _beats(t.hits, trials[0].hits)), key=lambda t: t.precision)


def _beats(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> bool:
    differs = ours.astype(np.float64) - theirs
    return bool(differs.mean() > SIGNIFICANT_ERRORS * differs.std() / len(differs) ** 0.5)


def _try(prepared: Prepared, sampler: SamplerSetting, seconds: float) -> SamplerTrial:
    """Train the whole network for `seconds`, rebuilding its index every round, and score held-out rows."""
    program = replace(prepared.program, layout=groups.whole(prepared.program.module))
    training, samples = program.training, program.source.open()
    if not isinstance(samples, SparseSamples):
        raise JobError("sampler: auto tries samplers on sparse rows; name one of them for arrays")
    if len(samples) < HELD_OUT_PART:
        raise JobError(f"sampler: auto needs {HELD_OUT_PART} rows or more; name a sampler")
    order = generator(training.seed, "trial").permutation(len(samples))
    count = min(HELD_OUT, len(samples) // HELD_OUT_PART)
    held_out, training_rows = np.sort(order[:count]), only(samples, np.sort(order[count:]))
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
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        if steps % training.local_steps == 0:
            rebuild(steps // training.local_steps)
        steps += 1
        work.step(training_rows, batches, steps)
    network = assembled(prepared.module, [p.detach() for p in work.module.parameters() if p.requires_grad]).eval()
    return SamplerTrial(sampler, steps, _hits(network, samples, held_out))


def _hits(network: Any, samples: SparseSamples, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each row whether its top-ranked label is one of its labels."""
    parts = []
    for part in np.array_split(rows, -(-len(rows) // 256)):
        x, _ = samples.batch(part)
        top = network(x).topk(1)[1].numpy()
        parts.append(hits(top, samples.y.only(part))[:, 0])
    result: NDArray[np.bool_] = np.concatenate(parts)
    return result
