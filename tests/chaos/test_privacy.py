"""Another user of the machine gets nowhere: not to the ports of a local run, its page, its files or its memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from idletrain.cluster import access, handshakes
from idletrain.cluster.identity import OPTIONS, Identity

from . import intruder as intruder_module
from .helpers import Control, Process, Run, until

HALF_OPEN = 500  # connections to each port that say nothing
GROWTH_BYTES = 30 << 20  # that they may cost a process, with what it grows by itself meanwhile
OWN_CONNECTIONS = 130  # that a process of the run has at most: its peers' and 100 of the page's readers
REFUSALS = {  # of each attack, by the end of its name or its beginning
    "over tcp": r"CommClosedError in <TCP \(closed\).*(ConnectionResetError|Stream is closed)",
    "over tls": "SSLCertVerificationError",  # the stranger's own check
    "over blind tls": r"CommClosedError in <TLS \(closed\).*(ALERT_UNKNOWN_CA|ConnectionResetError|SSLEOFError)",
    **dict.fromkeys(("signal ", "read "), "^failed: PermissionError$"),
    **dict.fromkeys(("see ", "guess ", "press "), "^failed: 403$"),
}
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root may")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter (pytest's own are closed to others)."""
    folder = Path(tempfile.mkdtemp(prefix="idletrain-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def listening(pid: int) -> list[int]:
    """The ports a process listens at, all of them on loopback."""
    places = [s.laddr for s in psutil.Process(pid).net_connections("tcp") if s.status == psutil.CONN_LISTEN]
    assert {place.ip for place in places} == {"127.0.0.1"}
    return [place.port for place in places]


def targets(run: Run, head: Process) -> dict[str, Any]:
    """What a scan of the machine would find of a run."""
    about = json.loads((run.dir / "cluster.json").read_text())
    worker = run.wait("a worker", "worker_joined")
    page = urlsplit(about["dashboard"]).port
    (scheduler,) = set(listening(about["pid"])) - {page}
    (store,) = listening(head.pid)
    (own,) = listening(worker["pid"])
    files = [str(path) for path in run.dir.rglob("*") if path.is_file()]
    return {
        "run": run.job.name,
        "run_dir": str(run.dir),
        "files": files,
        "worker": worker["worker"],
        "ports": {"scheduler": scheduler, "store": store, "worker": own, "page": page},
        "pids": {"head": head.pid, "scheduler": about["pid"], "worker": worker["pid"]},
    }


@contextlib.contextmanager
def intruding(asked: dict[str, Any], control: Control) -> Iterator[subprocess.Popen[str]]:
    intruder = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.intruder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=control.environment,
        cwd="/",
    )
    assert intruder.stdin is not None
    assert intruder.stdout is not None
    try:
        intruder.stdin.write(json.dumps(asked) + "\n")
        intruder.stdin.flush()
        yield intruder
    finally:
        intruder.kill()
        intruder.wait()
        intruder.stdin.close()
        intruder.stdout.close()


def told(intruder: subprocess.Popen[str]) -> dict[str, Any]:
    assert intruder.stdout is not None
    line = intruder.stdout.readline()
    assert line, "the intruder ended"
    answer: dict[str, Any] = json.loads(line)
    return answer


def refusal_of(attack: str) -> str:
    """The pattern of the refusal that an attack has to meet: any other error is a fault of the intruder's."""
    (pattern,) = [text for part, text in REFUSALS.items() if attack.endswith(part) or attack.startswith(part)]
    return pattern


def resident(pids: dict[str, int]) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


@needs_root
def test_another_user_gets_nowhere_and_the_owner_does_by_the_same_calls(
    open_folder: Path, make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(to=open_folder / "runs", rounds=12)
    control.pace(0.05)
    with open_umask():
        head = run.launch("--allow-control")
    run.wait("a committed round", "round_committed")
    control.pace(0.5)  # the run goes on for two minutes
    asked = {**targets(run, head), "half_open": HALF_OPEN}
    assert len(asked["files"]) > 10
    before = resident(asked["pids"])
    with intruding(asked, control) as intruder:
        done = told(intruder)
        assert len(done) > 30
        assert {what: how for what, how in done.items() if not re.search(refusal_of(what), how)} == {}
        assert told(intruder) == {"opened": [HALF_OPEN] * 4}
        time.sleep(1)  # all of them are accepted
        during, held = resident(asked["pids"]), {name: connections(pid) for name, pid in asked["pids"].items()}
        assert max(held.values()) > 2 * OWN_CONNECTIONS
        until("the half-open ones' end", lambda: max(map(connections, asked["pids"].values())) < OWN_CONNECTIONS, 30)
    grown = {name: during[name] - before[name] for name in before}
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert max(held.values()) < handshakes.MAX_HANDSHAKES + OWN_CONNECTIONS, held
    assert {what for what, pid in asked["pids"].items() if not psutil.pid_exists(pid)} == set()
    assert not run.events("worker_left")
    own = Identity(*((access.folder_of(run.dir) / file).read_text() for file in OPTIONS))
    owners = asyncio.run(intruder_module.over_the_network(asked, {"tls": own.security()}))
    del owners["end a worker over tls"]  # which may end before it answers
    store_answers = "failed: RefusedError pull of subnet 0, round 0: stale-round"  # the run is further on
    assert {what: how for what, how in owners.items() if not how.startswith(("worked", store_answers))} == {}
    assert run.wait("the worker's end", "worker_left")["worker"] == asked["worker"]
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert not access.folder_of(run.dir).exists()


def connections(pid: int) -> int:
    open_ = [s for s in psutil.Process(pid).net_connections("tcp") if s.status == psutil.CONN_ESTABLISHED]
    return len(open_)


def test_files_are_for_their_owner_alone_whatever_the_umask(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=2)
    control.pace(0.05)
    with open_umask():
        head = run.launch()
    run.wait("a committed round", "round_committed")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (run.dir, *run.dir.rglob("*")) if path.exists()}
    names = {path.name for path in modes}
    assert names >= {
        "wal",
        "events.jsonl",
        "job.json",
        "lock",
        "cluster.json",
        "scheduler.log",
        "key",
        "token",
        "network",
    }
    open_ = {str(path) for path, mode in modes.items() if mode & 0o077 and "tensorboard" not in path.parts}
    assert open_ == set()
    control.pace(0)
    assert head.exit_code() == 0, head.text


def test_the_owner_s_worker_joins_by_the_run_s_name(
    make_run: Callable[..., Run], control: Control, started: list[Process], undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3)
    control.hold()
    head = run.launch()
    run.wait("the start", "run_started")
    command = [sys.executable, "-m", "idletrain", "worker", run.dir, "--name", "lent", "--memory", "1GiB"]
    lent = Process(command, control.environment, run.scratch / "lent.log", run.scratch)
    started.append(lent)
    run.wait("the lent worker", "worker_joined", lambda e: e["name"] == "lent")
    control.release()
    assert head.exit_code() == 0, head.text
    assert lent.exit_code() == 0, lent.text
    run.check(undisturbed())
    late = Process(command, control.environment, run.scratch / "late.log", run.scratch)
    started.append(late)
    assert late.exit_code() == 1
    assert "does not train on this machine now" in late.text


def test_the_owner_gets_the_link_and_the_records_do_not_have_it(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=2)
    control.pace(0.5)
    head = run.launch()
    page = run.wait("the start", "run_started")["dashboard"]
    link = access.link(run.dir, page)
    assert "?token=" in link
    status = [sys.executable, "-m", "idletrain", "status", str(run.dir)]
    assert link in subprocess.run(status, capture_output=True, text=True, check=True).stdout
    token = link.partition("?token=")[2]
    control.pace(0)
    assert head.exit_code() == 0, head.text
    assert link in head.text
    for file in run.dir.rglob("*"):
        if file.is_file():
            assert token.encode() not in file.read_bytes(), file
