"""What a node tells of itself: its interface, kernel, processors, and which libraries could move its gradients."""

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

from idletrain.worker.cohort import cpu_model

NET = Path("/sys/class/net")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
# What lets a network card write into a GPU's memory: a peer-memory module, or the kernel's own DMA buffers.
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
OPEN_DRIVER = Path("/proc/driver/nvidia/version")


def describe(address: str) -> dict[str, Any]:
    """This node, as others reach it at an IP address."""
    import torch
    from torch import distributed

    name, mtu, link = interface_of(address)
    there = distributed.is_available()
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
        "gloo": there and distributed.is_gloo_available(),
        "nccl": there and distributed.is_nccl_available() and torch.cuda.is_available(),
        "mpi": there and distributed.is_mpi_available(),
        "gpudirect": gpudirect(torch.cuda.is_available()),
    }


def interface_of(address: str) -> tuple[str, int | None, int | None]:
    """The interface with an address, its MTU, and its speed in bits a second as far as the kernel knows."""
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == address for found in addresses):
            told = _read(NET / name / "speed")  # -1 or unreadable where there is no cable; veth says 10000 always
            speed = int(told) * 10**6 if told.isdigit() and not _is_virtual(name) else None
            return name, stats[name].mtu if name in stats else None, speed
    return "", None, None


def _is_virtual(interface: str) -> bool:
    """Whether an interface has no device behind it, whose speed would be a guess."""
    return not (NET / interface / "device").exists()


def gpudirect(has_gpus: bool) -> str:
    """Whether network cards can reach a GPU's memory, in words."""
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
    """Whether `nvidia-smi` sees RDMA-capable network cards beside the GPUs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S607
        return "NIC" in shown.stdout or "mlx5" in shown.stdout
    return False


def unlike_versions(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Libraries that are not the same everywhere, a sentence each: what they do to figures is nobody's network."""
    told = []
    for library in ("torch", "distributed", "python"):
        by: dict[str, list[str]] = {}
        for node in nodes:
            by.setdefault(str(node[library]), []).append(str(node["name"]))
        if len(by) > 1:
            parts = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(by.items()))
            told.append(f"{library} is not the same on all nodes ({parts}); install the same")
    return told


def own_address() -> str:
    """This process' Dask worker's IP address; as others reach it."""
    from distributed import get_worker

    host = str(get_worker().address).split("://", 1)[-1].rsplit(":", 1)[0].strip("[]")
    return str(socket.getaddrinfo(host, None)[0][4][0])


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
