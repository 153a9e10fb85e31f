"""Read files of sparse rows with label sets: the text of the Extreme Classification Repository, or CSR matrices."""

from __future__ import annotations

import gzip
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from idletrain.errors import JobError
from idletrain.nn.data.csr import Csr

logger = logging.getLogger(__name__)
CHUNK_ROWS = 8192  # rows in memory at a time while converting: 5 MB of Amazon-670K
HEADER = re.compile(rb"\s*(\d{1,18})\s+(\d{1,18})\s+(\d{1,18})\s*")
LABEL_LIST = re.compile(rb"\d+(,\d+)*|")
NUMBER = rb"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FEATURES = re.compile(rb"(?:\d+:%b(?:\s+\d+:%b)*)?" % (NUMBER, NUMBER))
LARGEST = 2**31 - 1  # columns are 32-bit numbers
LARGEST_WITHOUT_HEADER = 10**8  # columns: beyond, a typing error would fill the machine's memory


def unreadable(field: str, path: Path, error: Exception) -> JobError:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return JobError(f"{field}: {path} cannot be read ({reason}); name an existing file")


@dataclass(frozen=True)
class SparseChunk:
    """Consecutive rows of a file, and the numbers of features and labels in its header (0 without one)."""

    x: Csr
    y: Csr
    sizes: tuple[int, int]


def read_chunks(paths: Sequence[Path], field: str) -> Iterator[SparseChunk]:
    """Read a text file, or a pair of CSR matrices, some thousand rows at a time.

    Args:
        paths: The files.
        field: The job's field that names them.

    Raises:
        JobError: A file cannot be read, or is not of its format; the message has the line's or row's number.
    """
    return _text_chunks(paths[0], field) if len(paths) == 1 else _npz_chunks(paths, field)


def _text_chunks(path: Path, field: str) -> Iterator[SparseChunk]:
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
            yield SparseChunk(_stack([r[0] for r in rows], [r[1] for r in rows]), _stack([r[2] for r in rows]), sizes)
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
    if not LABEL_LIST.fullmatch(names) or not FEATURES.fullmatch(rest):
        shown = line[:60].decode(errors="replace").rstrip()
        raise JobError(f"{where}: {shown!r} is not `label,label feature:value ...`; correct or remove that line")
    labels = names.split(b",") if names else []
    pairs = np.array(rest.replace(b":", b" ").split(), dtype=np.float64).reshape(-1, 2)
    values = pairs[:, 1].astype(np.float32)
    if not np.isfinite(values).all():
        raise JobError(f"{where}: a value is beyond float32; correct or remove that line")
    # Checked as floats, which a number of any length is: converted to 64-bit integers, large ones would overflow.
    for name, largest, size in (
        ("feature", pairs[:, 0].max(initial=-1), sizes[0]),
        ("label", max(map(float, labels), default=-1.0), sizes[1]),
    ):
        if largest >= (size or LARGEST_WITHOUT_HEADER):
            limit = size or LARGEST_WITHOUT_HEADER
            reason = "line 1 names" if size else "can be had without a header"
            raise JobError(f"{where}: {name} {largest:.0f} is beyond the {limit} {name}s that {reason}; count from 0")
    return pairs[:, 0].astype(np.int64), values, np.array([int(label) for label in labels], dtype=np.int64)


def _stack(columns: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]] | None = None) -> Csr:
    starts = np.concatenate([[0], np.cumsum([len(part) for part in columns])]).astype(np.int64)
    return Csr(starts, np.concatenate(columns).astype(np.int32), None if values is None else np.concatenate(values))


def _npz_chunks(paths: Sequence[Path], field: str) -> Iterator[SparseChunk]:
    (x, features), (y, labels) = (_load_npz(path, field) for path in paths)
    if len(x) != len(y):
        raise JobError(f"{field}: {paths[0]} has {len(x)} rows and {paths[1]} {len(y)}; they should have as many")
    for start in range(0, len(x), CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, len(x))
        yield SparseChunk(_slice(x, start, end), _not_zero(_slice(y, start, end)), (features, labels))


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
        raise unreadable(field, path, error) from None
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 (damaged bytes end in errors of NumPy, zipfile, zlib and tokenize)
        reason = " ".join(str(error).split())[:200]  # zipfile shows all of a damaged name
        raise JobError(f"{field}: {path} is not what scipy.sparse.save_npz writes ({reason}); write it so") from None
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
        raise JobError(
            f"{field}: {path}, row {row}: a column beyond {columns}, or a value that is not finite; correct it"
        )
    return matrix, columns


def _slice(matrix: Csr, start: int, end: int) -> Csr:
    low, high = matrix.starts[start], matrix.starts[end]
    values = None if matrix.values is None else matrix.values[low:high]
    return Csr(matrix.starts[start : end + 1] - low, matrix.columns[low:high].astype(np.int32), values)
