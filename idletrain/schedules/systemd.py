"""A schedule as a systemd timer of the user: `idletrain-NAME.timer` and the service that it starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from idletrain.errors import RunError

SYSTEMCTL_TIMEOUT_SECONDS = 30


class SystemdTimers:
    """The user's timers.

    Args:
        directory: Where the user's units are, `~/.config/systemd/user` as a rule.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fault(self) -> str | None:
        """Why timers cannot be used here, as a sentence."""
        if shutil.which("systemctl") and _systemctl("show-environment").returncode == 0:
            return None
        return "--on: systemd does not manage this user's services here; use --on crontab or --on loop"

    def install(self, name: str, minutes: Sequence[int], command: Sequence[str]) -> None:
        """Have a command run at these minutes of every hour, and at once after a time when the machine was off."""
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"idletrain-{name}.service").write_text(service(name, command))
        (self._directory / f"idletrain-{name}.timer").write_text(timer(name, minutes))
        _must("daemon-reload")
        _must("enable", "--now", f"idletrain-{name}.timer")

    def remove(self, name: str) -> None:
        """Take a schedule's timer away; none there is no error. A run that goes on is left alone."""
        units = [self._directory / f"idletrain-{name}.{kind}" for kind in ("timer", "service")]
        if not any(unit.exists() for unit in units):
            return
        _must("disable", "--now", f"idletrain-{name}.timer")
        for unit in units:
            unit.unlink(missing_ok=True)
        _must("daemon-reload")


def service(name: str, command: Sequence[str]) -> str:
    """The unit that asks whether a schedule is due, and runs it."""
    return (
        f"[Unit]\nDescription=idletrain schedule {name}\n\n"
        f"[Service]\nType=oneshot\nExecStart={' '.join(map(_quoted, command))}\n"
        # A stop goes to the schedule's process, which tells the run; told twice, the run would not end in order.
        "KillMode=mixed\n"
    )


def timer(name: str, minutes: Sequence[int]) -> str:
    """The unit that starts it."""
    return (
        f"[Unit]\nDescription=When idletrain schedule {name} may be due\n\n"
        f"[Timer]\nOnCalendar=*-*-* *:{','.join(f'{minute:02}' for minute in minutes)}:00\n"
        "AccuracySec=1s\nPersistent=true\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )


def _quoted(word: str) -> str:
    """A word of a command as it stands in a unit (systemd.service, "Command lines")."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _must(*arguments: str) -> None:
    asked = _systemctl(*arguments)
    if asked.returncode:
        raise RunError(f"systemctl --user {' '.join(arguments)} failed ({asked.stderr.strip()}); use --on loop instead")


def _systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemctl", "--user", *arguments],  # noqa: S607 (the user's own)
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SYSTEMCTL_TIMEOUT_SECONDS,
        check=False,
    )
