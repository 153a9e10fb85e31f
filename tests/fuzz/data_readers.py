"""Readers of what a user gives: job files, files of data, images, and options of commands."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image
from reader import Reader, file_of

from idletrain import storage
from idletrain.cli.main import bypass_proxies
from idletrain.cloud.aws.schedules import eventbridge
from idletrain.cluster import contact
from idletrain.errors import IdletrainError
from idletrain.job_file import load_job
from idletrain.nn.data.arrays import FileSource
from idletrain.nn.data.extreme import SparseFiles
from idletrain.nn.data.images import FolderSource
from idletrain.observe import provenance
from idletrain.observe.sinks import WatchSettings
from idletrain.quantities import parse_bytes, parse_seconds
from idletrain.schedules import cron, crontab
from idletrain.schedules.execute import machine_zone
from idletrain.simulation import trace
from idletrain.worker.idle import parse_share

SIDE = 6  # pixels of the images


def job(content: bytes) -> object:
    return load_job(file_of(content, "job.yaml"))


def array_file(content: bytes) -> object:
    """The first byte chooses the kind of file."""
    name = ("x.npy", "x.npz", "x-idx3-ubyte", "x.gz")[content[0] % 4] if content else "x.npy"
    path = str(file_of(content[1:], name))
    with fresh_cache():
        value = FileSource(path, path).open()
        return value.batch(np.arange(min(len(value), 2)))


def sparse_file(content: bytes) -> object:
    if content[:1] == b"\0":
        middle = len(content) // 2 + 1
        pair = file_of(content[1:middle], "x.npz"), file_of(content[middle:], "y.npz")
    else:
        pair = (file_of(content, "x.txt"),)
    with fresh_cache():
        value = SparseFiles(tuple(map(str, pair)), empty="keep").open()
        return value.batch(np.arange(min(len(value), 2)))


def image(content: bytes) -> object:
    """The first byte says whether images are scaled."""
    file_of(content[1:], "images/one/x.png")
    source = FolderSource("images", "data", SIDE if content[:1] == b"\1" else None)
    return source.open().batch(np.arange(1))


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """A cache in which nothing was unpacked: the name of a copy is made of a file's size and time."""
    with tempfile.TemporaryDirectory(dir=Path()) as folder, patch.object(storage, "cache_folder", lambda: Path(folder)):
        yield


def text(content: bytes) -> object:
    """Options of commands, variables of the environment, a recorded trace and a crontab."""
    value = content.decode(errors="replace")
    with contextlib.suppress(IdletrainError):
        trace.read_trace(value)
    for parse in (parse_seconds, parse_bytes, parse_share):
        with contextlib.suppress(ValueError):
            assert parse(value) >= 0
    if contact.is_address(value):
        contact.is_loopback(value)
    bypass_proxies({"no_proxy": value})
    assert cron.zone_fault(machine_zone(value)) is None
    added = crontab.with_line(value, "night", "* * * * * x # idletrain:night")
    assert crontab.without(added, "night").strip("\n") == crontab.without(value, "night").strip("\n")
    provenance.command_line(["idletrain", f"--webhook={value}"])
    WatchSettings(webhook=value).faults()
    cron.name_fault(value)
    if cron.cron_fault(value) is None:
        with contextlib.suppress(eventbridge.NoAwsFormError):
            eventbridge.schedule_expression(value)
    return cron.zone_fault(value)


def npz(**contents: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **contents)
    return file.getvalue()


def npy(content: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(3 * SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE, 3)).save(file, kind)
    return file.getvalue()


CSR = {"format": np.array(b"csr"), "shape": [2, 3], "indptr": [0, 1, 2], "indices": [0, 2], "data": [1.0, 1.0]}

READERS = {
    "job": Reader(
        job,
        runs=90_000,
        sound=(b"name: t\nmodel: {factory: 'a.b:c', args: {widths: [1, 2]}}\ndata: {name: digits}\n",),
        modules=("job_file",),
        odd=(
            b"name: t\nmodel: &m {factory: x}\ndata: {train: x.npz}\ntraining: {optimizer: {lr: .inf}, seed: 1}\n",
            b"name: t\nnodes: {memory: 2GiB, count: 3}\ncheckpoint: {every: 10m}\n",
        ),
    ),
    "arrays": Reader(
        array_file,
        runs=45_000,
        sound=(b"\1" + npz(x=np.zeros((2, 2), np.float32), y=np.arange(2)),),
        modules=("nn.data.arrays",),
        odd=(
            b"\0" + npy(np.zeros((3, 2), np.float32)),
            b"\0" + npy(np.float32(1.0)),
            b"\0" + npy(np.array([None, 1], dtype=object)),
            b"\1" + npz(x=np.array([{}], dtype=object), y=np.array(1)),
            b"\2" + bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 8]),
            b"\2" + bytes([0, 0, 8, 3]) + b"\xff" * 12,
            b"\3\x1f\x8b\x08",
            b"\0PK\5\6" + bytes(18),
        ),
    ),
    "sparse": Reader(
        sparse_file,
        runs=15_000,
        sound=(b"2 3 4\n1,2 0:1.5 2:1\n3 1:2e3\n", b"\0" + npz(**CSR) + npz(**CSR)),
        modules=("nn.data.sparse_formats", "nn.data.extreme"),
        odd=(
            b"\0" + 2 * npz(**CSR).replace(b"PK\1\2-\3-\0\0\0\0\0", b"PK\1\2-\3-\0\0\0\7\0"),
            b"1 0:1\n",
            b"9" * 400 + b" 0:1\n",
            b"1 2 " + b"9" * 4096,
            b"2 3 4\n\n",
        ),
    ),
    "images": Reader(
        image,
        runs=80_000,
        sound=(
            *(b"\0" + picture(kind) for kind in ("PNG", "GIF", "BMP", "PPM", "TIFF", "JPEG")),
            b"\1" + picture("PNG"),
        ),
        modules=("nn.data.images",),
        odd=(b"\0P6 99999 99999 255\n",),
        errors=(OSError,),
    ),
    "text": Reader(
        text,
        runs=2_000,
        sound=(
            b"15s",
            b"2GiB",
            b"20%",
            b"tcp://[::1]:8786",
            b"0 2 * * *",
            b"0 2 L * *",
            b"Europe/Paris",
            b"*/5 1-5 L * 1#2",
            b"0,add,n1\n500,remove,n1\n",
            b"* * * * * x # idletrain:night\n",
        ),
        modules=("cluster.contact", "observe.provenance"),
        odd=(b"http://[", b"http://x:99999/"),
    ),
}
