"""Build namespaces, a switch, and links shaped in both directions, outside of the machine's own namespace.

A node's `eth0` leads to a port of the switch that has the node's name. Packets that the node sends wait in eth0's
queue, packets for it in the port's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from idletrain_testbed import processes
from idletrain_testbed.instance import SWITCH, Instance, alone
from idletrain_testbed.rights import netfilter
from idletrain_testbed.settings import Settings, TestbedError

# How long a link may stay idle for lack of a CPU and still catch up: enough for a timer that is late on a busy machine,
# too short to be seen in a transfer of 0.1 s.
BURST_SECONDS = 0.002
LEAST_BURST = 5_000  # bytes: tbf drops what is larger than its burst; three packets
# What a cheap switch holds per port, and enough for CUBIC to fill a link of 50 ms there and back.
QUEUE_SECONDS = 0.05
LEAST_QUEUE = (
    256_000  # bytes: one socket hands over two segments of 64 kB at once; a queue of 64 kB lost five packets a flow
)
CONGESTION = "ipv4/tcp_congestion_control"
# Of devices to come, so not of lo: IPv6's advertisements would count as a node's traffic.
QUIET = {"ipv6/conf/default/disable_ipv6": "1"}


class Counters(NamedTuple):
    """Bytes that a node's link carried, Ethernet headers included."""

    sent: int
    received: int


def tbf(rate: int, queue: int | None) -> str:
    """Return `tc`'s arguments for a link of `rate` bits per second with a queue of up to `queue` bytes."""
    burst = max(round(rate / 8 * BURST_SECONDS), LEAST_BURST)
    limit = queue or max(round(rate / 8 * QUEUE_SECONDS), LEAST_QUEUE)
    return f"tbf rate {rate}bit burst {burst} limit {limit}"


def build(instance: Instance, settings: Settings) -> None:
    """Create the instance's namespaces, its switch and its links."""
    _batch(["ip"], (f"netns add {instance.namespace(node)}" for node in (SWITCH, *instance.nodes)))
    with _allowed(settings.congestion):
        for node in (SWITCH, *instance.nodes):
            processes.write_settings(instance.namespace_path(node), {CONGESTION: settings.congestion} | QUIET)
    ports = [
        f"link add name {node} type veth peer name eth0 netns {instance.namespace(node)}\nlink set {node} master br0 up"
        for node in instance.nodes
    ]
    switch = ("link add name br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0", "link set br0 up")
    _batch(["ip", "-n", instance.namespace(SWITCH)], (*switch, *ports))
    # A segment of 64 kB travels as one: one loss would take all of it, and a short queue has no room for any.
    segments = " gso_max_segs 1" if settings.loss or settings.queue else ""
    for node in instance.nodes:
        lines = ("link set lo up", f"address add {instance.address(node)}/24 dev eth0", f"link set eth0{segments} up")
        _batch(["ip", "-n", instance.namespace(node)], lines)
    _shape(instance, {node: rate for node in instance.nodes if (rate := settings.rate(node))})
    if settings.delay or settings.loss:
        rules = netfilter(bool(settings.delay), settings.loss)
        for node in instance.nodes:
            _run([*processes.nsenter(instance, node), "iptables-restore"], rules)
    if settings.delay:
        processes.start_delayer(instance, settings.delay)


def shape(instance: Instance, node: str, rate: int) -> None:
    """Change the rate of a node's link in both directions, in bits per second."""
    _shape(instance, {instance.known(node): rate})


def cut(instance: Instance, node: str) -> None:
    """Drop all packets of a node's link; its device stays up, as when a cable elsewhere breaks."""
    _plug(instance, node, "nomaster")


def heal(instance: Instance, node: str) -> None:
    """Let a cut link carry traffic again."""
    _plug(instance, node, "master br0")


def counters(instance: Instance, node: str) -> Counters:
    """Return the bytes that a node's link has carried since it was created."""
    sent, received = instance.namespace(instance.known(node)), instance.namespace(SWITCH)
    (up,), (down,) = (
        json.loads(_run(["tc", "-n", space, "-s", "-j", "qdisc", "show", "dev", device, "root"]))
        for space, device in ((sent, "eth0"), (received, node))
    )
    if up["kind"] == "tbf":
        return Counters(up["bytes"], down["bytes"])
    # Not shaped: the device counts a 64 kB segment's headers once, not once per packet as tbf does.
    (device,) = json.loads(_run(["ip", "-n", sent, "-s", "-j", "link", "show", "dev", "eth0"]))
    return Counters(device["stats64"]["tx"]["bytes"], device["stats64"]["rx"]["bytes"])


def delivered(instance: Instance) -> int:
    """Return the bytes that all shaped links together have delivered to their nodes, by one call of `tc`."""
    ports = json.loads(_run(["tc", "-n", instance.namespace(SWITCH), "-s", "-j", "qdisc", "show"]))
    return sum(port["bytes"] for port in ports if port["kind"] == "tbf")


def remove(instance: Instance) -> None:
    """Remove the instance's namespaces that exist, with all devices in them."""
    _batch(["ip"], (f"netns del {instance.namespace(node)}" for node in instance.namespaces()))


@contextlib.contextmanager
def _allowed(congestion: str) -> Iterator[None]:
    """Allow a congestion control while the context lasts: Linux refuses to namespaces what users may not choose."""
    sysctl = processes.SYSCTL / "ipv4"
    if congestion not in (sysctl / "tcp_available_congestion_control").read_text().split():
        raise TestbedError(f"congestion {congestion!r}: this kernel does not have it; try `modprobe tcp_{congestion}`.")
    allowed = sysctl / "tcp_allowed_congestion_control"
    with alone():
        before = allowed.read_text().split()
        if congestion in before:
            yield
            return
        allowed.write_text(" ".join([*before, congestion]))
        try:
            yield
        finally:
            allowed.write_text(" ".join(before))


def _shape(instance: Instance, rates: dict[str, int]) -> None:
    ports = (f"qdisc replace dev {node} root {tbf(rate, instance.queue)}" for node, rate in rates.items())
    _batch(["tc", "-n", instance.namespace(SWITCH)], ports)
    for node, rate in rates.items():
        _batch(["tc", "-n", instance.namespace(node)], [f"qdisc replace dev eth0 root {tbf(rate, instance.queue)}"])


def _plug(instance: Instance, node: str, port: str) -> None:
    # A disabled port is enabled again by any change of the device, and the node sees a device that is down.
    _batch(["ip", "-n", instance.namespace(SWITCH)], [f"link set {instance.known(node)} {port}"])


def _batch(argv: Sequence[str], lines: Iterable[str]) -> None:
    _run([*argv, "-batch", "-"], "\n".join([*lines, ""]))


def _run(argv: Sequence[str], text: str = "") -> Any:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"`{' '.join(argv)}` failed ({' '.join(done.stderr.split())}): is the instance still up?")
    return done.stdout
