"""A schedule's line in the user's crontab.

python-crontab writes our line; all others stay as they are, byte for byte. Through it a whole crontab would not: it
drops `PATH = /bin` (spaces around the sign), comments out what it cannot read and fails on `sun,7` (3.4.0).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from crontab import CronTab

from idletrain.errors import RunError

CRONTAB_TIMEOUT_SECONDS = 30
HOUR_MINUTES = 60


def fault() -> str | None:
    """Why schedules cannot be put into a crontab here, as a sentence."""
    if shutil.which("crontab"):
        return None
    return "--on: there is no crontab command here; install cron, or use --on systemd or --on loop"


def install(name: str, minutes: Sequence[int], command: Sequence[str]) -> None:
    """Have a command run at these minutes of every hour."""
    tab = _read()
    _write(with_line(tab, name, line(name, minutes, command)))


def remove(name: str) -> None:
    """Take a schedule's line out; none there is no error."""
    tab = _read()
    if (left := without(tab, name)) != tab:
        _write(left)


def line(name: str, minutes: Sequence[int], command: Sequence[str]) -> str:
    """A schedule's line."""
    tab = CronTab(tab="")
    item = tab.new(command=shlex.join(command), comment=f"idletrain:{name}")
    item.setall("*" if len(minutes) == HOUR_MINUTES else ",".join(map(str, minutes)), "*", "*", "*", "*")
    rendered: str = item.render()
    return rendered


def with_line(tab: str, name: str, ours: str) -> str:
    """A crontab with a schedule's line at its end, and with no other of that schedule."""
    left = without(tab, name)
    return f"{left}{'' if left.endswith(chr(10)) or not left else chr(10)}{ours}\n"


def without(tab: str, name: str) -> str:
    """A crontab without a schedule's line."""
    return "".join(text for text in tab.splitlines(keepends=True) if not text.rstrip().endswith(f"# idletrain:{name}"))


def _read() -> str:
    asked = _crontab("-l")
    if asked.returncode == 0:
        return asked.stdout
    if "no crontab for" in asked.stderr:
        return ""
    raise RunError(f"crontab -l failed ({asked.stderr.strip()}); see that cron is there for you, or use --on loop")


def _write(tab: str) -> None:
    asked = _crontab("-", tab)
    if asked.returncode:
        raise RunError(f"crontab refused the new line ({asked.stderr.strip()}); see crontab -l, nothing was changed")


def _crontab(argument: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # in the language that `_read` understands
        ["crontab", argument],  # noqa: S607 (the user's own)
        input=given,
        capture_output=True,
        text=True,
        timeout=CRONTAB_TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
