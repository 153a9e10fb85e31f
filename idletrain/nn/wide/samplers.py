"""Which labels beside a batch's own does a sampled softmax look at, and with what weight?

A draw says which labels are in for certain (retrieved ones) and how likely each other label was to be drawn; adding
-log of that to a drawn label's logit makes the sampled sum of exponentials an unbiased estimate of the full one
(Horvitz-Thompson; Bengio & Senecal, 2008). Letters: B rows of a batch, H hidden, C labels, N draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
FALLBACK = 256  # uniform draws in the place of a retrieval that finds nothing


@dataclass(frozen=True)
class ActiveSet:
    """Labels for one batch.

    Attributes:
        certain: Labels that are in whatever was drawn; repeats allowed.
        drawn: Labels that were drawn by chance; repeats allowed.
        probability: How likely a label was to be among the drawn ones.
        everything: Every label is in; the rest says nothing.
        fell_back: Retrieval found nothing, and uniform draws stand in.
    """

    certain: Ids
    drawn: Ids
    probability: Probability
    everything: bool = False
    fell_back: bool = False


class Sampler(Protocol):
    """Draws labels; numbers come from torch's default generator."""

    def nbytes(self, labels: int, hidden: int) -> int:
        """Memory of its tables."""

    def max_active(self, rows: int, labels: int) -> int:
        """The most labels that a batch of so many rows draws."""

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Take in the output rows as they are, and the labels by falling frequency (None: as numbered)."""

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:
        """Labels for a batch of hidden vectors."""


def _nothing(ids: Ids) -> NDArray[np.float64]:
    return np.zeros(len(ids))


NONE = np.empty(0, np.int64)


class All:
    """Every label: the dense softmax."""

    def nbytes(self, labels: int, hidden: int) -> int:  # noqa: ARG002
        return 0

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return labels

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Nothing to build."""

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:  # noqa: ARG002
        return ActiveSet(NONE, NONE, _nothing, everything=True)


class Uniform:
    """N labels, each as likely."""

    def __init__(self, negatives: int = 1000) -> None:
        self._negatives = negatives

    def nbytes(self, labels: int, hidden: int) -> int:  # noqa: ARG002
        return 0

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return self._negatives

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:
        """Nothing to build."""

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:  # noqa: ARG002
        labels, negatives = len(rows_CH), self._negatives
        if negatives >= labels:
            return ActiveSet(NONE, NONE, _nothing, everything=True)
        inclusion = -np.expm1(negatives * np.log1p(-1 / labels))
        drawn = torch.randint(labels, (negatives,)).numpy()
        return ActiveSet(NONE, drawn, lambda ids: np.full(len(ids), inclusion))


class LogUniform:
    """N labels, the r-th most frequent with probability log((r + 2) / (r + 1)) / log(C + 1) (Zipf's law)."""

    def __init__(self, negatives: int = 1000) -> None:
        self._negatives = negatives
        self._label_C: Ids | None = None
        self._rank_C: Ids | None = None

    def nbytes(self, labels: int, hidden: int) -> int:  # noqa: ARG002
        return 16 * labels

    def max_active(self, rows: int, labels: int) -> int:  # noqa: ARG002
        return self._negatives

    def build(self, rows_CH: Tensor, order_C: Ids | None, seed: int) -> None:  # noqa: ARG002
        """Note which label has which rank."""
        if order_C is not None:
            self._label_C, self._rank_C = order_C, np.empty_like(order_C)
            self._rank_C[order_C] = np.arange(len(order_C))

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:  # noqa: ARG002
        labels = len(rows_CH)
        places = torch.rand(self._negatives, dtype=torch.float64).numpy()
        ranks = np.minimum(np.exp(places * np.log(labels + 1)).astype(np.int64) - 1, labels - 1)

        def probability(ids: Ids) -> NDArray[np.float64]:
            rank = ids if self._rank_C is None else self._rank_C[ids]
            once = np.log1p(1 / (rank + 1)) / np.log(labels + 1)
            inclusion: NDArray[np.float64] = -np.expm1(self._negatives * np.log1p(-once))
            return inclusion

        return ActiveSet(NONE, ranks if self._label_C is None else self._label_C[ranks], probability)


class Retrieved:
    """The labels that tables retrieve for the batch's rows.

    Args:
        tables: Where to look.
        keep: Labels a row.
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
        odd = int((~torch.isfinite(rows_CH.sum(1))).sum())
        if odd:
            raise ValueError(
                f"{odd} of {len(rows_CH)} output rows hold NaN or infinity; lower the learning rate and start again"
            )
        self.tables.build(rows_CH, seed)

    def draw(self, hidden_BH: Tensor, rows_CH: Tensor) -> ActiveSet:
        found = self.tables.retrieve(hidden_BH, rows_CH, self._keep)
        if len(found):
            return ActiveSet(found, NONE, _nothing)
        instead = Uniform(FALLBACK).draw(hidden_BH, rows_CH)
        return ActiveSet(instead.certain, instead.drawn, instead.probability, instead.everything, fell_back=True)


class Mixture:
    """What several samplers draw, as one draw."""

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
            missed = np.ones(len(ids))
            for draw in draws:
                missed *= 1 - draw.probability(ids)
            return 1 - missed

        return ActiveSet(
            np.concatenate([draw.certain for draw in draws]),
            np.concatenate([draw.drawn for draw in draws]),
            probability,
            everything=any(draw.everything for draw in draws),
            fell_back=any(draw.fell_back for draw in draws),
        )


def _retrieving(
    tables: Callable[..., MipsIndex], defaults: Mapping[str, int | None], usual_keep: int, usual_negatives: int
) -> Callable[..., Sampler]:
    """A sampler that retrieves, with uniform labels beside unless `negatives` is 0."""

    def make(keep: int = usual_keep, negatives: int = usual_negatives, **asked: int) -> Sampler:
        if unknown := asked.keys() - defaults.keys():
            raise TypeError(f"unknown: {', '.join(sorted(unknown))}")
        retrieved = Retrieved(tables(**{**defaults, **asked}), keep)
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
    # What it finds is good enough to need fewer labels, so that there are more steps in the same time (wide_labels).
    "inverted-file": _retrieving(InvertedFile, {"lists": None, "probes": 1}, 1, 64),
}


def sampler_of(spec: str | Mapping[str, Any]) -> Sampler:
    """A sampler from a job's words: its name, or `{name: ..., ...}`; `{name: mixture, of: [...]}` for several.

    `auto`, the word alone, is uniform until a trial (`idletrain.autotune.sampler_trial`) has decided.

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
    """Whether it keeps tables of the output rows, which go stale."""
    parts = sampler.parts if isinstance(sampler, Mixture) else (sampler,)
    return any(isinstance(part, Retrieved) for part in parts)
