"""Check what this machine lacks for a testbed: rights, tools, parts of the kernel; tried in temporary namespaces."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from idletrain_testbed import cgroups

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}  # and the Debian package of each
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # their bits, linux/capability.h


def missing(*, cpus: bool = False, memory: bool = False, delay: bool = False, loss: bool = False) -> list[str]:
    """Return a sentence for everything that is missing for a testbed with these limits, delay and loss."""
    faults = missing_capabilities()
    tools = TOOLS | ({"iptables-restore": "iptables"} if delay or loss else {})
    faults += [f"{tool} is missing: install {package}." for tool, package in tools.items() if not shutil.which(tool)]
    if not faults:
        faults += _missing_in_kernel(delay, loss)
    return faults + cgroups.missing(cpus=cpus, memory=memory)


def missing_capabilities() -> list[str]:
    """Return a sentence for each missing capability; commands on an existing instance need them, too."""
    held = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    return [f"{name} is missing: run as root." for name, bit in CAPABILITIES.items() if not held >> bit & 1]


def netfilter(delay: bool, loss: float) -> str:
    """Return iptables-restore's rules for a node's end of its link: drop packets at random, queue the others."""
    lose = f"-A PREROUTING -i eth0 -m statistic --mode random --probability {loss:.9f} -j DROP\n" if loss else ""
    wait = "-A PREROUTING -i eth0 -j NFQUEUE --queue-num 0\n" if delay else ""
    return f"*raw\n{lose}{wait}COMMIT\n"


@functools.cache
def _missing_in_kernel(delay: bool, loss: bool) -> tuple[str, ...]:
    trials: dict[str, tuple[str, str]] = {
        "Network namespaces": ("true", ""),
        "veth": ("ip link add name veth0 type veth peer name veth1", ""),
        "bridge": ("ip link add name br0 type bridge", ""),
        "tc's tbf": ("tc qdisc add dev lo root tbf rate 1mbit burst 5000 limit 5000", ""),
    }
    if loss:
        trials["iptables' statistic match"] = ("iptables-restore", netfilter(delay=False, loss=0.5))
    if delay:
        trials["iptables' NFQUEUE target"] = ("iptables-restore", netfilter(delay=True, loss=0))
    return tuple(
        f"{what} are not available here: use a kernel, and a container, that allow them."
        for what, (command, text) in trials.items()
        if not _succeeds(["unshare", "--net", *command.split()], text)
    )


def _succeeds(argv: Sequence[str], text: str) -> bool:
    return not subprocess.run(argv, input=text, capture_output=True, text=True, check=False).returncode
