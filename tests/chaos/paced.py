"""A loss whose steps take as long as a test wants; its values are cross entropy's.

The directory $CHAOS_CONTROL steers all workers at once: `pace` holds seconds a step; every step waits while `hold`
exists, or `hold-PID` for one process.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from distributed import get_worker
from torch import Tensor
from torch.nn import functional


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    control = os.environ.get("CHAOS_CONTROL")
    if control and _in_worker():
        _wait(Path(control))
    return functional.cross_entropy(outputs, labels)


def sampled_softmax(outputs: Any, labels: Any) -> Tensor:
    control = os.environ.get("CHAOS_CONTROL")
    if control and _in_worker():
        _wait(Path(control))
    return outputs.loss(labels)


def _in_worker() -> bool:
    try:
        get_worker()
    except ValueError:
        return False
    return True


def _wait(control: Path) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        time.sleep(float((control / "pace").read_text()))
    while (control / "hold").exists() or (control / f"hold-{os.getpid()}").exists():
        time.sleep(0.005)
