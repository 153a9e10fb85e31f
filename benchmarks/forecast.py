"""Does a round take what it was expected to take?

Cases of the comparison, a few rounds of each, on machines with links of a rate (`idletrain-testbed`; needs root, but
for `none`). Each run looks at its fleet first, as a launch does, and its rounds hold what they were expected to take.

    python -m benchmarks.forecast [--tiny] [--json FILE] [--case a,b,c,d] [--nodes 4,8] [--link 1gbit,100mbit]

Target: within 15 % of what was measured, every case.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.candidates import RATES, WHOLE
from benchmarks.contest import run
from benchmarks.methods import CASES, Entry
from benchmarks.report import Figure, at_most, parser, report
from benchmarks.runs import of_kind
from benchmarks.time_to_accuracy import numbers, words
from idletrain.fabric.forecast import PARTS
from idletrain.observe.records import read

OFF = 0.15
WARM_UP_ROUNDS = 1  # the first loads the program
ROUNDS = 6
TRAININGS = (("ist", 50), ("local-sgd", 10))
BUDGET_SECONDS = 240.0


def entry_of(case: str, method: str, local_steps: int, rounds: int) -> Entry:
    """Some rounds of a case."""
    rates = RATES.get(case, {"lr": 0.05})
    told = {**rates, **WHOLE.get(case, {}), "state": "reset", "local_steps": local_steps}
    steps = rounds * local_steps
    return Entry(method=method, settings=told, steps=steps, budget_seconds=BUDGET_SECONDS, foreseen=True)


def compared(case: str, entry: Entry, nodes: int, link: str) -> Iterator[Figure]:
    """A case's rounds, and how far off the forecast was."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        run(CASES[case], entry, nodes, link, events=Path(folder))
        committed = of_kind(list(read(Path(folder) / "events.jsonl")), "round_committed")[WARM_UP_ROUNDS:]
    expected, seconds = committed[0]["expected"], [event["seconds"] for event in committed]
    off = abs(sum(expected.values()) / statistics.median(seconds) - 1)
    name = f"case {case}, {entry.method}, {entry.settings['local_steps']} steps, {nodes} nodes, {link}"
    yield at_most(f"{name}: off by", off, "", OFF, seconds)
    for part in PARTS:
        each = [event["measured"][part] for event in committed]
        yield Figure(f"{name}: {part}, expected", expected[part], "s")
        yield Figure(f"{name}: {part}, measured", statistics.median(each), "s", samples=each)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run and report."""
    command = parser(__doc__)
    command.add_argument("--case", type=words, default=["a", "b", "c", "d"])
    command.add_argument("--nodes", type=numbers, default=[4, 8])
    command.add_argument("--link", type=words, default=["1gbit", "100mbit"])
    options = command.parse_args(argv)
    cases, places = options.case, [(nodes, link) for link in options.link for nodes in options.nodes]
    trainings, rounds = list(TRAININGS), ROUNDS
    if options.tiny:
        cases, places, trainings, rounds = ["tiny"], [(2, "none")], [("ist", 5)], 3
    figures: list[Figure] = []
    for place in places:
        for case in cases:
            for method, local_steps in trainings:
                found = list(compared(case, entry_of(case, method, local_steps, rounds), *place))
                figures += found
                print(f"{found[0].what} {found[0].value:.0%}", flush=True)
    return report("forecast", options, figures)


if __name__ == "__main__":
    main()
