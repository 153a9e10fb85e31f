"""The scheduler's process, and that it does not outlive the one that started it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from idletrain.fleet import parent
from idletrain.fleet.local import LocalFleet
from idletrain.fleet.scheduler import PORTS, free_port


def wait_for(page: str) -> None:
    """Dask's pages come with the first worker."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(page, timeout=30) as answer:
                assert answer.status == 200
                return
        except urllib.error.HTTPError as error:
            error.close()
            assert time.monotonic() < deadline, page
        time.sleep(0.1)


def test_the_scheduler_tells_its_addresses_on_loopback_and_ends_when_its_input_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "idletrain.fleet.scheduler"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write('{"host": "127.0.0.1", "port": 0, "identity": null}\n')
        process.stdin.flush()
        address, dashboard = (process.stdout.readline().strip() for _ in range(2))
        assert address.startswith("tcp://127.0.0.1:")
        assert dashboard.startswith("http://127.0.0.1:")
        fleet = LocalFleet(address, 1 << 28, tmp_path)
        fleet.start(1)
        wait_for(dashboard)
        process.stdin.close()
        asyncio.run(fleet.close())
        assert process.wait(timeout=30) == 0


def test_a_process_acts_when_its_parent_s_pipe_is_closed() -> None:
    program = (
        "import os, threading\n"
        f"from {parent.__name__} import when_parent_ends\n"
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
