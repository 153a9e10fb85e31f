"""The command line: what it prints, how it ends, and that it says how to fix what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from idletrain_testbed import missing

MISSING = missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=" ".join(MISSING))
CLI = [sys.executable, "-c", "from idletrain_testbed.cli import main; main()"]
WITHOUT_RIGHTS = """
import ctypes, os, sys
for capability in (12, 21):  # CAP_NET_ADMIN, CAP_SYS_ADMIN; 24 is PR_CAPBSET_DROP
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *argv], capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture(scope="module")
def up() -> Iterator[dict[str, Any]]:
    done = run("up", "--nodes", "2", "--link", "100mbit", "--json")
    assert done.returncode == 0, done.stderr
    state: dict[str, Any] = json.loads(done.stdout)
    yield state
    assert run("down", "--name", state["name"]).returncode == 0
    assert not [*Path("/run/netns").glob(f"*{state['name']}*")]


def test_an_instance_outlives_the_command_that_made_it(up: dict[str, Any]) -> None:
    assert list(up["nodes"]) == ["head", "n0", "n1"]
    assert {node["link"] for node in up["nodes"].values()} == {100_000_000}
    assert up["name"] in run("list").stdout


def test_exec_hands_on_arguments_input_output_and_exit_code(up: dict[str, Any]) -> None:
    script = 'cat; echo "$1" >&2; exit 7'
    done = run("exec", "--name", up["name"], "n1", "sh", "-c", script, "sh", "--name", input="given")
    assert (done.returncode, done.stdout, done.stderr) == (7, "given", "--name\n")


def test_exec_runs_on_the_node(up: dict[str, Any]) -> None:
    done = run("exec", "--name", up["name"], "n1", "ip", "-j", "address", "show", "dev", "eth0")
    (device,) = json.loads(done.stdout)
    assert device["addr_info"][0]["local"] == up["nodes"]["n1"]["address"]


def test_links_are_cut_healed_and_changed(up: dict[str, Any]) -> None:
    for command in (["cut", "n0"], ["heal", "n0"], ["link", "n0", "5mbit"]):
        assert run(*command, "--name", up["name"]).returncode == 0
    done = run("exec", "--name", up["name"], "n0", "tc", "-j", "qdisc", "show", "dev", "eth0")
    assert json.loads(done.stdout)[0]["options"]["rate"] * 8 == 5_000_000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cut", "n7"], "has no node 'n7': name one of head, n0 to n1."),
        (["link", "n0", "5mbps"], "link '5mbps': write a number and one of bit, kbit, mbit, gbit."),
        (["down", "--name", "nobody"], "No instance nobody is up"),
        (["up", "--congestion", "hope"], "congestion 'hope': this kernel does not have it"),
        (["up", "--name", "No!"], "name 'No!': use up to 31 small letters, digits and hyphens."),
    ],
)
def test_what_is_wrong_is_one_line_that_says_what_to_do(up: dict[str, Any], argv: list[str], message: str) -> None:
    named = [] if argv[0] in {"up", "down"} else ["--name", up["name"]]
    done = run(*argv, *named)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_the_rights_it_says_which() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, *CLI, "up"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "idletrain-testbed: CAP_NET_ADMIN is missing: run as root.\nCAP_SYS_ADMIN is missing: run as root.\n"
    )


def test_without_a_tool_it_says_which_and_where_to_get_it(tmp_path: Path) -> None:
    for tool in ("ip", "nsenter", "unshare"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = run("up", env=os.environ | {"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "idletrain-testbed: tc is missing: install iproute2.\n"
