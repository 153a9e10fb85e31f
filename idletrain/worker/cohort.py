"""Name the kind of machine that a worker is, so that workers that compute the same bits can be recognised."""

from __future__ import annotations

from collections.abc import Collection

import torch

from idletrain.nn.compiler import compiler, cpu_model


def numeric_cohort(device: torch.device, compiled_on: Collection[str] = ()) -> str:
    """Return torch's version, processor, instruction set, thread count and device as one text.

    Workers with equal texts compute the same bits. The processor counts because two makes with the same instruction set
    compute matrix products differently.

    Args:
        device: The device that it computes on.
        compiled_on: The kinds of devices on which steps may be compiled: there the text also says by which C++
            compiler, or that there is none.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    by = f"/{compiler().version or 'no compiler'}" if device.type in compiled_on else ""
    return f"{torch.__version__}/{cpu_model()}/{capability}/{torch.get_num_threads()}/{device_name}{by}"
