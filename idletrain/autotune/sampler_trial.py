"""`sampler: auto`: try the samplers on the job's own network and data for equal times, and keep the best.

Uniform negatives with the correction stay unless another sampler is better beyond chance on rows held out: on most data
sets nothing is (many labels with one or two rows), on confusable labels retrieval is, by much.
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
SamplerWords = str | Mapping[str, Any]
TRIAL_SECONDS = 60.0
SAMPLER_CANDIDATES: tuple[SamplerWords, ...] = ("uniform", "log-uniform", "simhash", "dwta", "inverted-file")
HELD_OUT = 4000  # rows: standard error 0.5 points at a P@1 of 10 %
HELD_OUT_PART = 5  # of a small set a fifth
SIGNIFICANT_ERRORS = 2.0  # standard errors of the difference, row by row


@dataclass(frozen=True)
class SamplerTrial:
    """What a sampler reached in its time.

    Attributes:
        right: Which of the held-out rows have a right first label.
    """

    sampler: SamplerWords
    steps: int
    hits: NDArray[np.bool_]

    @property
    def precision(self) -> float:
        """P@1."""
        return float(self.hits.mean())


def choose_sampler(
    model: ModelSettings,
    data: DataSettings,
    training: TrainingSettings,
    *,
    seconds: float | None = None,
    candidates: Sequence[SamplerWords] | None = None,
) -> tuple[SamplerWords, list[SamplerTrial]]:
    """Try samplers, the first of which stays unless another is better.

    Args:
        model: The job's; its args' `sampler` is what is chosen.
        data: The job's.
        training: The job's; each sampler is tried with its optimizer and batch size, on the whole network.
        seconds: Of training, for all of them together; a minute if None.
        candidates: What to try; CANDIDATES if None.

    Raises:
        JobError: the job does not fit together.
    """
    trials: list[SamplerTrial] = []
    candidates = SAMPLER_CANDIDATES if candidates is None else candidates
    for sampler in candidates:
        asked = model.model_copy(update={"args": {**model.args, "sampler": sampler}})
        try:
            prepared = from_settings(asked, data, training)
            trials.append(_try(prepared, sampler, (seconds or TRIAL_SECONDS) / len(candidates)))
        except (JobError, ValueError) as error:  # its tables would not fit, or rows are not finite any more
            if not trials:
                raise
            logger.info("sampler %s: %s", sampler, error)
            continue
        logger.info("sampler %s: P@1 %.4f after %d steps", sampler, trials[-1].precision, trials[-1].steps)
    return best_trial(trials).sampler, trials


def best_trial(trials: Sequence[SamplerTrial]) -> SamplerTrial:
    """The trial with the highest P@1 of those that beat the first beyond chance; else the first."""
    return max((t for t in trials if t is trials[0] or _beats(t.hits, trials[0].hits)), key=lambda t: t.precision)


def _beats(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> bool:
    differs = ours.astype(np.float64) - theirs
    return bool(differs.mean() > SIGNIFICANT_ERRORS * differs.std() / len(differs) ** 0.5)


def _try(prepared: Prepared, sampler: SamplerWords, seconds: float) -> SamplerTrial:
    """Train the whole network for a time, rebuilding tables every round, and score rows that it has not seen."""
    program = replace(prepared.program, layout=groups.whole(prepared.program.module))
    training, samples = program.training, program.source.open()
    if not isinstance(samples, SparseSamples):
        raise JobError("sampler: auto tries samplers on sparse rows; name one of them for arrays")
    if len(samples) < HELD_OUT_PART:
        raise JobError(f"sampler: auto needs {HELD_OUT_PART} rows or more; name a sampler")
    order = generator(training.seed, "trial").permutation(len(samples))
    count = min(HELD_OUT, len(samples) // HELD_OUT_PART)
    held, seen = np.sort(order[:count]), only(samples, np.sort(order[count:]))
    module: Any = prepared.module
    if hasattr(module, "start_from"):  # of these rows alone: a label's row may be that of its one text
        module.start_from(seen)
    subnet = subnet_of_share(program, 1.0)
    pulled = Network.of(program, prepared.network).pull(subnet)
    flat = torch.zeros(program.buffer_size(subnet, persistent=False))
    flat[: len(pulled)] = pulled
    work = LocalSteps(program, subnet, flat, 0, 0)
    batches = BatchOrder(training.seed, len(seen), training.batch_size, 1)

    def rebuild(round_: int) -> None:
        label_shards.open_output(program, work.module, subnet, seen, flat, label_shards.ShardPlace(round_, 0))

    rebuild(0)
    work.step(seen, batches, 0)  # which may compile, and does not count
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        if steps % training.local_steps == 0:
            rebuild(steps // training.local_steps)
        steps += 1
        work.step(seen, batches, steps)
    network = assembled(prepared.module, [p.detach() for p in work.module.parameters()]).eval()
    return SamplerTrial(sampler, steps, _right(network, samples, held))


def _right(network: Any, samples: SparseSamples, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows' best label is one of theirs."""
    found = []
    for part in np.array_split(rows, -(-len(rows) // 256)):
        x, _ = samples.batch(part)
        top = network(x).topk(1)[1].numpy()
        found.append(hits(top, samples.y.only(part))[:, 0])
    result: NDArray[np.bool_] = np.concatenate(found)
    return result
