"""Dask as idletrain runs it."""

from __future__ import annotations

import logging
import random
import resource
import sys

import dask
import distributed  # noqa: F401 (brings its defaults)
import pytest
from dask.sizeof import sizeof
from distributed import worker_state_machine
from distributed.protocol import compression

from idletrain.cluster import dask_settings


def test_settings_take_the_place_of_dask_s_and_every_name_is_one_of_dask_s() -> None:
    """A misspelt name would be set and never read."""
    before = {name: dask.config.get(name) for name in dask_settings.DASK_SETTINGS}
    with dask.config.set({}):
        dask_settings.apply()
        assert not logging.getLogger("distributed.comm.tcp").isEnabledFor(logging.INFO)
        assert {name: dask.config.get(name) for name in dask_settings.DASK_SETTINGS} == dask_settings.DASK_SETTINGS
        dask.config.set(before)


def test_the_limit_on_open_files_becomes_the_machine_s() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        dask_settings.lift_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_dask_draws_apart_from_the_module_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dask.sizeof"], "random", random)
    monkeypatch.setattr(compression, "randint", random.randint)
    monkeypatch.setattr(worker_state_machine, "random", random)
    dask_settings.draw_apart()
    assert worker_state_machine.random is not random
    assert worker_state_machine.random.Random(0).random() == random.Random(0).random()  # as a Worker begins
    before = random.getstate()
    sizeof(list(range(11)))
    compression.byte_sample(memoryview(bytes(1000)), 10, 3)
    assert random.getstate() == before
