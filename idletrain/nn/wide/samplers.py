"""Draw the negative labels of a sampled softmax, with the probability of each.

A draw has labels that are certain to be in (retrieved ones) and labels drawn by chance, with their inclusion
probability; adding -log of it to a drawn label's logit makes the sampled sum of exponentials an unbiased estimate of
the full one (Horvitz-Thompson; Bengio & Senecal, 2008). Letters: B rows of a batch, H hidden, C labels, N draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn.wide.mips_index import HashTables, InvertedFile, MipsIndex

Ids = NDArray[np.int64]
Probability = Callable[[Ids], NDArray[np.float64]]
DEFAULT = {"name": "uniform"}
FALLBACK = 256  # uniform draws for a batch for which no label is retrieved


@dataclass(frozen=True)
class ActiveSet:
    """The labels that one batch computes beside its own.

    Attributes:
        certain: Labels included with certainty; repeats allowed.
        drawn: Labels drawn by chance; repeats allowed.
        probability: Gives the probability that a label is among the drawn ones.
        everything: Every label is included; the other fields are then unused.
        fell_back: No label was retrieved, so uniform draws replace them.
    """

    certain: Ids
    drawn: Ids
    probability: Probability
    everything: bool = False
    fell_back: bool = False


class Sampler(Protocol):
    """Draws negative labels with torch's default generator."""

    def nbytes(self, labels: int, hidden: int) -> int:
        """Return the bytes that its tables take for C = `labels` rows of H = `hidden`."""

    def max_active(self, rows: int, labels: int) -> int:
        """Return the most labels that a batch of so many rows draws."""

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Index the output rows as they are; `order_C` has the labels by falling frequency (None: as numbered)."""

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:
        """Draw labels for a batch of hidden vectors."""


def _zero(ids: Ids) -> NDArray[np.float64]:
    return np.zeros(len(ids))


NONE = np.empty(0, np.int64)


class All:
    """Takes every label: the dense softmax."""

    def nbytes(self, labels: int, hidden: int) -> int:  # noqa: ARG002
        return 0

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return labels

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Do nothing: this sampler has no tables."""

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:  # noqa: ARG002
        return ActiveSet(NONE, NONE, _zero, everything=True)


class Uniform:
    """Draws N labels uniformly."""

    def __init__(self, negatives: int = 1000) -> None:
        self._negatives = negatives

    def nbytes(self, labels: int, hidden: int) -> int:  # noqa: ARG002
        return 0

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return self._negatives

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Do nothing: this sampler has no tables."""

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:  # noqa: ARG002
        labels, negatives = len(rows_CH), self._negatives
        if negatives >= labels:
            return ActiveSet(NONE, NONE, _zero, everything=True)
        inclusion = -np.expm1(negatives * np.log1p(-1 / labels))
        drawn = torch.randint(labels, (negatives,)).numpy()
        return ActiveSet(NONE, drawn, lambda ids: np.full(len(ids), inclusion))


class LogUniform:
    """Draws N labels by Zipf's law: rank r, from 0, with probability log((r + 2) / (r + 1)) / log(C + 1)."""

    def __init__(self, negatives: int = 1000) -> None:
        self._negatives = negatives
        self._label_C: Ids | None = None
        self._rank_C: Ids | None = None

    def nbytes(self, labels: int, hidden: int) -> int:  # noqa: ARG002
        return 16 * labels

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return self._negatives

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:  # noqa: ARG002
        """Store the labels by rank, and each label's rank."""
        if order_C is not None:
            self._label_C, self._rank_C = order_C, np.empty_like(order_C)
            self._rank_C[order_C] = np.arange(len(order_C))

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:  # noqa: ARG002
        labels = len(rows_CH)
        uniform = torch.rand(self._negatives, dtype=torch.float64).numpy()
        ranks = np.minimum(np.exp(uniform * np.log(labels + 1)).astype(np.int64) - 1, labels - 1)

        def probability(ids: Ids) -> NDArray[np.float64]:
            rank = ids if self._rank_C is None else self._rank_C[ids]
            once = np.log1p(1 / (rank + 1)) / np.log(labels + 1)
            inclusion: NDArray[np.float64] = -np.expm1(self._negatives * np.log1p(-once))
            return inclusion

        return ActiveSet(NONE, ranks if self._label_C is None else self._label_C[ranks], probability)


class Retrieved:
    """Takes the labels whose rows an index retrieves for the batch's hidden vectors.

    Args:
        tables: The index.
        keep: Labels retrieved per row of the batch.
    """

    def __init__(self, tables: MipsIndex, keep: int = 2) -> None:
        self.tables, self._keep = tables, keep

    def nbytes(self, labels: int, hidden: int) -> int:
        return self.tables.nbytes(labels, hidden)

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return max(self._keep * rows, FALLBACK)

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:  # noqa: ARG002
        """Build the tables.

        Raises:
            ValueError: a row is not finite.
        """
        invalid = int((~torch.isfinite(rows_CH.sum(1))).sum())
        if invalid:
            raise ValueError(
                f"{invalid} of {len(rows_CH)} output rows hold NaN or infinity; lower the learning rate and start again"
            )
        self.tables.build(rows_CH, seed)

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:
        labels = self.tables.retrieve(hidden_BH, rows_CH, self._keep)
        if len(labels):
            return ActiveSet(labels, NONE, _zero)
        return replace(Uniform(FALLBACK).draw(hidden_BH, rows_CH), fell_back=True)


