"""Rank the methods of a comparison: the arithmetic on its records, its figures and its tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.methods import METHODS
from benchmarks.report import Figure, at_least

# Rivals of ist, and how many times its seconds and bytes they should take at least; the IST paper (Speech): 10.6, 4.2.
RIVALS = {
    "ddp": (("ddp",), 15.0),
    "local SGD's best kind": (("local-sgd", "post-local-sgd", "torchft-local-sgd", "torchft-diloco"), 4.0),
}
AIMS = (("b", 8, "100mbit"), ("tiny", 2, "none"))  # where that is required: case, nodes, link
PLACE = ("case", "nodes", "link", "head_link")
LEVELS_BELOW = (0.08, 0.06, 0.04, 0.02, 0.01, 0.0)
Record = dict[str, Any]


def ranking(runs: Sequence[Record], below: float = 0.0) -> list[Record]:
    """Return the best of every method's settings, for each case, number of nodes and links.

    Args:
        runs: Records of `race.run`.
        below: How far below the case's target the accuracy lies whose time is reported.

    Returns:
        Records with `seconds` and `bytes` to that accuracy, whether they are `computed`, `steps`, `settings`, and of a
        step the seconds and the shares of its parts. Where it was not reached those are None, and `more_than` says how
        many seconds were not enough (None where the method was only timed).
    """
    best: dict[tuple[Any, ...], Record] = {}
    for record in runs:
        row = _place_row(record, runs, round(record["target"] - below, 6))
        key = tuple(row[name] for name in (*PLACE, "method"))
        if key not in best or _rank(row) < _rank(best[key]):
            best[key] = row
    return sorted(best.values(), key=lambda s: (*(s[name] for name in PLACE), s["seconds"] is None, at_best(s)))


def at_best(row: Record) -> float:
    """Return the least time that a method can have taken: to the target, or the time that was not enough."""
    known = row["more_than"] if row["seconds"] is None else row["seconds"]
    return float("inf") if known is None else float(known)


def _rank(row: Record) -> tuple[int, float]:
    """Rank one setting of a method: the least rank counts.

    A setting that got nowhere by the end of its schedule never will: of such, the longest says for how long the method
    was given a chance.
    """
    if row["seconds"] is not None:
        return 0, at_best(row)
    return (2, -at_best(row)) if row["exhausted"] else (1, at_best(row))


def _place_row(record: Record, runs: Iterable[Record], target: float) -> Record:
    """Return one run's time to the target: its own, or by the steps that the same settings took over other links."""
    names = (*PLACE, "method", "settings", "step_seconds")
    parts = {part: record.get(f"{part}_step_seconds", 0.0) for part in ("local", "pull", "push")}
    row = {name: record[name] for name in names} | {
        "target": target,
        "shares": {part: seconds / record["step_seconds"] for part, seconds in parts.items()},
        "cores": record.get("cores", {}),
        "bytes_per_step": record["bytes_per_step"],
        "curve": record["curve"],
        "computed": False,
        "more_than": None,
        "more_bytes": None,
        "exhausted": False,
    }
    if own := reached(record, target):
        return row | {"steps": own[0], "seconds": own[1], "bytes": own[2]}
    alike = [other for other in runs if other["curve"] and _learning(other) == _learning(record)]
    for other in alike:
        if point := reached(other, target):
            carried = record["bytes_per_step"]
            return row | {
                "steps": point[0],
                "seconds": point[0] * record["step_seconds"],
                "bytes": None if carried is None else point[0] * carried,
                "curve": other["curve"],
                "computed": True,
            }
    if alike:  # so many steps were seen not to do
        scored = max(other["curve"][-1][0] for other in alike)
        row["more_than"] = scored * record["step_seconds"]
        row["more_bytes"] = record["bytes_per_step"] and scored * record["bytes_per_step"]
        row["exhausted"] = scored >= record["settings"].get("horizon", math.inf)
    return row | {"steps": None, "seconds": None, "bytes": None}


