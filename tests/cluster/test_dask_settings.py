"""Dask as idletrain runs it."""

from __future__ import annotations

import resource

import dask
import distributed  # noqa: F401 (brings its defaults)

from idletrain.cluster import dask_settings


def test_settings_take_the_place_of_dask_s_and_every_name_is_one_of_dask_s() -> None:
    """A misspelt name would be set and never read."""
    before = {name: dask.config.get(name) for name in dask_settings.DASK_SETTINGS}
    with dask.config.set({}):
        dask_settings.apply()
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
