"""Write RESULTS.md and the tables in docs/ from the benchmarks' result files; no number is typed by hand.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import stale
from benchmarks.ranking import LEVELS_BELOW, Record, at_best, by_place, ranking, seconds_of

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- results: python -m benchmarks.tables -->", "<!-- end of results -->"
LINKS_BEGIN, LINKS_END = "<!-- links: python -m benchmarks.tables -->", "<!-- end of links -->"
AS_GOOD = 0.05  # a difference that nobody waits for
PEERS_BEGIN, PEERS_END = "<!-- peers: python -m benchmarks.tables -->", "<!-- end of peers -->"
MODULES_BEGIN, MODULES_END = "<!-- modules: python -m benchmarks.tables -->", "<!-- end of modules -->"
HEAD = """# Results

Made by `python -m benchmarks.tables` from `results/*.json`, which `python -m benchmarks` writes; every file holds the
raw samples. Figures are medians where a bench repeats itself; the machines are shared and noisy, so read ratios before
absolute times.
"""


def page(results: list[dict[str, Any]]) -> str:
    """Return the page, one section a benchmark."""
    return "\n".join([HEAD, *(line for result in results for line in _section(result))])


def _section(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"## {result['benchmark'].replace('_', ' ')}\n"
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 2**30:.0f} GiB; {result['date'][:10]};"
    yield f"{versions}.\n"
    if paths := stale.changed(result):
        yield f"Stale: {', '.join(paths)} changed since.\n"
    for table in result.get("tables", ()):
        yield f"{table['title']}\n"
        yield from _table(table["head"], table["rows"])
        yield ""
    yield from (f"{note}\n" for note in result.get("notes", ()))
    figures = [
        f for f in result["figures"] if f["met"] is not None or f["unit"].startswith("x") or not result.get("tables")
    ]  # tables say the rest
    if figures:
        yield "| figure | value | target | |\n|---|---|---|---|"
    for figure in figures:
        verdict = {None: "", True: "met", False: "**missed**"}[figure["met"]]
        yield f"| {figure['what']} | {figure['value']:.4g} {figure['unit']} | {figure['target']} | {verdict} |"
    yield ""


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _filled(head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns in which no row has a value, such as a GPU's memory."""
    columns = [column for column in range(len(head)) if any(row[column] != "-" for row in rows)]
    return [head[column] for column in columns], [[row[column] for column in columns] for row in rows]


def summary(results: list[dict[str, Any]]) -> str:
    """Return one table of all figures that have a target."""
    rows = ["| bench | figure | value | target | | on | date |", "|---|---|---|---|---|---|---|"]
    rows += [
        f"| {result['benchmark'].replace('_', ' ')} | {f['what']} | {f['value']:.3g} {f['unit']} | {f['target']} "
        f"| {'met' if f['met'] else '**missed**'} | {result['machine']['cpu']} | {_day(result)} |"
        for result in results
        for f in result["figures"]
        if f["met"] is not None
    ]
    cores = sorted({result["machine"]["cores"] for result in results})
    return "\n".join([f"On {' or '.join(map(str, cores))} shared cores:\n", *rows])


def choice(results: list[dict[str, Any]]) -> str:
    """Return a table by case, nodes and links: the time of `ist` to its best accuracy, and of the quickest other."""
    runs: list[Record] = next((result["runs"] for result in results if result["benchmark"] == "time_to_accuracy"), [])
    rows: dict[str, list[str]] = {}  # by place
    for below in reversed(LEVELS_BELOW):
        for place, methods in by_place(ranking(runs, below)).items():
            ours = next((s for s in methods if s["method"] == "ist"), None)
            others = [s for s in methods if s["method"] != "ist" and at_best(s) < float("inf")]
            if place not in rows and ours and ours["seconds"] is not None and others:
                rows[place] = _choice(place, ours, min(others, key=at_best))
    head = ["where", "accuracy", "seconds of ist", "of the quickest other", "take"]
    return "\n".join(_table(head, list(rows.values())))


