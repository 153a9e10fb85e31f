"""Describe a node: its interface, kernel, processors, and the libraries that could move its gradients."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from idletrain.nn.compiler import cpu_model

NET = Path("/sys/class/net")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
# A network card writes into a GPU's memory by a peer-memory module or by the kernel's DMA buffers (open driver).
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
OPEN_DRIVER = Path("/proc/driver/nvidia/version")


def describe(address: str) -> dict[str, Any]:
    """Describe this node, which others reach at an IP address, as plain JSON values."""
    import torch
    from torch import distributed

    name, mtu, link = interface_of(address)
    available = distributed.is_available()
    return {
        "host": platform.node(),
        "address": address,
        "interface": name,
        "mtu": mtu,
        "link_bits_per_second": link,
        "kernel": platform.release(),
        "congestion": _read(CONGESTION),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distributed": importlib.metadata.version("distributed"),
        "gloo": available and distributed.is_gloo_available(),
        "nccl": available and distributed.is_nccl_available() and torch.cuda.is_available(),
        "mpi": available and distributed.is_mpi_available(),
        "gpudirect": gpudirect(torch.cuda.is_available()),
    }


def interface_of(address: str) -> tuple[str, int | None, int | None]:
    """Return the name of the interface with an address, its MTU, and its speed in bits/s; None where unknown."""
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%")[0] == address for known in addresses):
            reported = _read(NET / name / "speed")  # -1 or unreadable without a cable; veth always says 10000
            speed = int(reported) * 10**6 if reported.isdecimal() and not _is_virtual(name) else None
            return name, stats[name].mtu if name in stats else None, speed
    return "", None, None


def _is_virtual(interface: str) -> bool:
    """Return whether an interface has no device behind it; its speed would be a guess."""
    return not (NET / interface / "device").exists()


def gpudirect(has_gpus: bool) -> str:
    """Return a phrase that says whether network cards can reach a GPU's memory directly."""
    if not has_gpus:
        return "no GPU"
    modules = {line.split()[0] for line in _read(Path("/proc/modules")).splitlines()}
    if loaded := [module for module in PEER_MODULES if module in modules]:
        return f"by {loaded[0]}"
    open_driver = "Open Kernel Module" in _read(OPEN_DRIVER)
    if open_driver and _topology_has_cards():
        return "by DMA buffers (open driver)"
    return "off: no peer-memory module; data is staged through the host"


def _topology_has_cards() -> bool:
    """Return whether `nvidia-smi` lists RDMA-capable network cards beside the GPUs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S607
        return "NIC" in shown.stdout or "mlx5" in shown.stdout
    return False


def unlike_versions(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each library whose version differs between nodes, which would distort results."""
    sentences = []
    for library in ("torch", "distributed", "python"):
        names_by_version: dict[str, list[str]] = {}
        for node in nodes:
            names_by_version.setdefault(str(node[library]), []).append(str(node["name"]))
        if len(names_by_version) > 1:
            parts = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(names_by_version.items()))
            sentences.append(f"{library} is not the same on all nodes ({parts}); install the same")
    return sentences


def own_address() -> str:
    """Return the IP address at which others reach this process' Dask worker."""
    from distributed import get_worker

    host = str(get_worker().address).split("://", 1)[-1].rsplit(":", 1)[0].strip("[]")
    return str(socket.getaddrinfo(host, None)[0][4][0])


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
