"""Data sets for extreme classification: sparse features and a set of labels for each row.

Formats: that of the Extreme Classification Repository (a header `rows features labels`, then a
line `label,label feature:value feature:value` for each row; plain or gzip), and pairs of CSR matrices as
`scipy.sparse.save_npz` writes them. A file is converted once per machine, to raw arrays in the user's cache that
workers memory-map.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import itertools
import json
import logging
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from idletrain.errors import JobError
from idletrain.nn.data import arrays
from idletrain.nn.data.csr import Csr, Rows, canonical, transpose
from idletrain.nn.data.remote import Remote

logger = logging.getLogger(__name__)
SUFFIXES = (".txt", ".svm", ".libsvm")
CHUNK_ROWS = 8192  # rows in memory at a time while converting: 5 MB of Amazon-670K
HEADER = re.compile(rb"\s*(\d+)\s+(\d+)\s+(\d+)\s*")
LABELS = re.compile(rb"\d+(,\d+)*|")
NUMBER = rb"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FEATURES = re.compile(rb"(?:\d+:%b(?:\s+\d+:%b)*)?" % (NUMBER, NUMBER))
LARGEST = 2**31 - 1  # columns are 32-bit numbers
LARGEST_WITHOUT_HEADER = 10**8  # columns: beyond, a typing error would fill the machine's memory
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
        cache, field = arrays.CACHE / "s3", self.field
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
            raise _unreadable(self.field, paths[0], error) from None
        identity = "".join(f"{p.resolve()} {s.st_size} {s.st_mtime_ns}\n" for p, s in zip(paths, stats, strict=True))
        name = hashlib.sha256(f"{identity}{self.empty}".encode()).hexdigest()[:16]
        return arrays.CACHE / "sparse" / f"{name}-{paths[0].name.split('.')[0]}"


def sparse_names(where: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of sparse files in a job's data setting, or () if it names none."""
    names = (where,) if isinstance(where, str) else where
    text = len(names) == 1 and names[0].removesuffix(".gz").endswith(SUFFIXES)
    matrices = len(names) == 2 and all(name.endswith(".npz") for name in names)
    return names if text or matrices else ()


def _unreadable(field: str, path: Path, error: Exception) -> JobError:
    reason = getattr(error, "strerror", None) or str(error)
    return JobError(f"{field}: {path} cannot be read ({reason}); name an existing file")


# --- parsing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
    """Consecutive rows of a file, and the numbers of features and labels in its header (0 without one)."""

    x: Csr
    y: Csr
    sizes: tuple[int, int]


def _chunks(paths: Sequence[Path], field: str) -> Iterator[_Chunk]:
    return _text_chunks(paths[0], field) if len(paths) == 1 else _npz_chunks(paths, field)


def _text_chunks(path: Path, field: str) -> Iterator[_Chunk]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines: Iterator[tuple[int, bytes]] = enumerate(cast(IO[bytes], file), 1)
        first = next(lines, (1, b""))
        header = HEADER.fullmatch(first[1])
        sizes = (int(header[2]), int(header[3])) if header else (0, 0)
        if max(sizes) > LARGEST:
            raise JobError(f"{field}: {path}, line 1 names {max(sizes)} columns; at most {LARGEST} can be had")
        if not header:
            lines = itertools.chain([first], lines)
        count, lines = 0, _without_blank_end(lines)
        while block := list(itertools.islice(lines, CHUNK_ROWS)):
            rows = [_parse(line, path, number, sizes, field) for number, line in block]
            count += len(rows)
            yield _Chunk(_stack([r[0] for r in rows], [r[1] for r in rows]), _stack([r[2] for r in rows]), sizes)
            logger.info("%s: %d rows read", path, count)
        if header and count != int(header[1]):
            raise JobError(f"{field}: {path}, line 1 names {int(header[1])} rows and {count} follow; get it again")


