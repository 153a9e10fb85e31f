"""Divide the workers' seconds by what they went into, and measure how much of a link moving data uses.

    python -m benchmarks.where_time_goes RUN_DIR [--link 100mbit] [--json FILE]    of any run
    python -m benchmarks.where_time_goes [--tiny] [--json FILE]                    of a run of its own

Over shaped links: `python -m benchmarks.time_to_accuracy --methods ist --link 100mbit --events RUN_DIR`.
Every second of every worker is one part of its round (idletrain.observe.time_use): compute, pull, push, control, lost,
wait for the slowest, evaluate (or write a snapshot), commit. A run of its own is case (b) of the comparison, MLP
784-4096-4096-10 on Fashion-MNIST, with as many workers as cores, on loopback.

Targets: at least 90 % of the workers' time is compute, with links of 1 Gbit/s or more; with --link, at least 85 % of a
worker's link is used while data moves.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Figure, at_least, parser, report
from benchmarks.runs import events_of, of_kind
from idletrain.observe import records, time_use
from idletrain.observe.records import Record

COMPUTE, LINK = 0.90, 0.85
WARM_UP_ROUNDS = 1  # the first loads the program
TARGET_LINK = 1e9 / 8  # bytes a second, from which on compute has a target
BYTES_PER_UNIT = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
NOTE = """
Nodes, head and the emulated links share this machine's cores: what a pull or a push here falls short of `link use`,
which has them for itself, it waited for a core that trained.
""".strip()


def tree(tiny: bool) -> dict[str, Any]:
    """Return the job of a run."""
    workers = len(os.sched_getaffinity(0))
    return {
        "model": {
            "factory": "idletrain.nn.models:mlp",
            "args": {"widths": [64, 64, 64, 10] if tiny else [784, 4096, 4096, 10], "norm": "batch"},
        },
        "data": {"name": "digits" if tiny else "fashion-mnist"},
        "training": {
            "optimizer": {"name": "sgd", "lr": 0.1},
            "subnets": workers,
            "local_steps": 5 if tiny else 50,
            "rounds": 4 if tiny else 8,
            "evaluate_every": 100,
        },
        "nodes": {"count": workers},
    }


def link_bytes(rate: str) -> float:
    """Return the bytes a second of a link's rate as `tc` writes it, such as 100mbit."""
    match = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)", rate)
    if not match:
        raise argparse.ArgumentTypeError(f"{rate!r} should be a rate such as 100mbit or 1gbit")
    return float(match[1]) * BYTES_PER_UNIT[match[2]]


def rate_text(rate: str) -> str:
    """Parse a rate that `link_bytes` understands."""
    link_bytes(rate)
    return rate


def rates(events: Sequence[Record]) -> dict[str, list[float]]:
    """Return the bytes a second of every finished pull and push: the load of a worker's own link."""
    ended = [e for e in of_kind(events, "attempt_ended") if e["round"] >= WARM_UP_ROUNDS and e.get("push_bytes")]
    return {
        "pull": [e["pull_bytes"] / e["pull_seconds"] for e in ended if e["pull_seconds"] > 0],
        "push": [e["push_bytes"] / e["push_seconds"] for e in ended if e["push_seconds"] > 0],
    }


def figures_of(events: Sequence[Record], rate: str) -> list[Figure]:
    """Return shares of the workers' time, and rates, over links of a rate such as 100mbit (or none that is known)."""
    link, where = link_bytes(rate) if rate else None, f"links of {rate}: " if rate else ""
    rounds = [r for r in time_use.round_times(events) if r.number >= WARM_UP_ROUNDS]
    alive = sum(sum(r.worker_seconds.values()) for r in rounds)
    shares = {part: sum(r.worker_seconds[part] for r in rounds) / alive for part in time_use.TIME_PARTS}
    compute = [r.worker_seconds["compute"] / sum(r.worker_seconds.values()) for r in rounds]
    unit, share = "of the workers' time", shares.pop("compute")
    figures = [
        Figure(f"{where}compute", share, unit, samples=compute)
        if link and link < TARGET_LINK
        else at_least(f"{where}compute" if link else "compute, on loopback", share, unit, COMPUTE, compute)
    ]
    figures += [Figure(part, share, unit) for part, share in shares.items()]
    for part, of_attempts in rates(events).items():
        typical = statistics.median(of_attempts)
        figures.append(Figure(f"{part}: rate of a worker", typical / 1e6, "MB/s", samples=of_attempts))
        if link:
            used = [rate / link for rate in of_attempts]
            figures.append(at_least(f"{where}{part}: share of a worker's link", typical / link, "", LINK, used))
    down = sum(r.bytes_down for r in rounds) / sum(r.down_seconds for r in rounds)
    up = sum(r.bytes_up for r in rounds) / sum(r.up_seconds for r in rounds)
    return [
        *figures,
        Figure("store, while anyone pulls", down / 1e6, "MB/s"),
        Figure("store, while anyone pushes", up / 1e6, "MB/s"),
        Figure("rounds", len(rounds), ""),
    ]


def by_round(rounds: Sequence[time_use.RoundTimes]) -> Table:
    """Return one line a round: its parts in percent of the workers' time."""
    table = Table("round", "seconds", *time_use.TIME_PARTS, title="% of the workers' time")
    for r in rounds:
        whole = sum(r.worker_seconds.values()) or math.nan
        cells = (f"{r.worker_seconds[part] / whole:.1%}" for part in time_use.TIME_PARTS)
        table.add_row(str(r.number), f"{r.seconds:.2f}", *cells)
    return table


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, or read a run, divide and report."""
    command = parser(__doc__)
    command.add_argument(
        "run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="a run's directory; its own run if none"
    )
    command.add_argument("--link", type=rate_text, metavar="RATE", help="a worker's link, such as 100mbit")
    options = command.parse_args(argv)
    events = (
        list(records.read_records(options.run_dir / "events.jsonl"))
        if options.run_dir
        else events_of(tree(options.tiny))
    )
    rounds = time_use.round_times(events)
    Console().print(by_round(rounds))
    figures = figures_of(events, options.link or "")
    notes = [NOTE] if options.link else []
    return report("where_time_goes", options, figures, notes=notes, rounds=[vars(r) for r in rounds])


if __name__ == "__main__":
    main()
