"""Data at hand, written into the run directory, from where workers map them into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from idletrain.errors import JobError
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.given import as_samples
from idletrain.nn.data.values import Array
from idletrain.storage import make_private, owner_only


@runtime_checkable
class Storable(Protocol):
    """Samples that are arrays in memory."""

    @property
    def parts(self) -> Mapping[str, Array]:
        """Return the arrays by names that can be names of files."""

    def stored(self, paths: Mapping[str, str], field: str) -> Source:
        """Return the source of the same samples from a file for each part; `field` is the job's, for faults."""


@dataclass(frozen=True)
class RunData:
    """Data passed to `fit`, as a source: the samples themselves in this process, memory-mapped files in all others.

    Attributes:
        data: What `as_samples` takes.
        folder: Where arrays are written once the run has started, named by their digest; workers map them.
        collate_fn: Makes a batch from a list of a Dataset's items.
    """

    data: Any
    folder: Path
    collate_fn: Callable[[list[Any]], Any] | None = None

    @cached_property
    def samples(self) -> Samples:
        return as_samples(self.data, self.collate_fn)

    def open(self) -> Samples:
        return self.samples

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle arrays as paths of their files; a Dataset as it is."""
        if not isinstance(self.samples, Storable):
            return _itself, (self.samples,)
        paths = {name: str(self._file(name)) for name in self.samples.parts}
        return _itself, (self.samples.stored(paths, f"data.{self.folder.name}"),)

    def write(self) -> None:
        """Write arrays where workers map them, unless the run has them from before a resumption.

        Raises:
            JobError: the run began with other data.
        """
        if not isinstance(self.samples, Storable):
            return
        parts = self.samples.parts
        last = list(parts)[-1]  # written last: then all are whole
        if self.folder.exists() and not self._file(last).exists() and list(self.folder.glob(f"{last}-*.npy")):
            raise JobError(
                f"{self.folder.name}: is not the data that the run in {self.folder.parents[1]} began with; "
                "give that or another name"
            )
        make_private(self.folder.parent)
        make_private(self.folder)
        for name, array in parts.items():
            if not self._file(name).exists():
                partial = self._file(name).with_suffix(".partial")
                with open(partial, "wb", opener=owner_only) as out:
                    np.save(out, array)
                partial.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return (self.folder / f"{name}-{self._digest}.npy").resolve()

    @cached_property
    def _digest(self) -> str:
        assert isinstance(self.samples, Storable)
        digest = hashlib.sha256()
        for array in self.samples.parts.values():
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def _itself(source: Source) -> Source:
    """Return a source: what a pickled `RunData` is opened as elsewhere."""
    return source
