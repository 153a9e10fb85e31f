"""Snapshots of the whole network: the data first, the manifest last, so that a snapshot is whole or absent."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from idletrain.errors import DamageError, RunError
from idletrain.storage import CrashPoint, make_private, owner_only, sync_directory, write_whole

if TYPE_CHECKING:
    from idletrain.nn.network import Network  # with torch, which takes a second to import

ARRAYS = "arrays.npz"
SNAPSHOT_CHUNK_BYTES = 1 << 24  # digest and write in pieces that stay in cache


def write(
    run_dir: Path,
    round_: int,
    network: Network,
    reached: CrashPoint,
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Write the network after `round_` rounds, and arrays beside it.

    With arrays, one that is there stays: it may be of another moment, but is as good.

    Raises:
        OSError: There is no room; no half snapshot stays.
    """
    folder = run_dir / "snapshots" / f"{round_:08d}"
    content = network.flat.numpy().data.cast("B")
    # A head that died afterwards wrote it; it may be the only one.
    if _is_whole(folder) if arrays is not None else _holds(folder, content):
        return
    shutil.rmtree(folder, ignore_errors=True)
    make_private(folder.parent)
    folder.mkdir(mode=0o700)
    digest = hashlib.sha256()
    try:
        with open(folder / "network", "wb", opener=owner_only) as file:
            for start in range(0, len(content), SNAPSHOT_CHUNK_BYTES):
                file.write(content[start : start + SNAPSHOT_CHUNK_BYTES])
                digest.update(content[start : start + SNAPSHOT_CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())
        manifest = {"round": round_, "bytes": len(content), "sha256": digest.hexdigest()}
        if arrays is not None:
            packed = io.BytesIO()
            np.savez(packed, **arrays)  # type: ignore[arg-type]
            write_whole(folder / ARRAYS, packed.getvalue())
            manifest["arrays_sha256"] = hashlib.sha256(packed.getbuffer()).hexdigest()
        reached("snapshot-data-written")
        write_whole(folder / "manifest.json", json.dumps(manifest).encode())
        sync_directory(folder.parent)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    reached("snapshot-written")


def _is_whole(folder: Path) -> bool:
    """Return whether a snapshot holds what was written to it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        found = {key: _digest(folder / name) for key, name in (("sha256", "network"), ("arrays_sha256", ARRAYS))}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and all(manifest.get(key) == digest for key, digest in found.items())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _holds(folder: Path, content: memoryview) -> bool:
    """Return whether a snapshot is whole and has this content."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return manifest["sha256"] == hashlib.sha256(content).hexdigest() and bool(
            np.array_equal(np.fromfile(folder / "network", np.uint8), np.frombuffer(content, np.uint8))
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def rounds(run_dir: Path) -> list[int]:
    """Return the rounds that have a whole snapshot, oldest first."""
    folders = (manifest.parent.name for manifest in (run_dir / "snapshots").glob("*/manifest.json"))
    return sorted(int(name) for name in folders if name.isdecimal())


def load(run_dir: Path, round_: int, network: Network) -> None:
    """Fill the network from a snapshot.

    Raises:
        DamageError: The files do not hold what was written.
        RunError: The files are there and cannot be read, or hold a network of another size.
    """
    folder = run_dir / "snapshots" / f"{round_:08d}"
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        digest = manifest["sha256"]
        content = np.fromfile(folder / "network", np.float32)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        raise DamageError(f"{folder}: is not whole") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be read ({error.strerror}); fix that and try again") from None
    if hashlib.sha256(content.data).hexdigest() != digest:
        raise DamageError(f"{folder}: does not hold what was written to it")
    if content.size != network.flat.numel():
        raise RunError(
            f"{folder}: holds a network of another size; go on with the module that the run began with, or start under "
            "another name"
        )
    network.flat.numpy()[:] = content


def load_arrays(run_dir: Path, round_: int) -> dict[str, NDArray[Any]] | None:
    """Return the arrays beside a snapshot's network; None for one that was written without any.

    Raises:
        DamageError: The files do not hold what was written.
        RunError: The file is there and cannot be read.
    """
    folder = run_dir / "snapshots" / f"{round_:08d}"
    try:
        digest = json.loads((folder / "manifest.json").read_bytes()).get("arrays_sha256")
        content = (folder / ARRAYS).read_bytes() if digest else b""
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, AttributeError, RecursionError):
        raise DamageError(f"{folder}: is not whole") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be read ({error.strerror}); fix that and try again") from None
    if not digest:
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        raise DamageError(f"{folder}: does not hold what was written to it")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def prune(run_dir: Path, keep: int, best: int | None = None) -> int:
    """Remove all snapshots but the newest `keep` and that of round `best`, and unfinished ones that a crash left.

    Return the round of the oldest of the newest: older updates are needed no more.
    """
    newest = rounds(run_dir)[-keep:]
    for folder in (run_dir / "snapshots").iterdir():
        if folder.name.isdecimal() and int(folder.name) not in (*newest, best) and int(folder.name) <= newest[-1]:
            shutil.rmtree(folder)
    return newest[0]


def set_aside(run_dir: Path, round_: int) -> None:
    """Rename a damaged snapshot, so that it counts as none and nothing is pruned because of it."""
    folder = run_dir / "snapshots" / f"{round_:08d}"
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