def _learning(record: Record) -> tuple[Any, ...]:
    """Return what decides how many steps a method needs; one algorithm in several libraries has the same."""
    method, settings = record["method"], dict(record["settings"])
    if method in ("post-local-sgd", "torchft-local-sgd") and not settings.pop("warmup", 0):
        method = "local SGD"
    if method == "ddp-fp16":
        method = "ddp"
    return record["case"], record["nodes"], method, settings


def reached(record: Record, target: float) -> list[Any] | None:
    """Return the first point of a run's curve at an accuracy."""
    return next((point for point in record["curve"] if point[3] >= target), None)


def figures_of(runs: Sequence[Record]) -> list[Figure]:
    """Return the ranking, and the figures of the targets."""
    table = ranking(runs)
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
    """Return a row's place in words."""
    head = "" if s["head_link"] == s["link"] else f", head {s['head_link']}"
    return f"case {s['case']}, {s['nodes']} nodes, {s['link']}{head}"


def _beside(s: Record, ist: Record) -> bool:
    """Return whether a row is comparable with one of ist; the head's link counts only with data on the head."""
    same = all(s[name] == ist[name] for name in ("case", "nodes", "link"))
    return same and (s["head_link"] == ist["head_link"] or not METHODS[s["method"]].ours)


def _ratios(ist: Record, beside: Sequence[Record]) -> list[Figure]:
    """Return how many times ist's seconds and bytes the rivals took at least."""
    figures = []
    for name, (methods, limit) in RIVALS.items():
        tried = [s for s in beside if s["method"] in methods and at_best(s) < float("inf")]
        if not tried:
            continue
        rival = min(tried, key=at_best)
        figures.append(_ratio(f"{where(ist)}: time, {name} / ist", at_best(rival) / ist["seconds"], rival, limit))
        sent = [s for s in tried if s["bytes"] or s["more_bytes"]]
        if sent and ist["bytes"]:
            least = min(sent, key=_bytes_at_best)
            ratio = _bytes_at_best(least) / ist["bytes"]
            figures.append(_ratio(f"{where(ist)}: bytes, {name} / ist", ratio, least, limit))
    return figures


def _bytes_at_best(s: Record) -> float:
    """Return the least bytes that a method can have sent: to the target, or those that were not enough."""
    return float(s["bytes"] or s["more_bytes"])


def _ratio(what: str, ratio: float, rival: Record, limit: float) -> Figure:
    """Return a ratio with its target; a lower bound either meets the target or says nothing about it."""
    if rival["seconds"] is not None:
        return at_least(what, ratio, "x", limit)
    return at_least(what, ratio, "x or more", limit) if ratio >= limit else Figure(what, ratio, "x or more")


def tables_of(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return tables for RESULTS.md by case, nodes and links: best settings of every method, and where time goes."""
    head = ["method", "seconds", "MB over the links", "steps a node", "s a step", "of which", "cores", "settings"]
    return [
        {"title": f"{place}, to {rows[0]['target']:g}", "head": head, "rows": [_row(s) for s in rows]}
        for place, rows in by_place(ranking(runs)).items()
    ]


def by_place(table: Iterable[Record]) -> dict[str, list[Record]]:
    """Group rows by their place in words."""
    places: dict[str, list[Record]] = {}
    for s in table:
        places.setdefault(where(s), []).append(s)
    return places


def levels_of(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return tables for RESULTS.md: seconds to accuracies below the target, too, the best settings for each."""
    levels = [by_place(ranking(runs, below)) for below in LEVELS_BELOW]
    tables = []
    for place, at_target in levels[-1].items():
        rows = []
        for method in (s["method"] for s in at_target):
            by_level = [next(s for s in level[place] if s["method"] == method) for level in levels]
            rows.append([method, *(seconds_of(s) for s in by_level)])
        head = ["method", *(f"to {level[place][0]['target']:.2f}" for level in levels)]
        tables.append(
            {"title": f"{place}: seconds to lower accuracies, too (~ is computed)", "head": head, "rows": rows}
        )
    return tables


def seconds_of(s: Record) -> str:
    """Return a row's time in words."""
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
    """Return shares in percent, those that are known."""
    return ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares.items() if share)
