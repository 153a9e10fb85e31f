"""Dask as idletrain runs it."""

from __future__ import annotations

import dask
import distributed  # noqa: F401 (brings its defaults)

from idletrain.fleet import settings


def test_settings_take_the_place_of_dask_s_and_every_name_is_one_of_dask_s() -> None:
    """A misspelt name would be set and never read."""
    before = {name: dask.config.get(name) for name in settings.SETTINGS}
    with dask.config.set({}):
        settings.apply()
        assert {name: dask.config.get(name) for name in settings.SETTINGS} == settings.SETTINGS
        dask.config.set(before)
