"""Measure the time and bytes until a network is good: idletrain beside what a user would pick instead.

The same model, first values, data, order of samples and batch a node go through every method over the same links
(race.py says how machines are made and pinned). Every node takes `batch_size` samples a step; all nodes share each
pass over the data, for every method (papers count this differently; this is data parallel's way). BatchNorm's
statistics are estimated again on the assembled network for every method before it is scored, off the clock.

Every method runs with several settings (sweep.py: the synchronisation interval) and the best is kept. Where a
method would take too long over a link, it runs there for at least 20 steps, and its time is `computed`: steps to the
accuracy over quicker links x time a step over this one; where no run got there, `more than` the steps that were scored.
Methods that are one algorithm share such steps: local SGD of two libraries, data parallel of 16 and 32 bits.

    python -m benchmarks.time_to_accuracy [--case b] [--nodes 8] [--link 100mbit] [--head-link 1gbit]
        [--methods ist,ddp] [--settings JSON --steps N --snapshot-every N --budget S] [--events FOLDER]
        [--report] [--tiny] [--json FILE]

Runs add to the JSON file, so that a long comparison can be made in pieces; `--report` only writes the tables again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.methods import CASES, METHODS, Entry
from benchmarks.race import run
from benchmarks.ranking import PLACE, Record, figures_of, levels_of, ranking, reached, tables_of
from benchmarks.report import parser, report
from benchmarks.sweep import PROBE, candidates

RESULTS = Path(__file__).parent / "results" / "time_to_accuracy.json"
NOTES = """
How to read it. `seconds` run from the moment at which all nodes are ready until the first snapshot at the target;
snapshots are scored off the clock; `~` is computed: steps to the target over quicker links x seconds a step over these;
`more than` are the steps that were scored below it, the longest of settings whose schedule ended there. `of which` is a
node's mean: its local steps (data parallel's gradients, which overlap the exchange, as three passes without it took
them), and idletrain's pulls and pushes; the rest is communication and waiting. `cores` is what the machine's cores did
meanwhile.

All nodes and the head share this machine's cores, so local work takes several times as long as on machines of their
own: methods that compute much are charged for it; and emulating full links costs kernel time on the same cores. Both
flatter a method that computes and sends little, as `ist` does. `MB over the links` are counted where they arrive.

Every node takes batches of the same size; all nodes share each pass over the data. BatchNorm's statistics are estimated
anew before every score, for every method alike. TLS is off for all.

Tried with `ist`, and worse with every round: a CNN whose narrow residual stream is cut, too. Case c keeps its stream
whole. Case d is a plain pre-LN transformer; `ist` takes the rate that its narrow subnets want, of two tried, and data
parallel and local SGD the better of two lower ones.
""".strip().split("\n\n")


@dataclass(frozen=True)
class Selection:
    """One invocation's runs."""

    cases: tuple[str, ...]
    nodes: tuple[int, ...]
    links: tuple[str, ...]
    head_link: str | None
    entries: tuple[Entry, ...]
    events: Path | None


def draw(runs: Sequence[Record], to: Path) -> None:
    """Draw accuracy over time and over bytes: a row of two panels a case, of its slowest link and most nodes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    shaped = [s for s in ranking(runs) if s["bytes"] is not None] or ranking(runs)
    cases = sorted({s["case"] for s in shaped})
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 3.6 * len(cases)), squeeze=False)
    for row, case in zip(axes, cases, strict=True):
        of_case = [s for s in shaped if s["case"] == case]
        place = max((s["nodes"], s["link"] == "100mbit") for s in of_case)
        for s in of_case:
            if (s["nodes"], s["link"] == "100mbit") == place and s["head_link"] == s["link"]:
                _draw_one(row, s)
        row[0].set(title=f"case {case}, {place[0]} nodes", xlabel="seconds", ylabel="accuracy", xscale="log")
        row[1].set(xlabel="MB over the links", xscale="log")
        row[0].legend(fontsize=7)
        for panel in row:
            panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(to)
    plt.close(figure)


def _draw_one(row: Any, s: Record) -> None:
    """Draw one method's curve; dashed where it is computed."""
    steps, accuracies = [p[0] for p in s["curve"]], [p[3] for p in s["curve"]]
    seconds = [n * s["step_seconds"] for n in steps] if s["computed"] else [p[1] for p in s["curve"]]
    style = {"label": s["method"], "linestyle": "--" if s["computed"] else "-", "marker": "."}
    row[0].plot(seconds, accuracies, **style)
    if s["bytes_per_step"] is not None:
        row[1].plot([n * s["bytes_per_step"] / 1e6 for n in steps], accuracies, **style)


