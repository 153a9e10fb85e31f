"""The frame of every benchmark: its command line and preset, the machine it ran on, its table and its JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import stale

T = TypeVar("T")
PACKAGES = ("idletrain", "torch", "distributed", "numpy")


@dataclass(frozen=True)
class Figure:
    """A measured figure, compared with its target.

    Attributes:
        what: What was measured, in a few words.
        target: The target as text, with its comparison, or "" if there is none.
        met: Whether the target is met, or None without one.
        samples: All raw values that `value` summarises.
    """

    what: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    samples: Sequence[float] = ()


def at_most(what: str, value: float, unit: str, limit: float, samples: Sequence[float] = ()) -> Figure:
    """Return a figure that should not be above `limit`."""
    return Figure(what, value, unit, f"<= {limit:g}", value <= limit, samples)


def at_least(what: str, value: float, unit: str, limit: float, samples: Sequence[float] = ()) -> Figure:
    """Return a figure that should not be below `limit`."""
    return Figure(what, value, unit, f">= {limit:g}", value >= limit, samples)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark, `tiny` and `json`."""
    command = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--tiny", action="store_true", help="a few seconds; the figures then mean nothing")
    command.add_argument("--json", type=Path, metavar="FILE", help="write figures, raw samples and hardware here")
    return command


def with_preset(doc: str | None, argv: Sequence[str] | None, full: T, tiny: T) -> tuple[argparse.Namespace, T]:
    """Parse a command line of these two options, and return it with the preset to run: `tiny` if requested."""
    options = parser(doc).parse_args(argv)
    return options, tiny if options.tiny else full


def report(
    name: str,
    options: argparse.Namespace,
    figures: Sequence[Figure],
    earlier: Mapping[str, Any] | None = None,
    **details: Any,
) -> dict[str, Any]:
    """Print the table, write the JSON, and return it.

    Args:
        name: The benchmark.
        options: Its command line.
        figures: The measured figures.
        earlier: The result that this one adds to, so that it is as old as that one.
        details: Further fields of the result: settings and raw samples.
    """
    result = {
        "benchmark": name,
        "tiny": options.tiny,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "code": stale.digests(name) if earlier is None else earlier.get("code", {}),
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
    """Describe the machine: CPU, cores, RAM in bytes, system, and its load."""
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
