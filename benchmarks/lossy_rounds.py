"""Measure how much faster coded parameters and datagrams reach an accuracy over lossy links with shallow buffers.

Case b of the comparison (methods.py) with `ist` on eight nodes, links of 100 Mbit/s that lose 0.5 % and hold 64 KB
(`idletrain-testbed`; needs root): parameters as float32 over TCP with CUBIC, coded over TCP, coded as datagrams with a
tenth that may come later; all under `salvage`, which alone lets a part come later. Seconds from the first lease to an
accuracy of 0.88, between two snapshots in proportion, three runs each, in turns: with rounds of 100 local steps, the
best for float32, which spend most of their time on arithmetic (of nodes that share two cores), and of 25, which spend
most of it on the exchange.

    python -m benchmarks.lossy_rounds [--tiny] [--json FILE]

Nodes, head and links share this machine's cores, and what keeps them busy no overlap can hide. So the ratio is shown
beside two limits, from the same runs: what it would be with local work alone, and with cores that are never idle (they
also code, move data and emulate links).

Target: 1.84 times faster than float32 over TCP (what DLCP, arXiv 2008.08445, reports of its own testbed: +84.3 %).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.methods import CASES, Case, Entry
from benchmarks.race import run, seconds_to
from benchmarks.report import Figure, at_least, report, with_preset

CODED = {"pull": "int8", "push": "int4"}
EXCHANGES: dict[str, dict[str, Any]] = {
    "float32, TCP": {},
    "int8 and int4, TCP": CODED,
    "int8 and int4, datagrams, a tenth later": CODED | {"transport": "udp", "loss": 0.1},
}
PEER_RATIO = 1.84
FAULTS = {"loss": "0.5%", "queue": "64KB"}


@dataclass(frozen=True)
class Preset:
    """The training, links and repetitions."""

    case: Case = CASES["b"]
    nodes: int = 8
    link: str = "100mbit"
    settings: tuple[tuple[str, Any], ...] = (
        ("lr", 0.1),
        ("momentum", 0.9),
        ("state", "reset"),
        ("schedule", "cosine"),
    )
    local_steps: tuple[int, ...] = (100, 25)
    steps: int = 1600
    repeats: int = 3
    budget_seconds: float = 400.0


TINY = Preset(
    replace(CASES["tiny"], target=0.3),
    nodes=2,
    link="none",
    settings=(("lr", 0.1), ("state", "reset")),
    local_steps=(20,),
    steps=160,
    repeats=1,
    budget_seconds=60.0,
)


def train(preset: Preset, local_steps: int, exchange: dict[str, Any], faults: dict[str, Any]) -> dict[str, Any]:
    """Run one training."""
    settings = {**dict(preset.settings), "local_steps": local_steps}
    entry = Entry(
        method="ist",
        settings={**settings, "exchange": exchange, "preemption": {"policy": "salvage"}},
        steps=preset.steps,
        snapshot_every=preset.steps // 16,
        budget_seconds=preset.budget_seconds,
    )
    return run(preset.case, entry, preset.nodes, preset.link, **faults)


def figures_of(where: str, records: dict[str, list[dict[str, Any]]]) -> Iterator[Figure]:
    """Yield seconds with each exchange, and how many times fewer they are than with float32."""
    seconds_by_exchange = {name: [seconds_to(record) for record in runs] for name, runs in records.items()}
    typical = {name: statistics.median(seconds) for name, seconds in seconds_by_exchange.items()}
    for name, seconds in seconds_by_exchange.items():
        yield Figure(f"{where}: {name}", typical[name], "s", samples=seconds)
    plain, coded, datagrams = EXCHANGES
    yield Figure(f"{where}: {plain} / {coded}", typical[plain] / typical[coded], "")
    label, ratio = f"{where}: {plain} / {datagrams}", typical[plain] / typical[datagrams]
    runs = records[datagrams]
    local, busy = (
        statistics.median(seconds_to(run) * share_of(run) for run in runs) for share_of in (_local_share, _busy_share)
    )
    yield Figure(f"{label}: with local work alone", typical[plain] / local, "")
    yield Figure(f"{label}: with cores never idle", typical[plain] / busy, "")
    yield at_least(label, ratio, "", PEER_RATIO)


def _local_share(record: dict[str, Any]) -> float:
    """Return the share of a run's time that a node spent in local steps."""
    return float(record["local_step_seconds"] / record["step_seconds"])


def _busy_share(record: dict[str, Any]) -> float:
    """Return the share of a run's time that the cores were busy."""
    return 1 - float(record["cores"]["idle"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    faults: dict[str, Any] = {} if options.tiny else FAULTS
    figures: list[Figure] = []
    every: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for local_steps in preset.local_steps:
        where = f"{local_steps} local steps"
        records = every[where] = {name: [] for name in EXCHANGES}
        for _ in range(preset.repeats):
            for name, exchange in EXCHANGES.items():
                records[name].append(train(preset, local_steps, exchange, faults))
                print(f"{where}: {name}: {seconds_to(records[name][-1]):.0f} s", flush=True)
        figures += figures_of(where, records)
    return report("lossy_rounds", options, figures, runs=every)


if __name__ == "__main__":
    main()
