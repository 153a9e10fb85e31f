"""Name the kind of machine that a worker is, so that workers that compute the same bits can be recognised."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from idletrain.nn.compiler import compiler

CPU_INFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """Return the processor's name."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def numeric_cohort(device: torch.device, *, compiles: bool = False) -> str:
    """Return torch's version, processor, instruction set, thread count and device as one text.

    Workers with equal texts compute the same bits. The processor counts because two makes with the same instruction set
    compute matrix products differently.

    Args:
        device: The device that it computes on.
        compiles: Whether steps may be compiled: then the text also says by which C++ compiler, or that there is none.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    by = f"/{compiler().version or 'no compiler'}" if compiles else ""
    return f"{torch.__version__}/{cpu_model()}/{capability}/{torch.get_num_threads()}/{device_name}{by}"
