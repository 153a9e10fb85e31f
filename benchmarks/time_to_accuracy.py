"""How long, and how many bytes, until a network is good: idletrain beside what a user would pick instead.

The same model, first values, data, order of samples and batch a node go through every method over the same links
(contest.py says how machines are made and pinned). Every node takes `batch_size` samples a step; all nodes share each
pass over the data, for every method (papers count this differently; this is data parallel's way). BatchNorm's
statistics are estimated anew on the assembled network for every method before it is scored, off the clock.

Every method runs with several settings (candidates.py: the synchronisation interval) and the best is kept. Where a
method would take too long over a link, it runs there for at least 20 steps, and its time is `computed`: steps to the
accuracy over quicker links x time a step over this one; where no run got there, `more than` the steps that were seen.
Methods that are one algorithm share such steps: local SGD of two libraries, data parallel of 16 and 32 bits.

    python -m benchmarks.time_to_accuracy [--case b] [--nodes 8] [--link 100mbit] [--head-link 1gbit]
        [--methods ist,ddp] [--settings JSON --steps N --snapshot-every N --budget S] [--report] [--tiny] [--json FILE]

Runs add to the JSON file, so that a long comparison can be made in pieces; `--report` only draws it up anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contest import METHODS, Case, Entry, run
from benchmarks.report import Figure, at_least, parser, report

RESULTS = Path(__file__).parent / "results" / "time_to_accuracy.json"
PROBE_STEPS = 20  # of a method whose whole run would take too long
NOTES = """
How to read it. `seconds` run from the moment at which all nodes are ready until the first snapshot at the target;
snapshots are scored off the clock. `of which` is a node's mean: its local steps, and idletrain's pulls and pushes; the
rest is communication and waiting. `cores` is what the machine's cores did meanwhile.

All nodes and the head share this machine's cores, so local work takes several times as long as on machines of their
own: methods that compute much are charged for it; and emulating full links costs kernel time on the same cores. Both
flatter a method that computes and sends little, as `ist` does. Wire time alone is `MB sent by all` over nodes and rate.

Every node takes batches of the same size; all nodes share each pass over the data. BatchNorm's statistics are estimated
anew before every score, for every method alike. TLS is off for all.
""".strip().split("\n\n")
IST_TARGETS = {"ddp": 15.0, "local SGD's best kind": 4.0}  # the paper (Speech, 2 layers): 10.6 and 4.2
LEVELS_BELOW = (0.08, 0.06, 0.04, 0.02, 0.01, 0.0)
LOCAL_SGD_KINDS = ("local-sgd", "post-local-sgd", "torchft-local-sgd", "torchft-diloco")
FASHION = {"name": "fashion-mnist"}
Record = dict[str, Any]

CASES = {
    "a": Case(
        name="a",
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 1024, 1024, 10]}},
        data=FASHION,
        target=0.88,
    ),
    "b": Case(
        name="b",
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 4096, 4096, 10]}},
        data=FASHION,
        target=0.88,
    ),
    "c": Case(
        name="c",
        model={"factory": "idletrain.nn.models:residual_cnn", "args": {"channels": 16, "hidden": 64, "blocks": 2}},
        data=FASHION,
        target=0.86,
        batch_size=64,
    ),
    "d": Case(
        name="d",
        model={"factory": "idletrain.nn.models:transformer", "args": {"vocabulary": 128, "context": 64, "width": 128}},
        data={"factory": "benchmarks.text:gcide", "args": {"windows": 60_000, "test_windows": 1000, "context": 64}},
        target=0.45,
        batch_size=16,
    ),
    "tiny": Case(
        name="tiny",
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
        data={"name": "digits"},
        target=0.85,
        batch_size=32,
    ),
}


@dataclass(frozen=True)
class Asked:
    """One invocation's runs."""

    cases: tuple[str, ...]
    nodes: tuple[int, ...]
    links: tuple[str, ...]
    head_link: str | None
    entries: tuple[Entry, ...]


def standings(runs: Sequence[Record]) -> list[Record]:
    """The best of every method's settings, for each case, number of nodes and links.

    Returns:
        Records with `seconds` and `bytes` to the target (None where it was not reached, and then `more_than` seconds),
        whether they are `computed`, `steps`, `settings`, and of a step the seconds and the shares of its parts.
    """
    best: dict[tuple[Any, ...], Record] = {}
    for record in runs:
        standing = _standing(record, runs)
        key = tuple(standing[name] for name in ("case", "nodes", "link", "head_link", "method"))
        if key not in best or _rank(standing) < _rank(best[key]):
            best[key] = standing
    return sorted(best.values(), key=lambda s: (s["case"], s["nodes"], s["link"], s["head_link"], _rank(s)))


