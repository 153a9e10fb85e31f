"""How long, and how many bytes, until a network is good: idletrain beside what a user would pick instead.

The same model, first values, data, order of samples and batch a node go through every method over the same links
(contest.py says how machines are made and pinned). Every node takes `batch_size` samples a step; all nodes share each
pass over the data, for every method (papers count this differently; this is data parallel's way). BatchNorm's
statistics are estimated anew on the assembled network for every method before it is scored, off the clock.

Every method runs with several settings (candidates.py: the synchronisation interval) and the best is kept. Where a
method would take too long over a link, it runs there for at least 20 steps, and its time is `computed`: steps to the
accuracy over quicker links x time a step over this one; where no run got there, `more than` the steps that were scored.
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
snapshots are scored off the clock; `~` is computed: steps to the target over quicker links x seconds a step over these;
`more than` are the steps that were scored below it. `of which` is a node's mean: its local steps (data parallel's
gradients, which overlap the exchange, as three passes without it took them), and idletrain's pulls and pushes; the rest
is communication and waiting. `cores` is what the machine's cores did meanwhile.

All nodes and the head share this machine's cores, so local work takes several times as long as on machines of their
own: methods that compute much are charged for it; and emulating full links costs kernel time on the same cores. Both
flatter a method that computes and sends little, as `ist` does. `MB over the links` are counted where they arrive.

Every node takes batches of the same size; all nodes share each pass over the data. BatchNorm's statistics are estimated
anew before every score, for every method alike. TLS is off for all.
""".strip().split("\n\n")
# Rivals of ist, and how many times its seconds and bytes they should take at least; the IST paper (Speech): 10.6, 4.2.
RIVALS = {
    "ddp": (("ddp",), 15.0),
    "local SGD's best kind": (("local-sgd", "post-local-sgd", "torchft-local-sgd", "torchft-diloco"), 4.0),
}
AIMS = (("b", 8, "100mbit"), ("tiny", 2, "none"))  # where that is asked of it: case, nodes, link
PLACE = ("case", "nodes", "link", "head_link")
LEVELS_BELOW = (0.08, 0.06, 0.04, 0.02, 0.01, 0.0)
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


def standings(runs: Sequence[Record], below: float = 0.0) -> list[Record]:
    """The best of every method's settings, for each case, number of nodes and links.

    Args:
        runs: Records of `contest.run`.
        below: How far below the case's target the accuracy lies whose time is told.

    Returns:
        Records with `seconds` and `bytes` to that accuracy, whether they are `computed`, `steps`, `settings`, and of a
        step the seconds and the shares of its parts. Where it was not reached those are None, and `more_than` says how
        many seconds were not enough (None where the method was only timed).
    """
    best: dict[tuple[Any, ...], Record] = {}
    for record in runs:
        standing = _standing(record, runs, round(record["target"] - below, 6))
        key = tuple(standing[name] for name in (*PLACE, "method"))
        if key not in best or _rank(standing) < _rank(best[key]):
            best[key] = standing
    return sorted(best.values(), key=lambda s: (*(s[name] for name in PLACE), _rank(s)))


def at_best(standing: Record) -> float:
    """The least time that a method can have taken: to the target, or what was seen not to be enough."""
    known = standing["more_than"] if standing["seconds"] is None else standing["seconds"]
    return float("inf") if known is None else float(known)


def _rank(standing: Record) -> tuple[bool, float]:
    return standing["seconds"] is None, at_best(standing)


def _standing(record: Record, runs: Iterable[Record], target: float) -> Record:
    """One run's time to the target: its own, or by the steps that the same settings took over other links."""
    names = (*PLACE, "method", "settings", "step_seconds")
    parts = {part: record.get(f"{part}_step_seconds", 0.0) for part in ("local", "pull", "push")}
    standing = {name: record[name] for name in names} | {
        "target": target,
        "shares": {part: seconds / record["step_seconds"] for part, seconds in parts.items()},
        "cores": record.get("cores", {}),
        "bytes_per_step": record["bytes_per_step"],
        "curve": record["curve"],
        "computed": False,
        "more_than": None,
    }
    if own := reached(record, target):
        return standing | {"steps": own[0], "seconds": own[1], "bytes": own[2]}
    alike = [other for other in runs if other["curve"] and _learning(other) == _learning(record)]
    for other in alike:
        if point := reached(other, target):
            carried = record["bytes_per_step"]
            return standing | {
                "steps": point[0],
                "seconds": point[0] * record["step_seconds"],
                "bytes": None if carried is None else point[0] * carried,
                "curve": other["curve"],
                "computed": True,
            }
    if alike:  # so many steps were seen not to do
        standing["more_than"] = max(other["curve"][-1][0] for other in alike) * record["step_seconds"]
    return standing | {"steps": None, "seconds": None, "bytes": None}


def _learning(record: Record) -> tuple[Any, ...]:
    """What decides how many steps a method needs: methods that are one algorithm in several libraries share it."""
    method, settings = record["method"], dict(record["settings"])
    if method in ("post-local-sgd", "torchft-local-sgd") and not settings.pop("warmup", 0):
        method = "local SGD"
    if method == "ddp-fp16":
        method = "ddp"
    return record["case"], record["nodes"], method, settings


def reached(record: Record, target: float) -> list[Any] | None:
    """The first point of a run's curve at an accuracy."""
    return next((point for point in record["curve"] if point[3] >= target), None)


