"""Compute with as many threads as a local worker does: the number decides the bits, and on small data the speed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil
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


def use_threads_of_environment() -> None:
    """Compute with as many threads as torch would have taken on its own.

    A process that is a fork has the one thread of its warm parent, as workers do.
    """
    named = os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    cores = min(psutil.cpu_count(logical=False) or 1, len(psutil.Process().cpu_affinity()))
    torch.set_num_threads(int(named) if named.isdecimal() and int(named) else cores)