def links(results: list[dict[str, Any]]) -> str:
    """Return a table by link: how long pushes took over the ideal by each transport, and which to take."""
    by_case: dict[str, dict[str, list[float]]] = next(
        (r["found"] for r in results if r["benchmark"] == "bad_links"), {}
    )
    rows = []
    for case, transports in by_case.items():
        typical = {name: statistics.median(samples) for name, samples in transports.items()}
        tcp = min(value for name, value in typical.items() if not name.startswith("datagrams"))
        take = (
            "either"
            if abs(tcp / typical["datagrams"] - 1) <= AS_GOOD
            else "tcp"
            if tcp < typical["datagrams"]
            else "udp"
        )
        rows.append([case, *(f"{typical[name]:.2f} ({max(transports[name]):.1f})" for name in transports), take])
    return "\n".join(_table(["link", *next(iter(by_case.values()), {}), "take"], rows))


def modules(results: list[dict[str, Any]]) -> str:
    """Return the table of third-party modules, with the machine and the date."""
    result = next(result for result in results if result["benchmark"] == "modules")
    table = result["tables"][0]
    on = f"{result['machine']['cpu']}, {result['machine']['cores']} shared cores, {_day(result)}:"
    return "\n".join([on, "", *_table(table["head"], table["rows"])])


def recipes(results: list[dict[str, Any]]) -> str:
    """Return a table for each family of the quality bench, with what it ran on and when."""
    lines: list[str] = []
    for result in (result for result in results if result["benchmark"] == "quality"):
        on = f"{result.get('gpu') or result['machine']['cpu']}, {_day(result)}"
        for table in result["tables"]:
            lines += [f"{table['title']} ({on}):", "", *_table(*_filled(table["head"], table["rows"])), ""]
    return "\n".join(lines).rstrip()


def endings(results: list[dict[str, Any]]) -> str:
    """Return a table of held-out losses by family and by how a run of `ist` divides its network, all as long."""
    (result,) = (result for result in results if result["benchmark"] == "finishing")
    losses: dict[str, dict[str, str]] = {}
    for figure in result["figures"]:
        family, _, rest = figure["what"].partition(", ")
        if rest.endswith("as long: loss") or rest == "local SGD: loss":
            losses.setdefault(family, {})[rest.removesuffix(": loss").removesuffix(", as long")] = (
                f"{figure['value']:.3g}"
            )
    kinds = list(next(iter(losses.values())))
    rows = [[family, *(by_kind[kind] for kind in kinds)] for family, by_kind in losses.items()]
    on = f"{result['machine']['cpu']}, {_day(result)}:"
    return "\n".join([on, "", *_table(["loss", *kinds], rows)])


def splits(results: list[dict[str, Any]]) -> str:
    """Return a table of how well residual networks learn by what their subnets divide."""
    (result,) = (result for result in results if result["benchmark"] == "splits")
    found = {figure["what"]: figure["value"] for figure in result["figures"] if not figure["target"]}
    names = dict.fromkeys(what.rpartition(": ")[0] for what in found)
    head = ["", "loss", "accuracy", "calibration error", "a subnet's parameters / whole"]
    rows = [
        [
            name,
            f"{found[f'{name}: loss']:.3f}",
            f"{found[f'{name}: accuracy']:.1f} %",
            *(f"{found[f'{name}: {column}']:.3f}" for column in head[3:]),
        ]
        for name in names
    ]
    return "\n".join([f"{result['machine']['cpu']}, {_day(result)}:", "", *_table(head, rows)])


def rates(results: list[dict[str, Any]]) -> str:
    """Return a table of the best learning rates by optimizer and number of subnets."""
    (result,) = (result for result in results if result["benchmark"] == "learning_rates")
    found = {figure["what"]: figure["value"] for figure in result["figures"]}
    settings = dict.fromkeys(what.partition(":")[0] for what in found)
    head = ["", "best rate", "loss at it", "loss at the rate best whole / at its best"]
    rows = [[name, *(f"{found[f'{name}: {column}']:.3g}" for column in head[1:])] for name in settings]
    on = f"{result['machine']['cpu']}, {_day(result)}:"
    return "\n".join([on, "", *_table(head, rows), "", "Loss at each rate:", "", *_curves(result["runs"])])


