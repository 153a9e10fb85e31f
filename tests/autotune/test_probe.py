"""A quick look at a fleet, and how long it is kept."""

from __future__ import annotations

from pathlib import Path

from fabric.measuring.test_measure import on

from idletrain.autotune import probe

from .test_choose import job
from .test_forecast import FLEET


def test_a_fleet_of_two_is_looked_at() -> None:
    fleet = on(2, lambda client: probe.probe_fleet(client, job()))
    assert fleet.nodes == 2
    assert min(fleet.down, fleet.up, fleet.down_all, fleet.up_all) > 1e6
    assert 0 < fleet.call_seconds < 5
    assert set(fleet.step_seconds) == {"local-sgd 2", "ist 2", "ist 4"}
    assert all(1e-5 < seconds < 5 for seconds in fleet.step_seconds.values())
    assert fleet.memory_bytes > 1 << 20


def test_what_was_seen_is_kept_for_a_day(tmp_path: Path) -> None:
    key = probe.fleet_key("local", 2)
    assert probe.load_figures(tmp_path, key, 1000.0) is None
    probe.save_figures(tmp_path / "new", key, FLEET, 1000.0)
    assert probe.load_figures(tmp_path / "new", key, 1000.0 + probe.PROBE_CACHE_SECONDS - 1) == FLEET
    assert probe.load_figures(tmp_path / "new", key, 1000.0 + probe.PROBE_CACHE_SECONDS) is None
    assert probe.load_figures(tmp_path / "new", probe.fleet_key("local", 3), 1001.0) is None


def test_a_damaged_file_is_looked_past(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"seen": 1, "fleet": {"nodes": 1}}')
    assert probe.load_figures(tmp_path, "a", 1.0) is None


def test_updates_are_committed_at_some_rate() -> None:
    assert probe.commit_rate() > 1e5
