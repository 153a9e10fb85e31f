"""Readers of bytes from outside, as functions of bytes: each ends in a clean error or in none.

`test_readers.py` gives each some odd bytes; `python -m fuzz.campaign` (make fuzz) searches for a minute.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idletrain.cloud.machines import LaunchSite, Pool
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.cloud.record import RunRecord
from idletrain.cloud.sandbox import reclaims, signatures
from idletrain.cluster import contact
from idletrain.errors import IdletrainError
from idletrain.exchange.codec import Codec
from idletrain.exchange.datagram import packet
from idletrain.fabric.analysis import samples
from idletrain.job_file import load_job
from idletrain.nn.data import arrays
from idletrain.nn.data.arrays import FileSource
from idletrain.nn.data.extreme import SparseFiles
from idletrain.observe import display, records, report
from idletrain.quantities import parse_bytes, parse_seconds
from idletrain.rounds.durable import recovery, write_ahead_log
from idletrain.rounds.durable.stream_positions import StreamPositions
from idletrain.schedules import cron
from idletrain.schedules.store import ScheduleStore
from idletrain.worker.idle import parse_share

PLACE = Path(tempfile.gettempdir())  # of the process; tests and campaigns name one of their own
LONGEST_ERROR = 1000  # characters of a fault: it is a sentence, not the input


@dataclass(frozen=True)
class Reader:
    """A reader of bytes, and some bytes that it takes."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def accepted(read: Callable[[bytes], object], content: bytes) -> None:
    """Read; an error of ours is as good as an answer, if each fault that it names is short."""
    text = ""
    try:
        read(content)
    except (IdletrainError, signatures.SignatureError) as error:
        text = str(error)
    assert max(map(len, text.splitlines()), default=0) < LONGEST_ERROR


def file_of(content: bytes, name: str) -> Path:
    path = PLACE / name
    path.write_bytes(content)
    return path


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
        middle = len(content) // 2
        pair = file_of(content[1:middle], "x.npz"), file_of(content[middle:], "y.npz")
    else:
        pair = (file_of(content, "x.txt"),)
    with fresh_cache():
        value = SparseFiles(tuple(map(str, pair)), empty="keep").open()
        return value.batch(np.arange(min(len(value), 2)))


@contextlib.contextmanager
def fresh_cache() -> Any:
    """A cache in which nothing was unpacked: the name of a copy is made of a file's size and time."""
    before = arrays.CACHE
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        arrays.CACHE = Path(folder)
        try:
            yield
        finally:
            arrays.CACHE = before


def events(content: bytes) -> object:
    """All that status and report show of a run."""
    value = list(records.parse(content.splitlines()))
    past = report.PastRun.of("run", value, time.time())
    return report.short(past), report.report_page([past]), list(display.final_lines(past.summary, "done"))


def log(content: bytes) -> object:
    return write_ahead_log.read(file_of(content, "wal"))


def datagram(content: bytes) -> object:
    return packet.peek(content), packet.Seal(bytes(16)).open(content)


def coded(content: bytes) -> object:
    """Frames of every kind and length, decoded where the length fits and refused where not."""
    for kind in ("bf16", "int8", "int4"):
        codec = Codec(kind, ((3, 600),), 700)
        with contextlib.suppress(ValueError):
            codec.decode(torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8))
        whole = bytearray(content[: codec.nbytes].ljust(codec.nbytes, b"\xff"))
        flat = codec.decode(torch.frombuffer(whole, dtype=torch.uint8))
        codec.gains(torch.frombuffer(whole, dtype=torch.uint8))
        assert flat.shape == (700,)
    return None


def text(content: bytes) -> object:
    """Options of commands, and a recorded trace."""
    value = content.decode(errors="replace")
    with contextlib.suppress(IdletrainError):
        reclaims.read_trace(value)
    for parse in (parse_seconds, parse_bytes, parse_share):
        with contextlib.suppress(ValueError):
            assert parse(value) >= 0
    if contact.is_address(value):
        contact.is_loopback(value)
    cron.name_fault(value)
    cron.zone_fault(value)
    return cron.cron_fault(value)


def fabric(content: bytes) -> object:
    return samples.from_json(content, "x.json")