def _rank(standing: Record) -> float:
    return float("inf") if standing["seconds"] is None else float(standing["seconds"])


def _standing(record: Record, runs: Iterable[Record]) -> Record:
    """One run's time to the target: its own, or by the steps that the same settings took over other links."""
    names = ("case", "nodes", "link", "head_link", "method", "settings", "step_seconds", "target")
    standing = {name: record[name] for name in names}
    parts = {part: record.get(f"{part}_step_seconds", 0.0) for part in ("local", "pull", "push")}
    standing["shares"] = {part: seconds / record["step_seconds"] for part, seconds in parts.items()}
    standing["bytes_per_step"], standing["cores"] = record["bytes_per_step"], record.get("cores", {})
    own = _reached(record)
    if own:
        return {**standing, "steps": own[0], "seconds": own[1], "bytes": own[2], "computed": False}
    for other in runs:
        if _learning(other) == _learning(record) and (point := _reached(other)):
            steps, sent = point[0], record["bytes_per_step"]
            seconds, bytes_ = steps * record["step_seconds"], None if sent is None else steps * sent
            return {**standing, "steps": steps, "seconds": seconds, "bytes": bytes_, "computed": True}
    tried = [other["steps"] for other in runs if other["curve"] and _learning(other) == _learning(record)]
    at_least_seconds = max(tried, default=0) * record["step_seconds"]  # so many steps were seen not to do
    return {**standing, "steps": None, "seconds": None, "bytes": None, "computed": False, "more_than": at_least_seconds}


def _learning(record: Record) -> tuple[Any, ...]:
    """What decides how many steps a method needs: methods that are one algorithm in several libraries share it."""
    method, settings = record["method"], dict(record["settings"])
    if method in ("post-local-sgd", "torchft-local-sgd") and not settings.pop("warmup", 0):
        method = "local SGD"
    if method == "ddp-fp16":
        method = "ddp"
    return record["case"], record["nodes"], method, settings


def _reached(record: Record) -> list[Any] | None:
    """The first point of a run's curve at its target."""
    return next((point for point in record["curve"] if point[3] >= record["target"]), None)


def figures_of(runs: Sequence[Record]) -> list[Figure]:
    """Every standing, and what the targets ask for."""
    table = standings(runs)
    figures: list[Figure] = []
    for s in table:
        if s["seconds"] is None:
            continue
        place = where(s)
        how = ", computed" if s["computed"] else ""
        figures.append(Figure(f"{place}, {s['method']}: time to {s['target']:g}{how}", s["seconds"], "s"))
        if s["bytes"] is not None:
            figures.append(Figure(f"{place}, {s['method']}: sent by all{how}", s["bytes"] / 1e6, "MB"))
    for head_link in sorted({s["head_link"] for s in table}):
        here = {s["method"]: s for s in table if _counts(s, head_link)}
        figures += _ratios(here, f"case b, 8 nodes, 100mbit, head {head_link}")
    return figures


def where(s: Record) -> str:
    """A standing's place in words."""
    head = "" if s["head_link"] == s["link"] else f", head {s['head_link']}"
    return f"case {s['case']}, {s['nodes']} nodes, {s['link']}{head}"


def _counts(s: Record, head_link: str) -> bool:
    """Whether a standing belongs beside ist with this head: who has no data on the head does not care for its link."""
    place = s["case"] in ("b", "tiny") and s["nodes"] == (8 if s["case"] == "b" else 2)
    link = s["link"] == ("100mbit" if s["case"] == "b" else "none")
    return place and link and (s["head_link"] == head_link or not METHODS[s["method"]].ours)


