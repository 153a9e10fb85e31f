"""Say what is odd about data that can be trained on, for a note before the start."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from idletrain.errors import user_code
from idletrain.nn.checks import READ_SEED
from idletrain.nn.constant import SQUARED
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import labels_of
from idletrain.nn.data.seeding import seeded
from idletrain.nn.data.streams import known_length
from idletrain.nn.program import Loss

LOOKED_AT, FEWEST_TARGETS = 64, 16
FAR = 20.0  # from unit scale: a network's first outputs are about 1, and a step moves them by about its rate


def data_notes(samples: Samples, loss: Loss, batch_size: int) -> list[str]:
    """Return a sentence for each thing that is odd.

    Args:
        samples: The training data.
        loss: What they are trained by.
        batch_size: How many samples a step takes.

    Raises:
        JobError: the data's own code fails.
    """
    length = known_length(samples)
    if length is None:
        return []
    notes = []
    if batch_size > length:
        several = f"is more than the {length} samples, so that a step has some of them again"
        notes.append(f"training.batch_size: {batch_size} {several}")
    if loss in SQUARED and (scale := _far_scale(samples, min(length, LOOKED_AT))):
        notes.append(f"data.train: targets have {scale}; networks learn sooner from targets scaled to about 0 and 1")
    return notes


def _far_scale(samples: Samples, looked_at: int) -> str:
    """Return the scale of the first targets if it is far from 1, else ""."""
    with user_code("data.train: its samples cannot be read (", "); mend the data"), seeded(READ_SEED):
        labels = labels_of(samples.batch(np.arange(looked_at))[1])
    if not isinstance(labels, Tensor) or len(labels) < FEWEST_TARGETS:
        return ""
    mean, spread = float(labels.double().mean()), float(labels.double().std())
    if max(abs(mean), spread) <= FAR and spread >= 1 / FAR:
        return ""
    return f"a mean of {mean:.3g} and a standard deviation of {spread:.3g}"
