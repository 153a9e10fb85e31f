"""The order in which a run reads its samples: shuffled, or as a DataLoader's sampler says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idletrain.errors import JobError, user_code
from idletrain.job import TrainingSettings
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.datasets import Loading, loading_of
from idletrain.nn.data.seeding import seeded
from idletrain.nn.data.streams import StreamPlace, StreamSource
from idletrain.nn.ist.randomness import key
from idletrain.nn.local_steps import BatchOrder, data_seed
from idletrain.phases import TrainingPhase, batch_number

Batches = list[NDArray[np.int64]]  # the sample numbers `[B]` of each batch of an epoch


class SamplerOrder(BatchOrder):
    """Choose each step's samples as a sampler does; the subnets take an epoch's batches in turn."""

    def __init__(self, seed: int, sampler: Any, batch_size: int, subnets: int) -> None:
        self._sampler, self._batch_size, self._seed, self._subnets = sampler, batch_size, seed, subnets
        self._first: Batches = []  # of the epochs, the batch numbers at which they begin are found one by one
        self._epoch, self._batches, self._begin = -1, self._first, 0

    def batch(self, subnet: int, step: int) -> NDArray[np.int64]:
        """Return the sample numbers `[B]` of a subnet's step; steps count from the start of the run."""
        number = step * self._subnets + subnet
        if number < self._begin:
            self._epoch, self._batches, self._begin = -1, self._first, 0
        while number >= self._begin + len(self._batches):
            self._begin += len(self._batches)
            self._epoch += 1
            self._batches = epoch_of(self._sampler, self._batch_size, self._seed, self._epoch)
        return self._batches[number - self._begin]


class PhasedOrder(BatchOrder):
    """Deal the batches of an order to the subnets of each phase in turn; a phase goes on where the one before ended.

    Args:
        whole: The order as one subnet would take it.
        phases: The phases.
    """

    def __init__(self, whole: BatchOrder, phases: Sequence[TrainingPhase]) -> None:
        self._whole, self._phases = whole, phases

    def batch(self, subnet: int, step: int) -> NDArray[np.int64]:
        """Return the sample numbers `[B]` of a subnet's step; steps count from the start of the run."""
        return self._whole.batch(0, batch_number(self._phases, subnet, step))


class StreamOrder(BatchOrder):
    """Read each subnet's part of a stream, batch by batch."""

    def __init__(self, training: TrainingSettings, position: str = "") -> None:
        self._training, self._position, self._phases = training, position, training.every_phase

    def going_on(self, position: str) -> StreamOrder:
        """Return the same order for whoever begins at a position (see `StreamSource.position`)."""
        return StreamOrder(self._training, position)

    def batch(self, subnet: int, step: int) -> Any:
        """Return the place in the stream of a subnet's step; steps count from the start of the run."""
        training = self._training
        subnets = next(phase for phase in reversed(self._phases) if phase.first_step <= step).subnets
        number = batch_number(self._phases, subnet, step) // subnets
        # Seeds of batches that are skipped are those of any phase: what a place holds depends on nothing else.
        seed_of = partial(_seed_of, training.seed, training.local_steps, subnet)
        return StreamPlace(subnet, subnets, number, training.batch_size, seed_of, self._position)


def _seed_of(seed: int, local_steps: int, subnet: int, step: int) -> int:
    return data_seed(seed, *divmod(step, local_steps), subnet)


def epoch_of(sampler: Any, batch_size: int, seed: int, epoch: int) -> Batches:
    """Return the batches of an epoch: those that the sampler yields, or the samples that it yields in batches.

    A last batch that is smaller than the others is left out, unless it is the only one.

    Raises:
        JobError: the sampler fails, or yields nothing.
    """
    name = type(sampler).__name__
    seed = key(seed, "order", epoch)
    with user_code(f"data: the DataLoader's {name} fails: "), seeded(seed):
        own = getattr(sampler, "generator", None)
        if own is not None:
            own.manual_seed(seed % 2**63)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        numbers = list(sampler)
        if not numbers:
            raise JobError(f"data: the DataLoader's {name} yields no samples")
        if isinstance(numbers[0], list | tuple):
            return [np.asarray(batch, dtype=np.int64) for batch in numbers]
        order = np.asarray([int(number) for number in numbers], dtype=np.int64)
    whole = len(order) // batch_size * batch_size
    return np.split(order[:whole], whole // batch_size) if whole else [order]


def batch_order(samples: Samples, training: TrainingSettings) -> BatchOrder:
    """Return the order of a run's samples."""
    if isinstance(samples, StreamSource):
        return StreamOrder(training)
    subnets = 1 if training.listed_phases else training.subnets
    sampler = loading_of(samples).sampler
    if sampler is None:
        order = BatchOrder(training.seed, len(samples), training.batch_size, subnets)
    else:
        order = SamplerOrder(training.seed, sampler, training.batch_size, subnets)
    return PhasedOrder(order, training.every_phase) if training.listed_phases else order


def unrepeatable(loading: Loading, training: TrainingSettings) -> str:
    """Return why a sampler's order cannot be kept, in one sentence, or nothing.

    Raises:
        JobError: the sampler fails, or yields nothing.
    """
    if loading.sampler is None:
        return ""
    first, again = (epoch_of(loading.sampler, training.batch_size, training.seed, 0) for _ in range(2))
    if len(first) == len(again) and all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
        return ""
    name = type(loading.sampler).__name__
    return (
        f"data: the DataLoader's {name} yields another order each time, though random, numpy and torch are seeded; "
        "samples are shuffled without it"
    )
