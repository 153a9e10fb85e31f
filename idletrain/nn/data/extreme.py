"""Data sets for extreme classification: sparse features and a set of labels for each row.

Formats: that of the Extreme Classification Repository (a header `rows features labels`, then a
line `label,label feature:value feature:value` for each row; plain or gzip), and pairs of CSR matrices as
`scipy.sparse.save_npz` writes them. A file is converted once per machine, to raw arrays in the user's cache that
workers memory-map.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from idletrain import storage
from idletrain.errors import JobError
from idletrain.nn.data.csr import Csr, Rows, canonical, transpose
from idletrain.nn.data.remote import Remote
from idletrain.nn.data.sparse_formats import SparseChunk, read_chunks, unreadable

logger = logging.getLogger(__name__)
TEXT_SUFFIXES = (".txt", ".svm", ".libsvm")
ARRAYS = {  # file -> type
    "feature_starts": np.int64,
    "feature_columns": np.int32,
    "feature_values": np.float32,
    "label_starts": np.int64,
    "label_columns": np.int32,
    "row_starts": np.int64,
    "row_columns": np.int32,
}


@dataclass(frozen=True)
class DataCensus:
    """The sizes of a converted file, and the numbers of rows that were dropped or repaired.

    Attributes:
        without_labels: Rows with an empty label set: kept or dropped, as the job says.
        repaired_rows: Rows whose features were out of order or named twice (those are added up).
    """

    rows: int
    features: int
    labels: int
    without_labels: int
    repaired_rows: int


@dataclass(frozen=True)
class SparseSamples:
    """Rows of sparse features `[features]` with label sets, memory-mapped.

    Attributes:
        rows_of: For each label, the rows that have it `[labels]`.
    """

    x: Csr
    y: Csr
    rows_of: Csr
    census: DataCensus

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: NDArray[np.int64]) -> tuple[Rows, Rows]:
        """Return the features and label sets of the rows `index` `[B]`."""
        return self.x.take(index), self.y.take(index)

    def holding(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that have any of these labels, ascending."""
        return np.unique(self.rows_of.take(labels).indices.numpy())


@dataclass(frozen=True)
class SparseFiles:
    """A file of rows, or a pair of CSR `.npz` (features, labels).

    Attributes:
        empty: Keep or drop rows without labels.
        most_rows: Take this many rows at random; None for all of them.
    """

    files: tuple[str | Remote, ...]
    field: str = "data"
    empty: Literal["keep", "drop"] = "drop"
    most_rows: int | None = None

    def open(self) -> SparseSamples:
        """Return the rows, memory-mapped; convert the files first if this machine has not done so.

        Raises:
            JobError: a file is missing, or one of its lines is wrong; the message has the line's number.
        """
        cache, field = storage.cache_folder() / "s3", self.field
        paths = [f.download(cache, field) if isinstance(f, Remote) else Path(f).expanduser() for f in self.files]
        folder = self._folder(paths)
        if not (folder / "census.json").exists():
            _convert(paths, folder, self.field, self.empty)
        samples = _map(folder)
        if not len(samples):
            raise JobError(
                f"{self.field}: {' and '.join(map(str, self.files))} hold no rows with labels; name other files"
            )
        if self.most_rows is None or self.most_rows >= len(samples):
            return samples
        rows = np.sort(np.random.Generator(np.random.Philox(0)).permutation(len(samples))[: self.most_rows])
        return only(samples, rows)

    def _folder(self, paths: Sequence[Path]) -> Path:
        try:
            stats = [path.stat() for path in paths]
        except OSError as error:
            raise unreadable(self.field, paths[0], error) from None
        identity = "".join(f"{p.resolve()} {s.st_size} {s.st_mtime_ns}\n" for p, s in zip(paths, stats, strict=True))
        name = hashlib.sha256(f"{identity}{self.empty}".encode()).hexdigest()[:16]
        return storage.cache_folder() / "sparse" / f"{name}-{paths[0].name.split('.')[0]}"


def sparse_names(where: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of sparse files in a job's data setting, or () if it names none."""
    names = (where,) if isinstance(where, str) else where
    text = len(names) == 1 and names[0].removesuffix(".gz").endswith(TEXT_SUFFIXES)
    matrices = len(names) == 2 and all(name.endswith(".npz") for name in names)
    return names if text or matrices else ()


def _convert(paths: Sequence[Path], folder: Path, field: str, empty: str) -> None:
    """Write the raw arrays and their census into a folder, atomically, also when several workers do it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        census = _write(partial, read_chunks(paths, field), keep=empty == "keep")
        if census.without_labels:
            logger.warning("%s: %d rows without labels: %s", paths[0], census.without_labels, empty)
        if census.repaired_rows:
            logger.warning("%s: features sorted or added up in %d rows", paths[0], census.repaired_rows)
        (partial / "census.json").write_text(json.dumps(asdict(census)))
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "census.json").exists():
                raise
    except (OSError, EOFError, zlib.error) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise JobError(f"{field}: {folder.parent} has no room for {paths[0]} as arrays; free some there") from None
        raise unreadable(field, paths[0], error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, chunks: Iterator[SparseChunk], *, keep: bool) -> DataCensus:
    files = {name: (folder / name).open("wb") for name in ARRAYS if not name.startswith("row_")}
    rows = features = labels = without_labels = repaired = 0
    written = {"feature": 0, "label": 0}
    try:
        for kind in written:
            np.zeros(1, np.int64).tofile(files[f"{kind}_starts"])
        for chunk in chunks:
            has = np.diff(chunk.y.starts) > 0
            without_labels += int((~has).sum())
            x, y = (part if keep or has.all() else part.only(np.flatnonzero(has)) for part in (chunk.x, chunk.y))
            (x, repaired_here), (y, _) = canonical(x), canonical(y)
            for kind, part in (("feature", x), ("label", y)):
                (part.starts[1:] + written[kind]).tofile(files[f"{kind}_starts"])
                part.columns.tofile(files[f"{kind}_columns"])
                written[kind] += len(part.columns)
            assert x.values is not None
            x.values.tofile(files["feature_values"])
            rows, repaired = rows + len(x), repaired + repaired_here
            features = max(features, chunk.sizes[0], int(x.columns.max(initial=-1)) + 1)
            labels = max(labels, chunk.sizes[1], int(y.columns.max(initial=-1)) + 1)
    finally:
        for file in files.values():
            file.close()
    by_label = transpose(Csr(_array(folder, "label_starts"), _array(folder, "label_columns")), labels)
    by_label.starts.tofile(folder / "row_starts")
    by_label.columns.tofile(folder / "row_columns")
    return DataCensus(rows, features, labels, without_labels, repaired)


def _array(folder: Path, name: str) -> NDArray[Any]:
    path = folder / name
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, ARRAYS[name])
    return np.memmap(path, ARRAYS[name], "r")


def _map(folder: Path) -> SparseSamples:
    arrays = {name: _array(folder, name) for name in ARRAYS}
    return SparseSamples(
        x=Csr(arrays["feature_starts"], arrays["feature_columns"], arrays["feature_values"]),
        y=Csr(arrays["label_starts"], arrays["label_columns"]),
        rows_of=Csr(arrays["row_starts"], arrays["row_columns"]),
        census=DataCensus(**json.loads((folder / "census.json").read_text())),
    )


def only(samples: SparseSamples, rows: NDArray[np.int64]) -> SparseSamples:
    """Copy some rows into new samples, in memory."""
    y = samples.y.only(rows)
    census = replace(samples.census, rows=len(rows))
    return SparseSamples(samples.x.only(rows), y, transpose(y, census.labels), census)
