"""Which machines compute the same bits."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """The processor's name."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def numeric_cohort(device: torch.device) -> str:
    """Workers of one cohort compute the same bits: same torch, processor, instruction set, threads and device.

    Of two makes with the same instructions each has matrix products of its own.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{torch.__version__}/{cpu_model()}/{capability}/{torch.get_num_threads()}/{where}"
