"""Record what is needed to reproduce a run: the command, the job, versions and hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from idletrain.job import Job

PACKAGES = ("idletrain", "torch", "dask", "distributed", "numpy")
SECRET_OPTIONS = ("--webhook",)


def provenance(job: Job, command: str, dashboard: str, dashboard_note: str = "") -> dict[str, Any]:
    """Return fields of a run's first record.

    Args:
        job: The job, with the changes of the command line.
        command: The command, from `command_line`.
        dashboard: URL at which the run can be watched.
        dashboard_note: A note for the user about that URL.
    """
    return {
        "dashboard": dashboard,
        "dashboard_note": dashboard_note,
        "command": command,
        "job": job.model_dump(mode="json", exclude_unset=True),
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
        "hardware": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "ram_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
        },
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return a command as a shell accepts it, with its secrets cut out."""
    name = Path(arguments[0]).name
    shown = ["idletrain" if name == "__main__.py" else name, *arguments[1:]]  # as `python -m idletrain`
    for n, argument in enumerate(shown):
        option, equals, value = argument.partition("=")
        if equals and option in SECRET_OPTIONS:
            shown[n] = f"{option}={_site(value)}"
        elif n and shown[n - 1] in SECRET_OPTIONS:
            shown[n] = _site(argument)
    return shlex.join(shown)


def url_parts(url: str) -> urllib.parse.SplitResult:
    """Return the parts of a URL; of what is none, empty ones."""
    try:
        parts = urllib.parse.urlsplit(url)
        parts.port  # noqa: B018 (it is read here)
    except ValueError:
        return urllib.parse.urlsplit("")
    return parts


def _site(url: str) -> str:
    """Return a URL's scheme and host; path and query may be secret."""
    parts = url_parts(url)
    return f"{parts.scheme}://{parts.hostname or ''}/..."


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor()
