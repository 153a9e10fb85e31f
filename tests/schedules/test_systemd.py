"""Timer and service units, read by systemd itself where it is there; `systemctl` is a script that notes its words."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from idletrain.errors import RunError
from idletrain.schedules.systemd import SystemdTimers, service, timer

COMMAND = ["/bin/echo", "a b", "100%", "$HOME", 'say "x"', "back\\slash"]
FAKE = """#!/bin/sh
[ ! -e "$FAKE_SYSTEMD.refuse" ] || { echo "Failed to connect to bus" >&2; exit 1; }
echo "$@" >>"$FAKE_SYSTEMD"
"""
ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a systemctl that stands first in the path, a line each."""
    command = tmp_path / "bin" / "systemctl"
    command.parent.mkdir()
    command.write_text(FAKE)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SYSTEMD", str(tmp_path / "told"))
    return tmp_path / "told"


def test_a_timer_is_installed_enabled_and_removed(calls: Path, tmp_path: Path) -> None:
    timers = SystemdTimers(tmp_path / "units")
    assert timers.fault() is None
    timers.install("nightly", (0, 30), COMMAND)
    assert (tmp_path / "units" / "idletrain-nightly.service").read_text() == service("nightly", COMMAND)
    assert (tmp_path / "units" / "idletrain-nightly.timer").read_text() == timer("nightly", (0, 30))
    timers.remove("nightly")
    timers.remove("nightly")
    assert list((tmp_path / "units").iterdir()) == []
    assert calls.read_text().splitlines() == [
        "--user show-environment",
        "--user daemon-reload",
        "--user enable --now idletrain-nightly.timer",
        "--user disable --now idletrain-nightly.timer",
        "--user daemon-reload",
    ]


def test_a_missed_time_is_made_up_for_after_a_start() -> None:
    lines = timer("nightly", (0, 5)).splitlines()
    assert "Persistent=true" in lines
    assert "OnCalendar=*-*-* *:00,05:00" in lines


def test_a_user_without_systemd_gets_an_error(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "--on: systemd does not manage this user's services here; use --on crontab or --on loop"
    calls.with_name("told.refuse").touch()
    assert SystemdTimers(tmp_path).fault() == sentence
    with pytest.raises(RunError, match=r"daemon-reload failed .Failed to connect to bus.; use --on loop instead"):
        SystemdTimers(tmp_path).install("nightly", (0,), COMMAND)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SystemdTimers(tmp_path).fault() == sentence


@needs_analyze
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for kind, text in (("service", service("nightly", COMMAND)), ("timer", timer("nightly", range(0, 60, 15)))):
        (tmp_path / f"idletrain-nightly.{kind}").write_text(text)
    command = [str(ANALYZE), "verify", "--user", str(tmp_path / "idletrain-nightly.timer")]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


@needs_analyze
def test_systemd_reads_the_minutes_as_meant() -> None:
    command = [
        str(ANALYZE),
        "calendar",
        "--iterations=3",
        "--base-time=2026-03-02 02:01:00 UTC",
        "*-*-* *:00,15,30,45:00",
    ]
    calls = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(minute in calls for minute in ("02:15:00", "02:30:00", "02:45:00"))
