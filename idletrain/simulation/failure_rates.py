"""Say what every kind of training comes to on fleets whose nodes go more and more often: the lines of a chart. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from idletrain.simulation.engine import Policy, Simulation, Work
from idletrain.simulation.fleet import Fleet
from idletrain.simulation.peers import PEERS, data_parallel

HOUR = 3600.0
USUAL_STAY_SECONDS = 6 * HOUR  # of a fleet whose nodes stay for ever
PARTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the given rate


def goodput_by_rate(
    works: Mapping[Policy, Work],
    fleet: Fleet,
    seconds: float,
    most_events: float = math.inf,
    report: Callable[[int, int], None] = lambda _number, _of: None,
) -> dict[str, list[tuple[float, float]]]:
    """Return for each kind of training its goodput at several rates of lost nodes: without any, to 8 times the fleet's.

    Args:
        works: What nodes do under each policy.
        fleet: The fleet; its trace is left out.
        seconds: Simulated time of each point.
        most_events: Events after which a point's simulation ends early.
        report: Called with the number of each rate, from 1 on, and how many there are.

    Returns:
        Points by the name of the training: losses of a node and hour, and goodput from 0 to 1.
    """
    stay = fleet.stay_seconds if math.isfinite(fleet.stay_seconds) else USUAL_STAY_SECONDS
    step_seconds = max(work.step_seconds for work in works.values())
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in (*works, *PEERS)}
    for number, part in enumerate((0.0, *PARTS), 1):
        report(number, len(PARTS) + 1)
        there = replace(fleet, stay_seconds=stay / part if part else math.inf, changes=())
        rate = part * HOUR / stay
        for policy, work in works.items():
            lines[policy].append((rate, Simulation(work, there).run(seconds, most_events).goodput))
        for name, model in PEERS.items():
            lines[name].append((rate, data_parallel(model(step_seconds), there, seconds).goodput))
    return lines
