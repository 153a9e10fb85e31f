"""Call a function many times, once on each core at a time."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def call_all(function: Callable[..., R], calls: Iterable[tuple[Any, ...]], *, tiny: bool) -> list[R]:
    """Return what a function returns for each of several arguments, in their order.

    Each core has a process, which may set its threads as it likes. The calls of a tiny run take less time than such a
    process takes to start: they are made here.

    Args:
        function: A function of a module.
        calls: Its arguments.
        tiny: Whether this is a benchmark's tiny run.
    """
    if tiny:
        threads = torch.get_num_threads()
        try:
            return [function(*arguments) for arguments in calls]
        finally:
            torch.set_num_threads(threads)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        return [future.result() for future in [pool.submit(function, *arguments) for arguments in calls]]
