"""Calls on every core, or here for a tiny run."""

from __future__ import annotations

import os

import torch

from benchmarks.cores import call_all


def test_calls_are_made_in_processes_of_their_own_and_come_back_in_order():
    results = call_all(_named, [("first",), ("second",), ("third",)], tiny=False)
    assert [name for name, _ in results] == ["first", "second", "third"]
    assert os.getpid() not in {pid for _, pid in results}


def test_a_tiny_run_s_calls_are_made_here_and_leave_the_threads_as_they_were():
    threads = torch.get_num_threads()
    assert call_all(_with_threads, [(threads + 1,), (threads + 2,)], tiny=True) == [threads + 1, threads + 2]
    assert torch.get_num_threads() == threads


def _named(name: str) -> tuple[str, int]:
    return name, os.getpid()


def _with_threads(threads: int) -> int:
    torch.set_num_threads(threads)
    return torch.get_num_threads()
