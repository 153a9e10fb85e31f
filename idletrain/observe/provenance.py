"""What it takes to do a run again: the command, the job, versions and hardware, as its first record holds them."""

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

PACKAGES = ("idletrain", "torch", "torch-pruning", "dask", "distributed", "numpy")
SECRET_OPTIONS = ("--webhook",)


def provenance(job: Job, command: str, dashboard: str, dashboard_note: str = "") -> dict[str, Any]:
    """Fields of a run's first record.

    Args:
        job: The job, with what the command line said otherwise.
        command: What was called, from `command_line`.
        dashboard: Where the run can be watched.
        dashboard_note: What there is to say of it.
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
    """A command as it can be given to a shell again, but for what is secret in it."""
    name = Path(arguments[0]).name
    shown = ["idletrain" if name == "__main__.py" else name, *arguments[1:]]  # as `python -m idletrain`
    for n, word in enumerate(shown):
        option, equals, value = word.partition("=")
        if equals and option in SECRET_OPTIONS:
            shown[n] = f"{option}={_site(value)}"
        elif n and shown[n - 1] in SECRET_OPTIONS:
            shown[n] = _site(word)
    return shlex.join(shown)


def _site(url: str) -> str:
    """A URL without what is secret in it."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}/..."


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor()
