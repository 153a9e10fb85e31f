"""What this machine lacks for a testbed: rights, tools, parts of the kernel. Found by trying, in a namespace of its own."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from idletrain_testbed import cgroups

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}  # and the Debian package of each
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # their bits, linux/capability.h


def missing(*, cpus: bool = False, memory: bool = False, delay: bool = False, loss: bool = False) -> list[str]:
    """Sentences that name what is missing for a testbed, and for each kind of emulation asked for; empty: all is here."""
    held = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    lacking = [f"{name} is missing: run as root." for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    tools = TOOLS | ({"iptables-restore": "iptables"} if delay or loss else {})
    lacking += [f"{tool} is missing: install {package}." for tool, package in tools.items() if not shutil.which(tool)]
    if not lacking:
        lacking += _kernel_lacks(delay, loss)
    return lacking + cgroups.missing(cpus=cpus, memory=memory)


def netfilter(delay: bool, loss: float) -> str:
    """Rules for iptables-restore at a node's end of its link: packets get lost, those that are left wait in queue 0."""
    lose = f"-A PREROUTING -i eth0 -m statistic --mode random --probability {loss:.9f} -j DROP\n" if loss else ""
    wait = "-A PREROUTING -i eth0 -j NFQUEUE --queue-num 0\n" if delay else ""
    return f"*raw\n{lose}{wait}COMMIT\n"


@functools.cache
def _kernel_lacks(delay: bool, loss: bool) -> tuple[str, ...]:
    space = f"idletrain-probe-{os.getpid()}"
    inside = ("nsenter", f"--net=/run/netns/{space}", "--")
    trials = {
        "veth": (f"ip -n {space} link add name veth0 type veth peer name veth1".split(), ""),
        "bridge": (f"ip -n {space} link add name br0 type bridge".split(), ""),
        "tc tbf": (f"tc -n {space} qdisc add dev lo root tbf rate 1mbit burst 5000 limit 5000".split(), ""),
    }
    if loss:
        trials["iptables' statistic match"] = ((*inside, "iptables-restore"), netfilter(delay=False, loss=0.5))
    if delay:
        trials["iptables' NFQUEUE target"] = ((*inside, "iptables-restore"), netfilter(delay=True, loss=0))
    made = subprocess.run(("ip", "netns", "add", space), capture_output=True, text=True, check=False)
    if made.returncode:
        return (f"Network namespaces cannot be made ({made.stderr.strip()}): use a kernel and a container with them.",)
    try:
        return tuple(
            f"{what} is missing: use a kernel that has it."
            for what, (argv, text) in trials.items()
            if subprocess.run(argv, input=text, capture_output=True, text=True, check=False).returncode
        )
    finally:
        subprocess.run(("ip", "netns", "del", space), check=True)