def add(runs: list[Record], record: Record) -> list[Record]:
    """Return the runs with one more, replacing an older one of the same settings."""
    same = (*PLACE, "method", "settings")
    return [old for old in runs if any(old[name] != record[name] for name in same)] + [record]


def selection_of(options: argparse.Namespace) -> Selection:
    """Return the settings that the command line names.

    Raises:
        ValueError: it names an unknown method or case.
    """
    if options.tiny:
        return Selection(("tiny",), (2,), ("none",), None, candidates("tiny", "none"), options.events)
    if unknown := set(options.methods) - set(METHODS) | set(options.case) - set(CASES):
        raise ValueError(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join((*METHODS, *CASES))}")
    entries: tuple[Entry, ...] = ()
    if options.settings:
        limits = {"steps": options.steps, "snapshot_every": options.snapshot_every, "budget_seconds": options.budget}
        entries = tuple(Entry(method=m, settings=json.loads(options.settings), **limits) for m in options.methods)
    return Selection(
        tuple(options.case), tuple(options.nodes), tuple(options.link), options.head_link, entries, options.events
    )


def carry_out(
    selection: Selection, methods: Sequence[str], keep: Callable[[list[Record]], Any], runs: list[Record]
) -> list[Record]:
    """Run all requested entries, saving every record at once; return all runs."""
    for name in selection.cases:
        for nodes in selection.nodes:
            for link in selection.links:
                for entry in selection.entries or candidates(name, link):
                    if entry.method not in methods:
                        continue
                    sys.stderr.write(f"case {name}, {nodes} nodes, {link}: {entry.method} {entry.settings}\n")
                    try:
                        record = run(CASES[name], entry, nodes, link, selection.head_link, selection.events)
                    except RuntimeError as error:
                        sys.stderr.write(f"  left out: {error}\n")
                        continue
                    point = reached(record, record["target"])
                    sys.stderr.write(f"  {record['seconds']:.1f} s, {record['steps']} steps; target: {point}\n")
                    runs = add(runs, record)
                    keep(runs)
    return runs


def words(text: str) -> list[str]:
    """Parse a comma-separated list."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of numbers."""
    return [int(word) for word in words(text)]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, compare and report."""
    command = parser(__doc__)
    command.add_argument("--case", type=words, default=["b"], help="a, b, c, d")
    command.add_argument("--nodes", type=numbers, default=[8])
    command.add_argument("--link", type=words, default=["100mbit"], help="100mbit, 1gbit, none (loopback)")
    command.add_argument("--head-link", help="the head's rate; a node's otherwise")
    command.add_argument("--methods", type=words, default=list(METHODS), help=", ".join(METHODS))
    command.add_argument("--settings", help="these settings instead of the candidates, as JSON")
    command.add_argument("--steps", type=int, default=PROBE, help="with --settings")
    command.add_argument("--snapshot-every", type=int, default=0, help="steps, with --settings; 0: only time it")
    command.add_argument(
        "--budget", type=float, default=240.0, help="seconds after which a run is ended, with --settings"
    )
    command.add_argument("--events", type=Path, metavar="FOLDER", help="of idletrain's last run, for where_time_goes")
    command.add_argument("--report", action="store_true", help="run nothing")
    options = command.parse_args(argv)
    try:
        selection = selection_of(options)
    except ValueError as error:
        command.error(str(error))
    options.json = options.json or (None if options.tiny else RESULTS)
    earlier: dict[str, Any] | None = None
    if options.json and options.json.exists() and not options.tiny:
        earlier = json.loads(options.json.read_text())
    runs: list[Record] = earlier["runs"] if earlier else []

    def keep(runs: Sequence[Record]) -> dict[str, Any]:
        dates = {"date": max(run["date"] for run in runs)} if runs else {}  # not the date of writing the tables
        tables = tables_of(runs) + levels_of(runs)
        return report(
            "time_to_accuracy", options, figures_of(runs), earlier, tables=tables, notes=NOTES, runs=runs, **dates
        )

    if not options.report:
        runs = carry_out(selection, options.methods, keep, runs)
    if options.json and runs:
        draw(runs, options.json.with_suffix(".svg"))
    return keep(runs)


if __name__ == "__main__":
    main()
