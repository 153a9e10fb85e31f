"""Generated data with a structure that can be learned, in the forms that the modules take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.datasets import MapStyleSource

CLASSES = 4
VOCABULARY = 64
Array = NDArray[Any]
Make = Callable[[np.random.Generator, int], Any]  # (random, samples) -> (inputs, labels), or arrays by name


@dataclass(frozen=True)
class Generated:
    """One part of a generated data set.

    Attributes:
        make: Makes the samples of all parts.
        samples: In this part.
        skipped: Samples of the parts before it.
    """

    make: Make
    samples: int
    skipped: int = 0

    def open(self) -> ArraySource | MapStyleSource:
        """Generate the samples, the same ones every time."""
        made = self.make(np.random.Generator(np.random.Philox(1)), self.skipped + self.samples)
        rows = range(self.skipped, self.skipped + self.samples)
        if isinstance(made, dict):
            return MapStyleSource([{name: array[i] for name, array in made.items()} for i in rows])
        if isinstance(made[0], tuple):
            return MapStyleSource([(*(part[i] for part in made[0]), made[1][i]) for i in rows])
        return ArraySource(made[0][self.skipped :], made[1][self.skipped :])


def patterns(*shape: int, classes: int = CLASSES) -> Make:
    """Make images, sound or series `[N, *shape]`: a smooth pattern for each class, and noise."""

    def make(random: np.random.Generator, samples: int) -> tuple[Array, Array]:
        clean, y = _smooth(random, (classes, *shape)), random.integers(classes, size=samples)
        return clean[y] + _noise(random, (samples, *shape), 1.5), y

    return make


def masks(*shape: int, channels: int = 1) -> Make:
    """Make noisy images `[N, C, ...]` and masks `[N, channels, ...]` of where smooth patterns are above zero."""

    def make(random: np.random.Generator, samples: int) -> tuple[Array, Array]:
        clean = _smooth(random, (samples, *shape))
        return clean + _noise(random, clean.shape, 0.5), (clean[:, :channels] > 0).astype(np.float32)

    return make


def denoised(*shape: int) -> Make:
    """Make noisy images or series `[N, *shape]`, and the same without noise."""

    def make(random: np.random.Generator, samples: int) -> tuple[Array, Array]:
        clean = _smooth(random, (samples, *shape))
        return clean + _noise(random, clean.shape, 0.5), clean

    return make


def noisy_at_times(*shape: int, steps: int) -> Make:
    """Make noisy images `[N, *shape]` with the time `[N]` that says how noisy they are, and the noise."""

    def make(random: np.random.Generator, samples: int) -> tuple[tuple[Array, Array], Array]:
        clean, times = _smooth(random, (samples, *shape)), random.integers(steps, size=samples)
        noise = _noise(random, clean.shape, 1.0)
        part = (times / steps).reshape(-1, *([1] * len(shape))).astype(np.float32)
        return (clean * (1 - part) + noise * part, times), noise

    return make


def table(features: int, classes: int = CLASSES) -> Make:
    """Make rows `[N, features]` and the class that a random network of two layers gives each."""

    def make(random: np.random.Generator, samples: int) -> tuple[Array, Array]:
        x = _noise(random, (samples, features), 1.0)
        return x, _scores(random, x, classes).argmax(1)

    return make


def values(features: int, *, column: bool = True) -> Make:
    """Make rows `[N, features]` and the value `[N, 1]` or `[N]` that a random network of two layers gives each."""

    def make(random: np.random.Generator, samples: int) -> tuple[Array, Array]:
        x = _noise(random, (samples, features), 1.0)
        y = _scores(random, x, 1).astype(np.float32)
        return x, y if column else y[:, 0]

    return make


def mixed_table(fields: int, numbers: int, categories: int, *, numbers_first: bool = False) -> Make:
    """Make rows of categories `[N, fields]`, numbers `[N, numbers]` (or these first), and yes or no `[N, 1]`."""

    def make(random: np.random.Generator, samples: int) -> tuple[tuple[Array, Array], Array]:
        of_field, x = random.integers(categories, size=(samples, fields)), _noise(random, (samples, numbers), 1.0)
        meaning = random.standard_normal((fields, categories))
        known = np.concatenate([meaning[np.arange(fields), of_field], x], axis=1)
        scores = _scores(random, known, 2)
        yes = (scores[:, :1] > scores[:, 1:]).astype(np.float32)
        return (x, of_field) if numbers_first else (of_field, x), yes

    return make


def fields(count: int, categories: int) -> Make:
    """Make rows of categories `[N, count]`, and a yes or no `[N]`, as click logs have."""

    def make(random: np.random.Generator, samples: int) -> tuple[Array, Array]:
        x, meaning = random.integers(categories, size=(samples, count)), random.standard_normal((count, categories))
        scores = _scores(random, meaning[np.arange(count), x], 2)
        return x, (scores[:, 0] > scores[:, 1]).astype(np.float32)

    return make


def words(length: int, *, by_name: bool = False, classes: int = CLASSES) -> Make:
    """Make texts `[N, length]` whose words tell their class; by name as Hugging Face's models take them."""

    def make(random: np.random.Generator, samples: int) -> Any:
        y = random.integers(classes, size=samples)
        likely = random.dirichlet(np.full(VOCABULARY - 2, 0.3), size=classes)
        x = np.stack([random.choice(VOCABULARY - 2, size=length, p=likely[label]) + 2 for label in y])
        if not by_name:
            return x, y
        lengths = random.integers(length // 2, length + 1, size=samples)
        mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
        return {"input_ids": np.where(mask, x, 1), "attention_mask": mask, "labels": y}

    return make


def next_words(length: int, *, by_name: bool = False) -> Make:
    """Make texts `[N, length]` of a chain of words, and the words that follow; by name, the text is its own label."""

    def make(random: np.random.Generator, samples: int) -> Any:
        following = random.dirichlet(np.full(VOCABULARY, 0.05), size=VOCABULARY).cumsum(1)
        text = np.zeros((samples, length + 1), dtype=np.int64)
        text[:, 0] = random.integers(VOCABULARY, size=samples)
        for at in range(length):
            text[:, at + 1] = (random.random((samples, 1)) > following[text[:, at]]).sum(1).clip(max=VOCABULARY - 1)
        if by_name:
            return {"input_ids": text[:, :length], "labels": text[:, :length]}
        return text[:, :-1], text[:, 1:]

    return make


def images_by_name(name: str, *shape: int) -> Make:
    """Make `patterns` by name, as Hugging Face's models take images and sound."""
    make_pair = patterns(*shape)

    def make(random: np.random.Generator, samples: int) -> dict[str, Array]:
        x, y = make_pair(random, samples)
        return {name: x, "labels": y}

    return make


def _smooth(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return smooth random patterns of about unit size along all dimensions but the first two: sums of four waves."""
    result = np.zeros(shape)
    grids = np.meshgrid(*(np.arange(length) / length for length in shape[2:]), indexing="ij") or [np.zeros(())]
    at = (slice(None), slice(None), *(None for _ in shape[2:]))
    for _ in range(4):
        frequency = random.integers(1, 4, size=(len(grids), *shape[:2]))
        phase = random.uniform(0, 2 * np.pi, size=shape[:2])[at]
        result += np.sin(2 * np.pi * sum(f[at] * grid for f, grid in zip(frequency, grids, strict=True)) + phase)
    return (result / 2**0.5).astype(np.float32)


def _noise(random: np.random.Generator, shape: tuple[int, ...], size: float) -> Array:
    return (size * random.standard_normal(shape)).astype(np.float32)


def _scores(random: np.random.Generator, x: Array, outputs: int) -> Array:
    hidden = np.tanh(x @ random.standard_normal((x.shape[1], 16)) * 2 / x.shape[1] ** 0.5)
    scores: Array = hidden @ random.standard_normal((16, outputs)) / 4
    return scores