def _without_blank_end(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    pending: list[tuple[int, bytes]] = []
    for line in lines:
        pending.append(line)
        if line[1].strip():
            yield from pending
            pending.clear()


_Row = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _parse(line: bytes, path: Path, number: int, sizes: tuple[int, int], field: str) -> _Row:
    """Return the features, values and labels of one line."""
    where = f"{field}: {path}, line {number}"
    names, _, rest = line.rstrip().partition(b" ")
    if b":" in names:  # a row whose label set is empty, written without the space before its features
        names, rest = b"", line.strip()
    rest = rest.strip()
    if not LABELS.fullmatch(names) or not FEATURES.fullmatch(rest):
        shown = line[:60].decode(errors="replace").rstrip()
        raise JobError(f"{where}: {shown!r} is not `label,label feature:value ...`; mend or remove that line")
    labels = [int(name) for name in names.split(b",")] if names else []
    pairs = np.array(rest.replace(b":", b" ").split(), dtype=np.float64).reshape(-1, 2)
    values = pairs[:, 1].astype(np.float32)
    if not np.isfinite(values).all():
        raise JobError(f"{where}: a value is beyond float32; mend or remove that line")
    # Checked as floats: converted to 64-bit integers, large ones would overflow.
    for name, largest, size in (
        ("feature", pairs[:, 0].max(initial=-1), sizes[0]),
        ("label", max(labels, default=-1), sizes[1]),
    ):
        if largest >= (size or LARGEST_WITHOUT_HEADER):
            limit = size or LARGEST_WITHOUT_HEADER
            reason = "line 1 names" if size else "can be had without a header"
            raise JobError(f"{where}: {name} {largest:.0f} is beyond the {limit} {name}s that {reason}; count from 0")
    return pairs[:, 0].astype(np.int64), values, np.array(labels, dtype=np.int64)


def _stack(columns: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]] | None = None) -> Csr:
    starts = np.concatenate([[0], np.cumsum([len(part) for part in columns])]).astype(np.int64)
    return Csr(starts, np.concatenate(columns).astype(np.int32), None if values is None else np.concatenate(values))


def _npz_chunks(paths: Sequence[Path], field: str) -> Iterator[_Chunk]:
    (x, features), (y, labels) = (_load_npz(path, field) for path in paths)
    if len(x) != len(y):
        raise JobError(f"{field}: {paths[0]} has {len(x)} rows and {paths[1]} {len(y)}; they should have as many")
    for start in range(0, len(x), CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, len(x))
        yield _Chunk(_slice(x, start, end), _not_zero(_slice(y, start, end)), (features, labels))


def _not_zero(matrix: Csr) -> Csr:
    """Return the matrix without values and without stored zeros."""
    assert matrix.values is not None
    stored = matrix.values != 0
    return Csr(np.concatenate([[0], np.cumsum(stored)])[matrix.starts], matrix.columns[stored])


def _load_npz(path: Path, field: str) -> tuple[Csr, int]:
    """Load a CSR matrix and its number of columns."""
    try:
        with np.load(path) as archive:
            kind = archive["format"].item()
            matrix = Csr(archive["indptr"].astype(np.int64), archive["indices"], archive["data"].astype(np.float32))
            rows, columns = (int(size) for size in archive["shape"])
            if columns > LARGEST:
                raise JobError(f"{field}: {path} has {columns} columns; at most {LARGEST} can be had")
    except OSError as error:
        raise _unreadable(field, path, error) from None
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise JobError(f"{field}: {path} is not what scipy.sparse.save_npz writes ({error}); write it so") from None
    if kind not in (b"csr", "csr"):
        raise JobError(f"{field}: {path} holds a {kind!r} matrix; save matrix.tocsr()")
    if len(matrix) != rows or (np.diff(matrix.starts) < 0).any() or matrix.starts[-1] != len(matrix.columns):
        raise JobError(f"{field}: {path}: its indptr does not fit its {rows} rows; write the file again")
    if matrix.values is not None and len(matrix.values) != len(matrix.columns):
        raise JobError(f"{field}: {path}: {len(matrix.columns)} indices, {len(matrix.values)} values; write it again")
    wrong = np.flatnonzero((matrix.columns < 0) | (matrix.columns >= columns))
    if not len(wrong) and matrix.values is not None:
        wrong = np.flatnonzero(~np.isfinite(matrix.values))
    if len(wrong):
        row = int(np.searchsorted(matrix.starts, wrong[0], "right")) - 1
        raise JobError(f"{field}: {path}, row {row}: a column beyond {columns}, or a value that is not finite; mend it")
    return matrix, columns


def _slice(matrix: Csr, start: int, end: int) -> Csr:
    low, high = matrix.starts[start], matrix.starts[end]
    values = None if matrix.values is None else matrix.values[low:high]
    return Csr(matrix.starts[start : end + 1] - low, matrix.columns[low:high].astype(np.int32), values)


# --- the converted file -----------------------------------------------------------------------------------------------


def _convert(paths: Sequence[Path], folder: Path, field: str, empty: str) -> None:
    """Write the raw arrays and their census into a folder, atomically, also when several workers do it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        census = _write(partial, _chunks(paths, field), keep=empty == "keep")
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
        raise _unreadable(field, paths[0], error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, chunks: Iterator[_Chunk], *, keep: bool) -> DataCensus:
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
