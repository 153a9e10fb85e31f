"""How much sooner is a network good over lossy links with shallow buffers, when its parameters are coded and datagrams?

Case b of the comparison (methods.py) with `ist` on eight nodes, links of 100 Mbit/s that lose 0.5 % and hold 64 KB
(`idletrain-testbed`; needs root): parameters as float32 over TCP with CUBIC, coded over TCP, coded as datagrams with a
tenth that may come later; all under `salvage`, which alone lets a part come later. Seconds from the first lease to the
first snapshot at an accuracy of 0.88, three runs each, in turns.

    python -m benchmarks.lossy_rounds [--tiny] [--json FILE]

Target: 1.84 times faster than float32 over TCP (what DLCP, arXiv 2008.08445, reports of its own testbed: +84.3 %).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.contest import run
from benchmarks.methods import CASES, Case, Entry
from benchmarks.report import Figure, arguments, at_least, report

CODED = {"pull": "int8", "push": "int4"}
EXCHANGES: dict[str, dict[str, Any]] = {
    "float32, TCP": {},
    "int8 and int4, TCP": CODED,
    "int8 and int4, datagrams, a tenth later": CODED | {"transport": "udp", "loss": 0.1},
}
FAULTS = {"loss": "0.5%", "queue": "64KB"}


@dataclass(frozen=True)
class Plan:
    """How much is trained how often."""

    case: Case = CASES["b"]
    nodes: int = 8
    link: str = "100mbit"
    settings: tuple[tuple[str, Any], ...] = (
        ("lr", 0.1),
        ("momentum", 0.9),
        ("state", "reset"),
        ("schedule", "cosine"),
        ("local_steps", 100),
    )
    steps: int = 1600
    repeats: int = 3
    budget_seconds: float = 400.0


TINY = Plan(
    replace(CASES["tiny"], target=0.3),
    nodes=2,
    link="none",
    settings=(("lr", 0.1), ("state", "reset"), ("local_steps", 20)),
    steps=160,
    repeats=1,
    budget_seconds=60.0,
)


def seconds_to(record: dict[str, Any]) -> float:
    """Until the first snapshot at the target; infinite if there was none."""
    reached = [seconds for _, seconds, _, accuracy in record["curve"] if accuracy >= record["target"]]
    return min(reached, default=float("inf"))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train and report."""
    options = arguments(__doc__, argv)
    plan = TINY if options.tiny else Plan()
    faults: dict[str, Any] = {} if options.tiny else FAULTS
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in EXCHANGES}
    for _ in range(plan.repeats):
        for name, exchange in EXCHANGES.items():
            settings = {**dict(plan.settings), "exchange": exchange, "preemption": {"policy": "salvage"}}
            entry = Entry(
                method="ist",
                settings=settings,
                steps=plan.steps,
                snapshot_every=plan.steps // 16,
                budget_seconds=plan.budget_seconds,
            )
            records[name].append(run(plan.case, entry, plan.nodes, plan.link, **faults))
            print(f"{name}: {seconds_to(records[name][-1]):.0f} s", flush=True)
    found = {name: [seconds_to(record) for record in mine] for name, mine in records.items()}
    typical = {name: statistics.median(seconds) for name, seconds in found.items()}
    plain, *others = EXCHANGES
    figures = [Figure(f"{name}: to {plan.case.target}", typical[name], "s", samples=found[name]) for name in EXCHANGES]
    figures += [Figure(f"{plain} / {name}", typical[plain] / typical[name], "") for name in others[:-1]]
    figures.append(at_least(f"{plain} / {others[-1]}", typical[plain] / typical[others[-1]], "", 1.84))
    return report("lossy_rounds", options, figures, runs=records)


if __name__ == "__main__":
    main()