def _ratios(here: dict[str, Record], where: str) -> list[Figure]:
    if "ist" not in here or here["ist"]["seconds"] is None:
        return []
    ist, figures = here["ist"], []
    kinds = [here[name] for name in LOCAL_SGD_KINDS if name in here]
    rivals = {"ddp": here.get("ddp"), "local SGD's best kind": min(kinds, key=_rank) if kinds else None}
    for name, rival in rivals.items():
        if rival is None:
            continue
        what, target = f"{where}: time, {name} / ist", IST_TARGETS[name]
        if rival["seconds"] is None:  # a bound from below meets a target or tells nothing of it
            bound = rival["more_than"] / ist["seconds"]
            figures.append(at_least(what, bound, "x or more", target))
            if bound < target:
                figures[-1] = Figure(what, bound, "x or more")
            continue
        figures.append(at_least(what, rival["seconds"] / ist["seconds"], "x", target))
        if rival["bytes"] and ist["bytes"]:
            figures.append(
                at_least(f"{where}: bytes, {name} / ist", rival["bytes"] / ist["bytes"], "x", IST_TARGETS[name])
            )
    return figures


def tables_of(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """For RESULTS.md: one table a case, nodes and links, the best settings of every method and where its time goes."""
    groups: dict[str, list[Record]] = {}
    for s in standings(runs):
        groups.setdefault(f"{where(s)}, to {s['target']:g}", []).append(s)
    head = ["method", "seconds", "MB sent by all", "steps a node", "s a step", "of which", "cores", "settings"]
    return [{"title": title, "head": head, "rows": [_row(s) for s in rows]} for title, rows in groups.items()]


def levels_of(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """For RESULTS.md: seconds to accuracies below the target, too, the best settings for each."""
    places: dict[str, dict[str, list[Record]]] = {}
    for record in runs:
        places.setdefault(where(record), {}).setdefault(record["method"], []).append(record)
    tables = []
    for place, methods in places.items():
        levels = [methods_[0]["target"] - below for methods_ in list(methods.values())[:1] for below in LEVELS_BELOW]
        rows = [
            [method, *(_soonest([_seconds_to(record, runs, level) for record in mine]) for level in levels)]
            for method, mine in methods.items()
        ]
        head = ["method", *(f"to {level:.2f}" for level in levels)]
        tables.append(
            {"title": f"{place}: seconds to lower accuracies, too (~ is computed)", "head": head, "rows": rows}
        )
    return tables


def _seconds_to(record: Record, runs: Iterable[Record], level: float) -> tuple[float, bool] | None:
    """Seconds to an accuracy, and whether they are computed from the same settings' steps over other links."""
    own = next((point for point in record["curve"] if point[3] >= level), None)
    if own:
        return own[1], False
    for other in runs:
        point = next((point for point in other["curve"] if point[3] >= level), None)
        if point and _learning(other) == _learning(record):
            return point[0] * record["step_seconds"], True
    return None


def _soonest(found: Iterable[tuple[float, bool] | None]) -> str:
    known = [one for one in found if one]
    return f"{'~' if min(known)[1] else ''}{min(known)[0]:.0f}" if known else ""


def _row(s: Record) -> list[str]:
    if s["seconds"] is None:
        seconds = f"more than {s['more_than']:.0f}"
    else:
        seconds = f"{s['seconds']:.0f}{' (computed)' if s['computed'] else ''}"
    sent = "" if s["bytes"] is None else f"{s['bytes'] / 1e6:.0f}"
    settings = ", ".join(f"{name} {value}" for name, value in s["settings"].items())
    steps = "" if s["steps"] is None else str(s["steps"])
    return [
        s["method"],
        seconds,
        sent,
        steps,
        f"{s['step_seconds']:.3g}",
        _shares(s["shares"]),
        _shares(s["cores"]),
        settings,
    ]


def _shares(shares: dict[str, float]) -> str:
    """Shares in percent, those that are known."""
    return ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares.items() if share)


def draw(runs: Sequence[Record], to: Path) -> None:
    """Accuracy over wall time and over bytes, a row of two panels a case, of its slowest link and most nodes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    shaped = [s for s in standings(runs) if s["bytes"] is not None] or standings(runs)
    cases = sorted({s["case"] for s in shaped})
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 3.6 * len(cases)), squeeze=False)
    for row, case in zip(axes, cases, strict=True):
        mine = [s for s in shaped if s["case"] == case]
        place = max((s["nodes"], s["link"] == "100mbit") for s in mine)
        for s in mine:
            if (s["nodes"], s["link"] == "100mbit") == place and s["head_link"] == s["link"]:
                _draw_one(row, s, runs)
        row[0].set(title=f"case {case}, {place[0]} nodes", xlabel="seconds", ylabel="accuracy", xscale="log")
        row[1].set(xlabel="MB sent by all machines", xscale="log")
        row[0].legend(fontsize=7)
        for panel in row:
            panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(to)
    plt.close(figure)


def _draw_one(row: Any, s: Record, runs: Sequence[Record]) -> None:
    """One method's curve; dashed where it is computed."""
    if s["computed"]:
        source = next(r for r in runs if _learning(r) == _learning(s) and _reached(r))
    else:
        same = ("case", "nodes", "link", "head_link", "method", "settings")
        source = next(r for r in runs if all(r[name] == s[name] for name in same))
    points = source["curve"]
    seconds = [p[0] * s["step_seconds"] if s["computed"] else p[1] for p in points]
    style = {"label": s["method"], "linestyle": "--" if s["computed"] else "-", "marker": "."}
    row[0].plot(seconds, [p[3] for p in points], **style)
    if s["bytes_per_step"] is not None:
        row[1].plot([p[0] * s["bytes_per_step"] / 1e6 for p in points], [p[3] for p in points], **style)


def add(runs: list[Record], record: Record) -> list[Record]:
    """The runs with one more, in the place of an older one of the same."""
    same = ("case", "nodes", "link", "head_link", "method", "settings")
    return [old for old in runs if any(old[name] != record[name] for name in same)] + [record]


def asked_of(options: argparse.Namespace) -> Asked:
    """What the command line asks for.

    Raises:
        ValueError: it names what there is not.
    """
    from benchmarks.candidates import candidates

    if options.tiny:
        return Asked(("tiny",), (2,), ("none",), None, candidates("tiny", "none"))
    if unknown := set(options.methods) - set(METHODS) | set(options.case) - set(CASES):
        raise ValueError(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join((*METHODS, *CASES))}")
    entries: tuple[Entry, ...] = ()
    if options.settings:
        goes = {"steps": options.steps, "snapshot_every": options.snapshot_every, "budget_seconds": options.budget}
        entries = tuple(Entry(method=m, settings=json.loads(options.settings), **goes) for m in options.methods)
    return Asked(tuple(options.case), tuple(options.nodes), tuple(options.link), options.head_link, entries)


def carry_out(asked: Asked, methods: Sequence[str], keep: Any, runs: list[Record]) -> list[Record]:
    """Run all that is asked; every record is kept as soon as it is there."""
    from benchmarks.candidates import candidates

    for name in asked.cases:
        for nodes in asked.nodes:
            for link in asked.links:
                for entry in asked.entries or candidates(name, link):
                    if entry.method not in methods:
                        continue
                    sys.stderr.write(f"case {name}, {nodes} nodes, {link}: {entry.method} {entry.settings}\n")
                    try:
                        record = run(CASES[name], entry, nodes, link, asked.head_link)
                    except RuntimeError as error:
                        sys.stderr.write(f"  left out: {error}\n")
                        continue
                    point = _reached(record)
                    sys.stderr.write(f"  {record['seconds']:.1f} s, {record['steps']} steps; target: {point}\n")
                    runs = add(runs, record)
                    keep(runs)
    return runs


def words(text: str) -> list[str]:
    """A list as the command line gives it."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """A list of numbers as the command line gives it."""
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
    command.add_argument("--steps", type=int, default=PROBE_STEPS, help="with --settings")
    command.add_argument("--snapshot-every", type=int, default=0, help="steps, with --settings; 0: only time it")
    command.add_argument(
        "--budget", type=float, default=240.0, help="seconds after which a run is ended, with --settings"
    )
    command.add_argument("--report", action="store_true", help="run nothing")
    options = command.parse_args(argv)
    try:
        asked = asked_of(options)
    except ValueError as error:
        command.error(str(error))
    options.json = options.json or (None if options.tiny else RESULTS)
    runs: list[Record] = []
    if options.json and options.json.exists() and not options.tiny:
        runs = json.loads(options.json.read_text())["runs"]

    def keep(runs: Sequence[Record]) -> dict[str, Any]:
        return report(
            "time_to_accuracy",
            options,
            figures_of(runs),
            tables=tables_of(runs) + levels_of(runs),
            notes=NOTES,
            runs=runs,
        )

    if not options.report:
        runs = carry_out(asked, options.methods, keep, runs)
    if options.json and runs:
        draw(runs, options.json.with_suffix(".svg"))
    return keep(runs)


if __name__ == "__main__":
    main()
