"""Readers of what a run and this machine keep: records, logs, snapshots, schedules, caches and certificates."""

from __future__ import annotations

import datetime
import fcntl
import functools
import hashlib
import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from distributed.security import Security
from reader import LONGEST_ERROR, NOW, Reader, fields_in, file_of
from torch import nn

from idletrain.autotune import probe
from idletrain.cli import places
from idletrain.cluster import access, contact
from idletrain.cluster.identity import Identity
from idletrain.errors import DamageError
from idletrain.exchange.messages import checksum
from idletrain.fabric.analysis import samples
from idletrain.nn.data import stream_position
from idletrain.nn.ist.groups import whole
from idletrain.nn.network import Network
from idletrain.observe import display, records, report
from idletrain.rounds.durable import history, module_state, recovery, snapshots, updates, write_ahead_log
from idletrain.rounds.durable.stream_positions import StreamPositions
from idletrain.schedules.store import ScheduleStore
from idletrain.sweeps import grid
from idletrain.sweeps.trial_results import ResultsFile

RUN = Path("run")
SNAPSHOT = RUN / "snapshots" / f"{1:08d}"
UPDATE = bytes(64)


def events(content: bytes) -> object:
    """All that status and report show of a run."""
    value = list(records.parse(content.splitlines()))
    past = report.PastRun.of("run", value, NOW)
    return report.short(past), report.report_page([past]), list(display.final_lines(past.summary, "done"))


def log(content: bytes) -> object:
    return write_ahead_log.read(file_of(content, "wal"))


def log_history(content: bytes) -> object:
    """A log whose lines are whole, whatever they say."""
    lines = (b"%08x %s\n" % (zlib.crc32(line), line) for line in content.splitlines())
    file_of(b"".join(lines), "run/wal")
    return history.read_history(RUN).best_round("accuracy")


@functools.cache
def module() -> nn.Module:
    return nn.BatchNorm1d(3)


@functools.cache
def snapshot() -> Mapping[str, bytes]:
    """The files of a sound snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        snapshots.write(Path(folder), 1, Network(whole(module()), 1), lambda _: None)
        module_state.write(Path(folder), 1, module())
        return {path.name: path.read_bytes() for path in Path(folder).glob("snapshots/*/*")}


def snapshot_file(content: bytes) -> object:
    """One file of a snapshot, or the record of an update; the first byte chooses which."""
    kind, content = content[0] % 4 if content else 0, content[1:]
    if kind == 3:
        record = {**fields_in(content), "kind": "stage", "n": 0}
        staged = history.collect([record]).staged
        file_of(UPDATE, "run/updates/00000000")
        return [updates.read(updates.path_of(RUN, 0), s) for by_subnet in staged.values() for s in by_subnet.values()]
    files = {**snapshot(), (module_state.STATE_FILE, "manifest.json", "network")[kind]: content}
    if kind == 2:
        manifest = {"round": 1, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files["manifest.json"] = json.dumps(manifest).encode()
    for name, data in files.items():
        file_of(data, str(SNAPSHOT / name))
    module_state.read(RUN, 1)
    snapshots.load(RUN, 1, Network(whole(module()), 1))
    return None


def small_file(content: bytes) -> object:
    """Small files of JSON; the first byte chooses which."""
    kind, content = content[0] % 10 if content else 0, content[1:]
    if kind == 0:
        file_of(content, "streams.json")
        return StreamPositions(Path()).at(0, 9)
    if kind == 1:
        file_of(content, "job.json")
        return recovery.read_job(Path())
    if kind == 2:
        return stream_position.decoded(content.decode(errors="replace"))
    if kind == 3:
        return cluster_file(content)
    if kind == 4:
        file_of(content, "fleet.json")
        return probe.load_figures(Path(), "fleet", NOW)
    if kind == 7:
        return places.parse_note(content)
    if kind == 8:
        return ResultsFile(file_of(content, "runs/x.sweep.json")).read(["a"])
    if kind == 9:
        return grid.parse_varied(content.decode(errors="replace"))
    file_of(content, "schedules/night.json" if kind == 5 else "schedules/night.history.jsonl")
    store = ScheduleStore(Path("schedules"))
    return store.get("night") if kind == 5 else store.history("night")


def cluster_file(content: bytes) -> object:
    """The addresses of a run that trains on this machine now: its head holds its lock."""
    file_of(content, "run/cluster.json")
    access.folder_of(RUN).mkdir(exist_ok=True)
    with file_of(b"1", "run/lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        return access.find(RUN)


def certificate(content: bytes) -> object:
    """Certificates and a key in one file, of which something is said, or an identity as a cloud keeps it."""
    if content[:1] == b"{":
        return Identity.from_json(content.decode(errors="replace")).dashboard_token
    file = str(file_of(content, "all.pem"))
    security = Security(tls_ca_file=file, tls_worker_cert=file, tls_worker_key=file, require_encryption=True)
    fault = contact.certificate_fault(security, "worker")
    assert len(fault) < LONGEST_ERROR
    if fault:
        raise DamageError(fault)
    return None


def pem() -> bytes:
    """A certificate of itself and its key, the same every time."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1)
    builder = builder.not_valid_before(datetime.datetime(2020, 1, 1)).not_valid_after(datetime.datetime(2120, 1, 1))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    made = builder.sign(key, None).public_bytes(serialization.Encoding.PEM)
    return made + key.private_bytes(serialization.Encoding.PEM, *private)


def fabric(content: bytes) -> object:
    return samples.from_json(content, "x.json")


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