class Mixture:
    """Combines the draws of several samplers into one."""

    def __init__(self, parts: Sequence[Sampler]) -> None:
        nested = [part.parts if isinstance(part, Mixture) else (part,) for part in parts]
        self.parts: tuple[Sampler, ...] = tuple(part for inner in nested for part in inner)

    def nbytes(self, labels: int, hidden: int) -> int:
        return sum(part.nbytes(labels, hidden) for part in self.parts)

    def max_active(self, rows: int, labels: int) -> int:
        return sum(part.max_active(rows, labels) for part in self.parts)

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Build every part."""
        for part in self.parts:
            part.build(rows_CH, order_C, seed)

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:
        draws = [part.draw(hidden_BH, rows_CH) for part in self.parts]

        def probability(ids: Ids) -> NDArray[np.float64]:
            excluded = np.ones(len(ids))
            for draw in draws:
                excluded *= 1 - draw.probability(ids)
            return 1 - excluded

        return ActiveSet(
            np.concatenate([draw.certain for draw in draws]),
            np.concatenate([draw.drawn for draw in draws]),
            probability,
            everything=any(draw.everything for draw in draws),
            fell_back=any(draw.fell_back for draw in draws),
        )


def _retrieving(
    tables: Callable[..., MipsIndex], defaults: Mapping[str, int | None], default_keep: int, default_negatives: int
) -> Callable[..., Sampler]:
    """Return a factory of retrieving samplers, mixed with uniform draws unless `negatives` is 0."""

    def make(keep: int = default_keep, negatives: int = default_negatives, **settings: int) -> Sampler:
        if unknown := settings.keys() - defaults.keys():
            raise TypeError(f"unknown: {', '.join(sorted(unknown))}")
        retrieved = Retrieved(tables(**{**defaults, **settings}), keep)
        return Mixture([retrieved, Uniform(negatives)]) if negatives else retrieved

    return make


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "all": All,
    "uniform": Uniform,
    "log-uniform": LogUniform,
    # SLIDE's SimHash for Delicious-200K, K = 9 and L = 50; DWTA with K = 4 codes of 3 bits, as many as the released
    # code's K = 6 of 2 bits.
    "simhash": _retrieving(lambda **a: HashTables("simhash", **a), {"k": 9, "tables": 50, "bucket": 128}, 2, 256),
    "dwta": _retrieving(lambda **a: HashTables("dwta", **a), {"k": 4, "tables": 50, "bucket": 128}, 2, 256),
    # Its labels are good enough that fewer are needed, which allows more steps in the same time (bench wide_labels).
    "inverted-file": _retrieving(InvertedFile, {"lists": None, "probes": 1}, 1, 64),
}


def sampler_of(spec: str | Mapping[str, Any]) -> Sampler:
    """Make the sampler of a job's setting: a name, `{name: ..., ...}`, or `{name: mixture, of: [...]}` for several.

    `auto`, given as a plain name, is uniform until a trial (`idletrain.autotune.sampler_trial`) has chosen one.

    Raises:
        JobError: there is no such sampler, or it does not take these arguments.
    """
    settings = {"name": DEFAULT["name"] if spec == "auto" else spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if name == "mixture":
        parts = settings.pop("of", None)
        if not isinstance(parts, list | tuple) or not parts or "auto" in parts or settings:
            raise JobError("sampler: a mixture should be {name: mixture, of: [...]}, with samplers and nothing else")
        return Mixture([sampler_of(part) for part in parts])
    if name not in SAMPLERS:
        raise JobError(f"sampler: {name!r} should be one of {', '.join(SAMPLERS)}, mixture or, as a word alone, auto")
    wrong = [
        f"{key}: {value!r}"
        for key, value in settings.items()
        if not isinstance(value, int) or value < (0 if key == "negatives" else 1)
    ]
    if wrong:
        raise JobError(f"sampler: {name}: {', '.join(wrong)} should be whole numbers from 1 on (negatives from 0)")
    try:
        return SAMPLERS[name](**settings)
    except TypeError as error:
        raise JobError(f"sampler: {name} does not take {settings} ({error})") from None


def retrieves(sampler: Sampler) -> bool:
    """Tell whether a sampler keeps tables of the output rows, which must be rebuilt as these change."""
    parts = sampler.parts if isinstance(sampler, Mixture) else (sampler,)
    return any(isinstance(part, Retrieved) for part in parts)
