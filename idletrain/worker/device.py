"""Pick the device that a worker trains on, measure its speed, and make a GPU compute the same bits every time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from idletrain.nn.program import Program

T = TypeVar("T")
logger = logging.getLogger(__name__)
CALIBRATION_STEPS = 20  # of a 256-wide layer: 20 ms here, enough to tell a node from one half as fast


def pick_device() -> torch.device:
    """Return the node's GPU, or its CPU if it has none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_for(program: Program) -> torch.device:
    """Return the device to train on; samplers and row-wise steps of a very wide output run on the CPU only."""
    return torch.device("cpu") if program.output else pick_device()


def make_repeatable() -> None:
    """Let a GPU compute the same bits every time where `compute_repeatably` asks for it; comes before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False


def compute_repeatably(*, wanted: bool) -> None:
    """Make a GPU compute the same bits every time, as a CPU does, or as fast as torch can.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if torch.cuda.is_available() and torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def repeatably(step: Callable[[], T]) -> T:
    """Do a step; if an operation of it cannot compute the same bits every time, say so once and do it without that."""
    try:
        return step()
    except RuntimeError as error:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        if warns or not torch.are_deterministic_algorithms_enabled() or "deterministic" not in str(error):
            raise
        logger.warning("another attempt may compute other bits on a GPU: %s", str(error).split(". ", maxsplit=1)[0])
        torch.use_deterministic_algorithms(True, warn_only=True)
        return step()


def measure_speed(device: torch.device) -> float:
    """Measure a small training step, in steps per second of CPU time so that a busy neighbour does not count."""
    weight = torch.ones(256, 256, device=device, requires_grad=True)  # no random numbers: another run may draw some now
    x = torch.ones(128, 256, device=device)
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    started = clock()
    for step in range(CALIBRATION_STEPS):
        if step == CALIBRATION_STEPS // 2:  # the first half warms up
            finish(device)
            started = clock()
        torch.autograd.backward(torch.nn.functional.linear(x, weight).square().sum())
    finish(device)
    return CALIBRATION_STEPS / 2 / max(clock() - started, 1e-6)


def finish(device: torch.device) -> None:
    """Wait until the device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
