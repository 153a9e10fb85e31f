"""Losses, and a network, whose steps a test steers in all workers at once; their values are cross entropy's.

The directory $CHAOS_CONTROL says what happens. To `loss` and `sampled_softmax`: `pace` holds seconds a step, and every
step waits while `hold` exists, or `hold-PID` for one process. To `faulty_loss`: `nan-NAME`, `hang-NAME`, `slow-NAME`
(whose content is seconds a step; `slow-all` is for all), `raise-NAME` and `exit-NAME` for the worker of that name.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from distributed import get_worker
from torch import Tensor, nn
from torch.nn import functional


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    _wait()
    return functional.cross_entropy(outputs, labels)


def paced(outputs: Tensor, labels: Tensor) -> Tensor:
    """Takes a thirtieth of a second in a worker, without a file that says so: for machines of the rehearsal cloud."""
    if worker_name() is not None:
        time.sleep(1 / 30)
    return functional.cross_entropy(outputs, labels)


def sampled_softmax(outputs: Any, labels: Any) -> Tensor:
    _wait()
    return outputs.loss(labels)


def faulty_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    value, name = functional.cross_entropy(outputs, labels), worker_name()
    if name is None:
        return value
    control = Path(os.environ["CHAOS_CONTROL"])
    for slow in (control / "slow-all", control / f"slow-{name}"):
        if slow.exists():
            time.sleep(float(slow.read_text() or 0))
    if (control / f"hang-{name}").exists():
        time.sleep(3600)
    if (control / f"raise-{name}").exists():
        raise RuntimeError("CUDA error: device-side assert triggered")
    if (control / f"exit-{name}").exists():
        os._exit(9)
    return value * float("nan") if (control / f"nan-{name}").exists() else value


class Deadly(nn.Module):
    """An MLP that ends its process at the third training step on real values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.device.type != "meta" and worker_name():
            self.steps += 1
            if self.steps > 2:
                print("about to die of step 3", flush=True)
                os._exit(9)
        y: Tensor = self.last(torch.relu(self.first(x.flatten(1))))
        return y


def worker_name() -> str | None:
    """The name of the worker that this runs in; None outside of one."""
    try:
        return str(get_worker().name)
    except ValueError:
        return None


def _wait() -> None:
    folder = os.environ.get("CHAOS_CONTROL")
    if not folder or worker_name() is None:
        return
    control = Path(folder)
    with contextlib.suppress(FileNotFoundError, ValueError):
        time.sleep(float((control / "pace").read_text()))
    while (control / "hold").exists() or (control / f"hold-{os.getpid()}").exists():
        time.sleep(0.005)
