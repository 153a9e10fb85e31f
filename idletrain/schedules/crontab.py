"""Install and remove a schedule's line in the user's crontab.

python-crontab formats our line only; all other lines stay as they are, byte for byte. Parsing the whole crontab with
it would change them: it drops `PATH = /bin` (spaces around the sign), comments out lines that it cannot parse and
fails on `sun,7` (3.4.0).
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
    """Return why schedules cannot use a crontab here, as a sentence, or None."""
    if shutil.which("crontab"):
        return None
    return "--on: there is no crontab command here; install cron, or use --on systemd or --on loop"


def install(name: str, minutes: Sequence[int], command: Sequence[str]) -> None:
    """Add a crontab line that runs a command at these minutes of every hour."""
    tab = _read()
    _write(with_line(tab, name, line(name, minutes, command)))


def remove(name: str) -> None:
    """Remove a schedule's line; it is no error if there is none."""
    tab = _read()
    if (left := without(tab, name)) != tab:
        _write(left)


def line(name: str, minutes: Sequence[int], command: Sequence[str]) -> str:
    """Return a schedule's crontab line."""
    tab = CronTab(tab="")
    item = tab.new(command=shlex.join(command), comment=f"idletrain:{name}")
    item.setall("*" if len(minutes) == HOUR_MINUTES else ",".join(map(str, minutes)), "*", "*", "*", "*")
    rendered: str = item.render()
    return rendered


def with_line(tab: str, name: str, ours: str) -> str:
    """Return a crontab with a schedule's line at its end, in place of its earlier one."""
    left = without(tab, name)
    return f"{left}{'' if left.endswith(chr(10)) or not left else chr(10)}{ours}\n"


def without(tab: str, name: str) -> str:
    """Return a crontab without a schedule's line."""
    return "".join(text for text in tab.splitlines(keepends=True) if not text.rstrip().endswith(f"# idletrain:{name}"))


def _read() -> str:
    result = _crontab("-l")
    if result.returncode == 0:
        return result.stdout
    if "no crontab for" in result.stderr:
        return ""
    raise RunError(f"crontab -l failed ({result.stderr.strip()}); check that you may use cron, or use --on loop")


def _write(tab: str) -> None:
    result = _crontab("-", tab)
    if result.returncode:
        raise RunError(
            f"crontab refused the new line ({result.stderr.strip()}); nothing was changed; compare with `crontab -l`"
        )


def _crontab(argument: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # in English, as `_read` parses its messages
        ["crontab", argument],  # noqa: S607 (the user's own)
        input=stdin,
        capture_output=True,
        text=True,
        timeout=CRONTAB_TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