def figures_of(runs: Sequence[Record]) -> list[Figure]:
    """Every standing, and what the targets ask for."""
    table = standings(runs)
    figures: list[Figure] = []
    for s in table:
        if s["seconds"] is None:
            continue
        what, how = f"{where(s)}, {s['method']}", ", computed" if s["computed"] else ""
        figures.append(Figure(f"{what}: time to {s['target']:g}{how}", s["seconds"], "s"))
        if s["bytes"] is not None:
            figures.append(Figure(f"{what}: over all links{how}", s["bytes"] / 1e6, "MB"))
    for ist in table:
        if ist["method"] == "ist" and ist["seconds"] is not None and (ist["case"], ist["nodes"], ist["link"]) in AIMS:
            figures += _ratios(ist, [s for s in table if _beside(s, ist)])
    return figures


def where(s: Record) -> str:
    """A standing's place in words."""
    head = "" if s["head_link"] == s["link"] else f", head {s['head_link']}"
    return f"case {s['case']}, {s['nodes']} nodes, {s['link']}{head}"


def _beside(s: Record, ist: Record) -> bool:
    """Whether a standing belongs beside one of ist: who has no data on the head does not care for its link."""
    same = all(s[name] == ist[name] for name in ("case", "nodes", "link"))
    return same and (s["head_link"] == ist["head_link"] or not METHODS[s["method"]].ours)


def _ratios(ist: Record, beside: Sequence[Record]) -> list[Figure]:
    """How many times ist's seconds and bytes the rivals took at least."""
    figures = []
    for name, (methods, limit) in RIVALS.items():
        tried = [s for s in beside if s["method"] in methods and at_best(s) < float("inf")]
        if not tried:
            continue
        rival = min(tried, key=at_best)
        figures.append(_ratio(f"{where(ist)}: time, {name} / ist", at_best(rival) / ist["seconds"], rival, limit))
        sent = [s for s in tried if s["bytes"]]
        if sent and ist["bytes"]:
            least = min(sent, key=lambda s: float(s["bytes"]))
            ratio = least["bytes"] / ist["bytes"]
            figures.append(at_least(f"{where(ist)}: bytes, {name} / ist", ratio, "x", limit))
    return figures


def _ratio(what: str, ratio: float, rival: Record, limit: float) -> Figure:
    """A ratio against its target; a bound from below meets it or tells nothing of it."""
    if rival["seconds"] is not None:
        return at_least(what, ratio, "x", limit)
    return at_least(what, ratio, "x or more", limit) if ratio >= limit else Figure(what, ratio, "x or more")


def tables_of(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """For RESULTS.md: one table a case, nodes and links, the best settings of every method and where its time goes."""
    head = ["method", "seconds", "MB over the links", "steps a node", "s a step", "of which", "cores", "settings"]
    return [
        {"title": f"{place}, to {standings_[0]['target']:g}", "head": head, "rows": [_row(s) for s in standings_]}
        for place, standings_ in by_place(standings(runs)).items()
    ]


def by_place(table: Iterable[Record]) -> dict[str, list[Record]]:
    """Standings by their place in words."""
    places: dict[str, list[Record]] = {}
    for s in table:
        places.setdefault(where(s), []).append(s)
    return places


def levels_of(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """For RESULTS.md: seconds to accuracies below the target, too, the best settings for each."""
    levels = [by_place(standings(runs, below)) for below in LEVELS_BELOW]
    tables = []
    for place, at_target in levels[-1].items():
        rows = []
        for method in (s["method"] for s in at_target):
            mine = [next(s for s in level[place] if s["method"] == method) for level in levels]
            rows.append([method, *(seconds_of(s) for s in mine)])
        head = ["method", *(f"to {level[place][0]['target']:.2f}" for level in levels)]
        tables.append(
            {"title": f"{place}: seconds to lower accuracies, too (~ is computed)", "head": head, "rows": rows}
        )
    return tables


def seconds_of(s: Record) -> str:
    """A standing's time in words."""
    if at_best(s) == float("inf"):
        return "only timed"
    sign = "more than " if s["seconds"] is None else "~" if s["computed"] else ""
    return f"{sign}{at_best(s):.0f}"


def _row(s: Record) -> list[str]:
    return [
        s["method"],
        seconds_of(s),
        "" if s["bytes"] is None else f"{s['bytes'] / 1e6:.0f}",
        "" if s["steps"] is None else str(s["steps"]),
        f"{s['step_seconds']:.3g}",
        _shares(s["shares"]),
        _shares(s["cores"]),
        ", ".join(f"{name} {value}" for name, value in s["settings"].items()),
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
    """One method's curve; dashed where it is computed."""
    steps, accuracies = [p[0] for p in s["curve"]], [p[3] for p in s["curve"]]
    seconds = [n * s["step_seconds"] for n in steps] if s["computed"] else [p[1] for p in s["curve"]]
    style = {"label": s["method"], "linestyle": "--" if s["computed"] else "-", "marker": "."}
    row[0].plot(seconds, accuracies, **style)
    if s["bytes_per_step"] is not None:
        row[1].plot([n * s["bytes_per_step"] / 1e6 for n in steps], accuracies, **style)


def add(runs: list[Record], record: Record) -> list[Record]:
    """The runs with one more, in the place of an older one of the same."""
    same = (*PLACE, "method", "settings")
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
                    point = reached(record, record["target"])
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
        dates = {"date": max(run["date"] for run in runs)} if runs else {}  # not that of drawing it up anew
        tables = tables_of(runs) + levels_of(runs)
        return report("time_to_accuracy", options, figures_of(runs), tables=tables, notes=NOTES, runs=runs, **dates)

    if not options.report:
        runs = carry_out(asked, options.methods, keep, runs)
    if options.json and runs:
        draw(runs, options.json.with_suffix(".svg"))
    return keep(runs)


if __name__ == "__main__":
    main()
