"""What every benchmark shares: its command line, the machine it ran on, its table and its JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PACKAGES = ("idletrain", "torch", "distributed", "numpy")


@dataclass(frozen=True)
class Figure:
    """One measured figure against its target.

    Attributes:
        target: As text, with its comparison, or "" if there is none.
        met: Whether the target is met, or None without one.
        samples: All raw values that `value` sums up.
    """

    what: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    samples: Sequence[float] = ()


def at_most(what: str, value: float, unit: str, limit: float, samples: Sequence[float] = ()) -> Figure:
    """A figure that should not be above `limit`."""
    return Figure(what, value, unit, f"<= {limit:g}", value <= limit, samples)


def at_least(what: str, value: float, unit: str, limit: float, samples: Sequence[float] = ()) -> Figure:
    """A figure that should not be below `limit`."""
    return Figure(what, value, unit, f">= {limit:g}", value >= limit, samples)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark's command line has: `tiny` and `json`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tiny", action="store_true", help="a few seconds; the figures then mean nothing")
    made.add_argument("--json", type=Path, metavar="FILE", help="write figures, raw samples and hardware here")
    return made


def arguments(doc: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line of nothing more than that."""
    return parser(doc).parse_args(argv)


def report(name: str, options: argparse.Namespace, figures: Sequence[Figure], **details: Any) -> dict[str, Any]:
    """Print the table, write the JSON, and return it.

    Args:
        name: The benchmark.
        options: Its command line, from `arguments`.
        figures: What it measured.
        details: What else belongs to the result: settings and raw samples.
    """
    result = {
        "benchmark": name,
        "tiny": options.tiny,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "figures": [asdict(figure) for figure in figures],
        **details,
    }
    table = Table("figure", "value", "target", "", title=name)
    for figure in figures:
        verdict = {None: "", True: "met", False: "missed"}[figure.met]
        table.add_row(figure.what, f"{figure.value:.4g} {figure.unit}", figure.target, verdict)
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def machine() -> dict[str, Any]:
    """CPU, cores, RAM, and how busy the machine was."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": psutil.getloadavg(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