HISTORY = b"""\
{"epoch":1,"format":3,"kind":"epoch","n":0,"round":0,"subnets":[{"share":1.0,"kind":"neurons","copies":1}],"drop":false}
{"kind":"stage","n":1,"round":0,"subnet":0,"steps":5,"offset":0,"size_bytes":64,"checksum":1}
{"kind":"late_rows","n":2,"round":0,"subnet":0,"steps":5,"offset":0,"size_bytes":64,"checksum":1,"number":1,"of":0}
{"kind":"commit","n":3,"round":0,"staged":[[0,5]],"next_subnets":[{"share":1.0}]}
{"kind":"evaluated","n":4,"round":1,"metric":"accuracy","score":0.5,"best":true}
{"kind":"restored","n":5,"round":1}
{"kind":"end","n":6,"status":"completed","params_sha256":"0"}
"""
STAGED = {"subnet": 0, "steps": 5, "offset": 0, "size_bytes": len(UPDATE), "checksum": checksum([UPDATE])}
MISPLACED = (
    {"offset": -4},
    {"offset": "0"},
    {"offset": 0.5},
    {"offset": 1 << 70},
    {"size_bytes": -1},
    {"size_bytes": 1 << 70},
    {"size_bytes": 63, "checksum": checksum([UPDATE[:63]])},
    {"size_bytes": None},
)
SCHEDULE = {
    **dict.fromkeys(("job", "directory", "cloud", "on", "if_running"), "x"),
    "name": "night",
    "cron": "0 2 * * *",
    "tz": "Europe/Paris",
    "created": "2026-11-25T00:00:00+00:00",
}
TRIAL = b"""\
{"a": {"state": "failed", "reason": "", "began": true, "values": [[1, 2]], "record": {}, "usd": 0, \
"settings": {"training.optimizer.lr": 0.1}, "run_dir": "runs/a", "rounds": 4}}
"""
POSITION = stream_position.StreamPosition(0, 1, 2, 3, 0, 6, {"epoch": 0}).encoded()

READERS = {
    "events": Reader(
        events,
        runs=800,
        sound=(EVENTS,),
        modules=("observe.records",),
        odd=(
            b'{"kind": []}\n{"kind": "staged"}\n[1]\n"x"\nnull\n' + b"[" * 2000,
            b"\n".join(reversed(EVENTS.splitlines())),  # a machine launched after the run's end
        ),
    ),
    "log": Reader(
        log,
        runs=100_000,
        sound=(b'8c736521 {"kind":"commit","n":7,"round":3}\n', b"", b"00000000 {"),
        modules=("rounds.durable.write_ahead_log",),
    ),
    "history": Reader(
        log_history,
        runs=85_000,
        sound=(HISTORY,),
        modules=("rounds.durable.history",),
        odd=(b'{"kind": "stage", "n": 0}',),
    ),
    "snapshot": Reader(
        snapshot_file,
        runs=80_000,
        sound=(
            b"\0" + snapshot()[module_state.STATE_FILE],
            b"\1" + snapshot()["manifest.json"],
            b"\2" + snapshot()["network"],
            b"\3" + json.dumps(STAGED).encode(),
        ),
        modules=("rounds.durable.module_state", "rounds.durable.snapshots", "rounds.durable.updates"),
        odd=(
            b'\3{"subnet": 0}',
            b"\1" + b"[" * 2000,
            *(b"\3" + json.dumps({**STAGED, **place}).encode() for place in MISPLACED),
        ),
    ),
    "small files": Reader(
        small_file,
        runs=100_000,
        sound=(
            b'\0[[0, 20, "{\\"shard\\": 0}"]]',
            b'\1{"name": "t", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}',
            b"\2" + POSITION.encode(),
            b'\3{"scheduler": "tls://127.0.0.1:1"}',
            b'\4{"seen": 1.8e9, "fleet": {}}',
            b"\5" + json.dumps(SCHEDULE).encode(),
            b'\6{"due": "2026-11-25T00:00:00+00:00", "run": "night-1", "started": null, "ended": null}',
            b'\7{"run": "night", "cloud": "aws", "region": "eu-west-1", "rehearsal": null}',
            b"\x08" + TRIAL,
            b"\x09training.optimizer.lr=0.05,0.1",
        ),
        modules=(
            "rounds.durable.stream_positions",
            "rounds.durable.recovery",
            "nn.data.stream_position",
            "cluster.access",
            "autotune.probe",
            "schedules.store",
            "cli.places",
            "sweeps.trial_results",
            "sweeps.grid",
        ),
        odd=(b"\3[]", b"\3x", b"\4" + b"[" * 2000, b'\0[[0, 1e400, "x"]]', b"\x09" + b"x" * 5000),
    ),
    "certificates": Reader(
        certificate,
        runs=2_500,
        sound=(pem(), b'{"ca": "x", "cert": "y", "key": "z"}'),
        modules=("cluster.contact", "cluster.identity"),
        odd=(
            b'{"ca": 1, "cert": 2, "key": 3}',
            b"{",
            pem().replace(b"wMDEwMTAwMDAwMFo", b"wMDEwMTAwMDAgMFo"),
        ),  # no date
    ),
    "fabric": Reader(
        fabric,
        runs=6_000_000,
        sound=(b'{"schema": 2, "points": [], "nodes": [], "about": {}}',),
        modules=("fabric.analysis.samples",),
        odd=(b"[]", b'{"schema": null}', b"[" * 2000),
    ),
}