def signature(content: bytes) -> object:
    headers = {"authorization": content.decode("latin-1"), "host": "h", "x-amz-date": content[-16:].decode("latin-1")}
    claim = signatures.claim_of(headers)
    keys = signatures.Keys(claim.key_id, "secret")
    signatures.keys_of(claim, headers, {keys.id: keys}, time.time())
    return signatures.check(claim, keys, "POST", "http://h/", headers, content)


def run_files(content: bytes) -> object:
    """Small files of JSON; the first byte chooses which."""
    kind, content = content[0] % 5 if content else 0, content[1:]
    if kind == 0:
        return RunRecord.from_json(content)
    if kind == 1:
        file_of(content, "streams.json")
        return StreamPositions(PLACE).at(0, 9)
    if kind == 2:
        file_of(content, "job.json")
        return recovery.read_job(PLACE)
    folder = PLACE / "schedules"
    folder.mkdir(exist_ok=True)
    (folder / ("night.json" if kind == 3 else "night.history.jsonl")).write_bytes(content)
    store = ScheduleStore(folder)
    return store.get("night") if kind == 3 else store.history("night")


def npz(**contents: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **contents)
    return file.getvalue()


def npy(content: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


CSR = {"format": np.array(b"csr"), "shape": [2, 3], "indptr": [0, 1, 2], "indices": [0, 2], "data": [1.0, 1.0]}
EVENTS = b"""\
{"v": 2, "t": 1.0, "s": 0.0, "kind": "run_started", "run": "r", "subnets": 2, "rounds": 3, "target": null, \
"parameters": 9, "resumed_at": 0, "run_dir": "runs/r", "dashboard": ""}
{"v": 2, "t": 1.0, "s": 1.0, "kind": "worker_joined", "worker": "w", "name": "n", "pid": 1, "device": "cpu"}
{"v": 2, "t": 1.0, "s": 1.0, "kind": "leased", "worker": "w", "round": 0, "subnet": 1, "attempt": 1, "step": 0}
{"v": 2, "t": 1.0, "s": 2.0, "kind": "staged", "worker": "w", "round": 0, "subnet": 1, "attempt": 1, "steps": 5, \
"train_seconds": 1.0}
{"v": 2, "t": 1.0, "s": 2.0, "kind": "attempt_ended", "worker": "w", "round": 0, "subnet": 1, "attempt": 1, \
"ended": "done", "steps": 5, "train_seconds": 1.0, "pull_seconds": 0.1, "push_seconds": 0.1}
{"v": 2, "t": 2.0, "s": 2.0, "kind": "round_committed", "round": 0, "steps": 5, "seconds": 1.0, "commit_seconds": 0.1, \
"bytes_down": 9, "bytes_up": 9, "shares": [1], "measured": {"pull": 0.1, "compute": 1.0, "push": 0.1, "commit": 0.1}}
{"v": 2, "t": 3.0, "s": 3.0, "kind": "evaluated", "round": 0, "accuracy": 0.5, "loss": 1.0}
{"v": 2, "t": 3.0, "s": 3.0, "kind": "instance_launched", "instance": "i", "role": "worker", "type": "m", "zone": "z", \
"market": "spot", "usd_per_hour": 1.0, "on_demand_usd_per_hour": 2.0}
{"v": 2, "t": 3.0, "s": 3.0, "kind": "spot_price", "type": "m", "zone": "z", "usd_per_hour": 1.0}
{"v": 2, "t": 3.0, "s": 3.0, "kind": "lost", "round": 0, "subnet": 1, "attempt": 1, "worker": "w", "cause": "kill", \
"kept_steps": 1, "lost_steps": 1, "kept_seconds": 1.0}
{"v": 2, "t": 3.0, "s": 3.0, "kind": "worker_left", "worker": "w", "name": "n", "cause": "kill"}
{"v": 2, "t": 4.0, "s": 4.0, "kind": "run_ended", "status": "completed", "rounds": 1, "params_sha256": "0", \
"run_dir": "runs/r", "accuracy": 0.5, "loss": 1.0}
"""

POOL = Pool("spot", "m5.large", "eu-west-1a")
RECORD = RunRecord(
    run="night",
    job={"name": "night"},
    tags={"idletrain:run": "night"},
    created=1.0,
    deadline=2.0,
    site=LaunchSite("eu-west-1", "vpc-1", {"eu-west-1a": "subnet-a"}, "ami-1"),
    wanted=DesiredFleet(2, "auto", (POOL,)),
    heads=(POOL,),
    prices={POOL: 0.1},
    on_demand={"m5.large": 0.3},
    need_bytes=1 << 30,
    most_slots=1,
)

READERS: Mapping[str, Reader] = {
    "job": Reader(
        job,
        (
            b"name: t\nmodel: {factory: 'a.b:c', args: {widths: [1, 2]}}\ndata: {name: digits}\n",
            b"name: t\nmodel: &m {factory: x}\ndata: {train: x.npz}\ntraining: {optimizer: {lr: .inf}, seed: 1}\n",
            b"name: t\nnodes: {memory: 2GiB, count: 3}\ncheckpoint: {every: 10m}\n",
        ),
    ),
    "arrays": Reader(
        array_file,
        (
            b"\0" + npy(np.zeros((3, 2), np.float32)),
            b"\0" + npy(np.float32(1.0)),
            b"\0" + npy(np.array([None, 1], dtype=object)),
            b"\1" + npz(x=np.zeros((2, 2)), y=np.arange(2)),
            b"\1" + npz(x=np.array([{}], dtype=object), y=np.array(1)),
            b"\2" + bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 8]),
            b"\2" + bytes([0, 0, 8, 3]) + b"\xff" * 12,
            b"\3\x1f\x8b\x08",
            b"\0PK\5\6" + bytes(18),
        ),
    ),
    "sparse": Reader(
        sparse_file,
        (
            b"2 3 4\n1,2 0:1.5 2:1\n3 1:2e3\n",
            b"1 0:1\n",
            b"9" * 400 + b" 0:1\n",
            b"1 2 " + b"9" * 4096,
            b"2 3 4\n\n",
            b"\0" + npz(**CSR) + npz(**CSR),
        ),
    ),
    "events": Reader(events, (EVENTS, b'{"kind": []}\n{"kind": "staged"}\n[1]\n"x"\nnull\n' + b"[" * 2000)),
    "log": Reader(log, (b'8c736521 {"kind":"commit","n":7,"round":3}\n', b"", b"00000000 {")),
    "datagram": Reader(
        datagram, (packet.Seal(bytes(16)).close(packet.Packet(packet.PacketKind.DATA, 1, 2, 3, 4, b"x")),)
    ),
    "codec": Reader(coded, (bytes(4000), b"\xff" * 4000, b"")),
    "text": Reader(
        text,
        (
            b"15s",
            b"2GiB",
            b"20%",
            b"tcp://[::1]:8786",
            b"0 2 * * *",
            b"Europe/Paris",
            b"*/5 1-5 L * 1#2",
            b"0,add,n1\n500,remove,n1\n",
        ),
    ),
    "fabric": Reader(fabric, (b'{"schema": 3, "points": [], "nodes": []}', b"[]", b'{"schema": null}')),
    "run files": Reader(
        run_files,
        (
            b"\0" + RECORD.as_json(),
            b'\1[[0, 20, "{\\"shard\\": 0}"]]',
            b'\2{"name": "t", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}',
            b'\3{"name": "night", "created": "2026-11-25T00:00:00+00:00"}',
            b'\4{"due": "2026-11-25T00:00:00+00:00", "started": null, "ended": null}',
        ),
    ),
    "signature": Reader(
        signature,
        (
            b"AWS4-HMAC-SHA256 Credential=A/20260101/r/ec2/aws4_request, SignedHeaders=host;x-amz-date, Signature="
            + b"0" * 64,
        ),
    ),
}


def mutations(seed: bytes, count: int) -> list[bytes]:
    """The same odd bytes every time: bits turned, parts cut, doubled, moved and replaced by numbers that are large."""
    dice = random.Random(0)
    value = []
    odd = (b"\0", b"\xff", b"9" * 30, b"-1", b"null", b"[]", b"{}", b'"x"', b"1e400", b"NaN", b"\n", b"\xc2\xb2", b"")
    for _ in range(count):
        content = bytearray(seed)
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(content) + 1)
            end = min(len(content), start + dice.choice((0, 1, 1, 4, 30)))
            content[start:end] = dice.choice((*odd, content[start:end] * 2, bytes([dice.randrange(256)])))
        value.append(bytes(content))
    return value


@functools.cache
def quiet() -> None:
    """Silence warnings about what is repaired or dropped."""
    logging.disable(logging.WARNING)
