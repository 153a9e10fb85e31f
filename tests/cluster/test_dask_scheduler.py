"""The scheduler's process, and that it does not outlive the one that started it."""

from __future__ import annotations

import datetime
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from idletrain.cluster import certificates, shutdown
from idletrain.cluster.dask_scheduler import PORTS, free_port

PAGES = (
    "/status",
    "/idletrain",
    "/idletrain/view.json",
    "/metrics",
    "/info/main/workers.html",
    "/health",
)


def status_of(page: str | urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(page, timeout=30) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_scheduler_prints_its_addresses_on_loopback_and_ends_when_its_input_does() -> None:
    command = [sys.executable, "-m", "idletrain.cluster.dask_scheduler"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write('{"host": "127.0.0.1", "port": 0, "identity": null}\n')
        process.stdin.flush()
        address, dashboard = (process.stdout.readline().strip() for _ in range(2))
        assert address.startswith("tcp://127.0.0.1:")
        assert dashboard.startswith("http://127.0.0.1:")
        with ThreadPoolExecutor() as pool:  # the first to ask wake the pages up, which both may do
            pages = (dashboard, dashboard.replace("status", "idletrain"), dashboard.replace("status", ""))
            assert list(pool.map(status_of, pages)) == [200, 200, 200]
        process.stdin.close()
        assert process.wait(timeout=30) == 0


def test_with_an_identity_the_scheduler_speaks_tls_and_no_page_opens_without_the_token() -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    identity = certificates.issue("night", ("local",), soon)["local"]
    settings = {"host": "127.0.0.1", "port": 0, "identity": asdict(identity)}
    command = [sys.executable, "-m", "idletrain.cluster.dask_scheduler"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        address, dashboard = (process.stdout.readline().strip() for _ in range(2))
        assert address.startswith("tls://127.0.0.1:")
        base = dashboard.removesuffix("/status")
        for path in PAGES:
            assert status_of(base + path) == 403, path
        for path in PAGES:
            asked = urllib.request.Request(base + path, headers={"Authorization": f"Bearer {identity.dashboard_token}"})
            assert status_of(asked) == 200, path
        process.stdin.close()
        assert process.wait(timeout=30) == 0


def test_a_process_acts_when_its_parent_s_pipe_is_closed() -> None:
    program = (
        "import os, threading\n"
        f"from {shutdown.__name__} import when_parent_ends\n"
        "when_parent_ends(lambda: os._exit(7))\n"
        "print('ready', flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("what is written does not matter\n")
        process.stdin.close()
        assert process.wait(timeout=30) == 7


def test_a_dashboard_s_port_in_use_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < free_port(port) <= port + PORTS
    assert free_port(port) == port
