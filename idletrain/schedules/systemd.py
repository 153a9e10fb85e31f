"""Install a schedule as a systemd timer of the user: `idletrain-NAME.timer` and the service that it starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from idletrain.errors import RunError

SYSTEMCTL_TIMEOUT_SECONDS = 30


class SystemdTimers:
    """The user's systemd timers.

    Args:
        directory: Holds the user's units, usually `~/.config/systemd/user`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fault(self) -> str | None:
        """Return why timers cannot be used here, as a sentence, or None."""
        if shutil.which("systemctl") and _systemctl("show-environment").returncode == 0:
            return None
        return "--on: systemd does not manage this user's services here; use --on crontab or --on loop"

    def install(self, name: str, minutes: Sequence[int], command: Sequence[str]) -> None:
        """Run a command at these minutes of every hour, and at boot if one was missed while the machine was off."""
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"idletrain-{name}.service").write_text(service(name, command))
        (self._directory / f"idletrain-{name}.timer").write_text(timer(name, minutes))
        _checked("daemon-reload")
        _checked("enable", "--now", f"idletrain-{name}.timer")

    def remove(self, name: str) -> None:
        """Delete a schedule's timer, if there is one. A running run is left alone."""
        units = [self._directory / f"idletrain-{name}.{kind}" for kind in ("timer", "service")]
        if not any(unit.exists() for unit in units):
            return
        _checked("disable", "--now", f"idletrain-{name}.timer")
        for unit in units:
            unit.unlink(missing_ok=True)
        _checked("daemon-reload")


def service(name: str, command: Sequence[str]) -> str:
    """Return the service unit that runs a schedule if it is due."""
    return (
        f"[Unit]\nDescription=idletrain schedule {name}\n\n"
        f"[Service]\nType=oneshot\nExecStart={' '.join(map(_quoted, command))}\n"
        # Signal only the schedule's process, which signals the run: signalled twice, the run would not end cleanly.
        "KillMode=mixed\n"
    )


def timer(name: str, minutes: Sequence[int]) -> str:
    """Return the timer unit that starts the service."""
    return (
        f"[Unit]\nDescription=When idletrain schedule {name} may be due\n\n"
        f"[Timer]\nOnCalendar=*-*-* *:{','.join(f'{minute:02}' for minute in minutes)}:00\n"
        "AccuracySec=1s\nPersistent=true\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )


def _quoted(argument: str) -> str:
    """Quote an argument of a command for a unit (systemd.service, "Command lines")."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _checked(*arguments: str) -> None:
    result = _systemctl(*arguments)
    if result.returncode:
        raise RunError(
            f"systemctl --user {' '.join(arguments)} failed ({result.stderr.strip()}); use --on loop instead"
        )


def _systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemctl", "--user", *arguments],  # noqa: S607 (the user's own)
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SYSTEMCTL_TIMEOUT_SECONDS,
        check=False,
    )
