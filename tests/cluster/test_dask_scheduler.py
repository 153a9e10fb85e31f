"""The scheduler's process, and that it does not outlive the one that started it."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from idletrain.cluster import shutdown
from idletrain.cluster.dask_scheduler import PORTS, free_port


def status_of(page: str) -> int:
    with urllib.request.urlopen(page, timeout=30) as answer:
        status: int = answer.status
        return status


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
