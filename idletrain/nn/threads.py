"""Compute with as many threads as a local worker does: the number decides the bits, and on small data the speed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread within the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_environment_says() -> None:
    """Compute with a thread a core, unless the environment says otherwise: a fork of a warm parent has one thread."""
    if sys.platform == "linux" and torch.get_num_threads() == 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
