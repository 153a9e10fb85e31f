"""Write RESULTS.md, and the README's table, from the benches' own files: no number in them was typed by hand.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.time_to_accuracy import standings, where

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results: python -m benchmarks.tables -->", "<!-- end of results -->"
PEERS_BEGIN, PEERS_END = "<!-- peers: python -m benchmarks.tables -->", "<!-- end of peers -->"
HEAD = """# Results

Made by `python -m benchmarks.tables` from `results/*.json`, which `python -m benchmarks` writes; every file holds the
raw samples. Figures are medians where a bench repeats itself; the machines are shared and noisy, so read ratios before
absolute times.
"""


def page(results: list[dict[str, Any]]) -> str:
    """The page, one table a bench."""
    return "\n".join([HEAD, *(line for result in results for line in _section(result))])


def _section(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"## {result['benchmark'].replace('_', ' ')}\n"
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 2**30:.0f} GiB; {result['date'][:10]};"
    yield f"{versions}.\n"
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


def summary(results: list[dict[str, Any]]) -> str:
    """The figures that have a target, in one table."""
    rows = ["| bench | figure | value | target | | date |", "|---|---|---|---|---|---|"]
    rows += [
        f"| {result['benchmark'].replace('_', ' ')} | {f['what']} | {f['value']:.3g} {f['unit']} | {f['target']} "
        f"| {'met' if f['met'] else '**missed**'} | {result['date'][:10]} |"
        for result in results
        for f in result["figures"]
        if f["met"] is not None
    ]
    machine = results[0]["machine"]
    return "\n".join([f"On {machine['cores']} shared cores of an {machine['cpu']}:\n", *rows])


def choice(results: list[dict[str, Any]]) -> str:
    """Per case, nodes and links: how long `ist` took, and the quickest of the others."""
    runs: list[dict[str, Any]] = next(
        (result["runs"] for result in results if result["benchmark"] == "time_to_accuracy"), []
    )
    places: dict[str, list[dict[str, Any]]] = {}
    for s in standings(runs):
        if s["link"] != "none":
            places.setdefault(f"{where(s)}, to {s['target']:g}", []).append(s)
    rows = []
    for place, methods in places.items():
        ours = next((s for s in methods if s["method"] == "ist"), None)
        others = [s for s in methods if s["method"] != "ist"]
        if ours and ours["seconds"] is not None and others:
            best = min(others, key=_bound)
            quicker = "idletrain" if ours["seconds"] < _bound(best) else best["method"]
            rows.append([place, _time(ours), f"{best['method']}, {_time(best)}", quicker])
    if not rows:
        return "No place has been measured all the way to its target yet."
    return "\n".join(_table(["where", "ist", "quickest other", "take"], rows))


def _bound(standing: dict[str, Any]) -> float:
    """Seconds to the target, or how many were not enough."""
    return float(standing["more_than"] if standing["seconds"] is None else standing["seconds"])


def _time(standing: dict[str, Any]) -> str:
    more = "more than " if standing["seconds"] is None else ""
    return f"{more}{_bound(standing):.0f} s{' (computed)' if standing['computed'] else ''}"


def between(text: str, begin: str, end: str, content: str) -> str:
    """The text with other content between two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main() -> None:
    """Write RESULTS.md and the README's tables."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    (Path(__file__).parent / "RESULTS.md").write_text(page(results))
    readme = Path(__file__).parent.parent / "README.md"
    text = between(readme.read_text(), BEGIN, END, summary(results))
    readme.write_text(between(text, PEERS_BEGIN, PEERS_END, choice(results)))


if __name__ == "__main__":
    main()
