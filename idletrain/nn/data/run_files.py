"""Data at hand, written into the run directory, from where workers map them into memory."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from idletrain.errors import JobError
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.batches import map_leaves
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

    @functools.cached_property
    def samples(self) -> Samples:
        return as_samples(self.data, self.collate_fn)

    def open(self) -> Samples:
        return self.samples

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle arrays as paths of their files; a Dataset as it is."""
        if not isinstance(self.samples, Storable):
            return _itself, (self.samples,)
        paths = {name: str(self._file(name)) for name in self.samples.parts}
        return _itself, (self.samples.stored(paths, f"data.{self.folder.name}"), str(self.folder.resolve()))

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

    @functools.cached_property
    def _digest(self) -> str:
        assert isinstance(self.samples, Storable)
        digest = hashlib.sha256()
        for array in self.samples.parts.values():
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def read_pickled(pickled: bytes, run_dir: Path) -> Any:
    """Return what `fit` has pickled into a run directory, with the run's data where that directory is now."""
    return _Unpickler(pickled, run_dir).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, run_dir: Path) -> None:
        super().__init__(io.BytesIO(pickled))
        self._data = run_dir.resolve() / "data"

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """See `pickle.Unpickler`."""
        found = super().find_class(module_name, global_name)
        return functools.partial(_itself, data=self._data) if found is _itself else found


def _itself(source: Source, folder: str = "", data: Path | None = None) -> Source:
    """Return a source: what a pickled `RunData` is opened as elsewhere.

    Args:
        source: The source.
        folder: Where its files were written; "" if it has none.
        data: Where the run directory has its data now; None if it has not moved.
    """
    if not folder or data is None:
        return source

    def at(_name: str, leaf: Any) -> Any:
        is_file = isinstance(leaf, str) and Path(leaf).parent == Path(folder)
        return str(data / Path(folder).name / Path(leaf).name) if is_file else leaf

    moved: Source = map_leaves(at, source)
    return moved