def _curves(runs: Sequence[Record]) -> Iterator[str]:
    """Yield a table of the losses at all rates, a row for each network, optimizer and number of subnets."""
    tried = sorted({run["rate"] for run in runs})
    losses: dict[str, dict[float, float]] = {}
    for run in runs:
        setting = f"{run['family']}, {run['optimizer']}, {run['subnets']} subnets"
        losses.setdefault(setting, {})[run["rate"]] = run["loss"]
    rows = [
        [name, *(f"{by_rate[rate]:.3g}" if rate in by_rate else "" for rate in tried)]
        for name, by_rate in losses.items()
    ]
    return _table(["", *(f"{rate:g}" for rate in tried)], rows)


def defaults(results: list[dict[str, Any]]) -> str:
    """Return a table of losses by what differs from the defaults, a row for each network and optimizer."""
    (result,) = (result for result in results if result["benchmark"] == "defaults")
    losses: dict[str, dict[str, str]] = {}
    for figure in result["figures"]:
        setting, _, rest = figure["what"].rpartition(", ")
        if rest.endswith(": loss"):
            losses.setdefault(setting, {})[rest.removesuffix(": loss")] = f"{figure['value']:.3f}"
    kinds = list(next(iter(losses.values())))
    rows = [[setting, *(by_kind[kind] for kind in kinds)] for setting, by_kind in losses.items()]
    return "\n".join([f"{result['machine']['cpu']}, {_day(result)}:", "", *_table(["loss", *kinds], rows)])


def rolling(results: list[dict[str, Any]]) -> str:
    """Return a table of losses and accuracies, a row for each network and a column for each policy."""
    (result,) = (result for result in results if result["benchmark"] == "rolling")
    runs: dict[str, dict[str, list[Record]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["family"], {}).setdefault(run["policy"], []).append(run)
    policies = list(next(iter(runs.values())))
    rows = [[name, *(_mean_score(by_policy[policy]) for policy in policies)] for name, by_policy in runs.items()]
    return "\n".join([f"{result['machine']['cpu']}, {_day(result)}:", "", *_table(["", *policies], rows)])


def _mean_score(runs: Sequence[Record]) -> str:
    loss = f"{statistics.mean(run['loss'] for run in runs):.4g}"
    accuracies = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
    return f"{loss}; {statistics.mean(accuracies):.2f} %" if accuracies else loss


def _day(result: Mapping[str, Any]) -> str:
    """Return the day of a result, and whether the code that it measures is another by now."""
    return f"{result['date'][:10]}{', stale' if stale.changed(result) else ''}"


def _choice(place: str, ours: Record, best: Record) -> list[str]:
    quicker = (
        "idletrain" if at_best(ours) < at_best(best) else best["method"] if best["seconds"] is not None else "open"
    )
    return [place, f"{ours['target']:.2f}", seconds_of(ours), f"{best['method']}: {seconds_of(best)}", quicker]


def markers(name: str) -> tuple[str, str]:
    """Return the comments around a table of a page with several."""
    return f"<!-- {name}: python -m benchmarks.tables -->", f"<!-- end of {name} -->"


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return the text with its content between two markers replaced.

    Raises:
        ValueError: it lacks a marker.
    """
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or end not in rest:
        raise ValueError(f"the page has no {begin} or no {end}")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main() -> None:
    """Write RESULTS.md and the tables in docs/."""
    results = [json.loads(path.read_text()) for path in sorted(stale.RESULTS.glob("*.json"))]
    (Path(__file__).parent / "RESULTS.md").write_text(page(results))
    for name, begin, end, content in (
        ("results.md", BEGIN, END, summary(results)),
        ("comparison.md", PEERS_BEGIN, PEERS_END, choice(results)),
        ("guides/slow-links.md", LINKS_BEGIN, LINKS_END, links(results)),
        ("modules.md", MODULES_BEGIN, MODULES_END, modules(results)),
        ("concepts/recipes.md", *markers("recipes"), recipes(results)),
        ("concepts/recipes.md", *markers("endings"), endings(results)),
        ("concepts/recipes.md", *markers("splits"), splits(results)),
        ("concepts/recipes.md", *markers("rates"), rates(results)),
        ("concepts/recipes.md", *markers("defaults"), defaults(results)),
        ("concepts/policies.md", *markers("rolling"), rolling(results)),
    ):
        page_ = DOCS / name
        page_.write_text(between(page_.read_text(), begin, end, content))


if __name__ == "__main__":
    main()
