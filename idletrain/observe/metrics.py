"""A run as Prometheus sees it: families of metrics, from a view alone.

Names and units follow https://prometheus.io/docs/practices/naming/: base units, `_total` on what only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RunView = Mapping[str, Any]
# name, help, label, what to read: a number, or numbers by the label's value; None is left out
Kinds = tuple[tuple[str, str, str, Callable[[RunView], Any]], ...]
COUNTERS: Kinds = (
    ("rounds", "Rounds committed.", "", lambda v: v["rounds"]),
    ("local_steps", "Local steps in the network.", "", lambda v: v["local_steps"]),
    ("lost_steps", "Local steps that were lost, by why the lease ended.", "cause", lambda v: v["lost_by_cause"]),
    ("salvaged_steps", "Steps of preempted workers that were kept.", "", lambda v: v["salvaged_steps"]),
    ("preemptions", "Workers taken, with a notice or without.", "cause", lambda v: v["preemptions"]),
    ("reissues", "Subnets that went on at another worker.", "", lambda v: v["reissues"]),
    ("put", "Updates and marks pushed to the store, by its reply.", "reply", lambda v: v["puts"]),
    (
        "exchange_bytes",
        "Parameters moved, down to workers and up to the store.",
        "direction",
        lambda v: {"down": v["bytes_down"], "up": v["bytes_up"]},
    ),
)
GAUGES: Kinds = (
    (
        "goodput_ratio",
        "Node-seconds whose steps are in the network, over node-seconds alive.",
        "",
        lambda v: v["goodput"],
    ),
    ("planned_rounds", "Rounds that the job asks for.", "", lambda v: v["total_rounds"]),
    ("round_duration_seconds", "Length of a round, smoothed.", "", lambda v: v["round_seconds"]),
    ("accuracy_ratio", "Of the last evaluation.", "", lambda v: v["accuracy"]),
    ("loss", "Of the last evaluation.", "", lambda v: v["loss"]),
    (
        "workers",
        "Workers that are there, by state.",
        "state",
        lambda v: {state: count for state, count in v["states"].items() if state != "gone"},
    ),
    (
        "link_bytes_per_second",
        "The fastest transfer of an update so far.",
        "",
        lambda v: v["link_bytes_per_second"],
    ),
    ("cost_usd", "What the machines cost so far.", "", lambda v: _cost(v, "spent_usd")),
    ("cost_usd_per_hour", "What the machines that are there cost.", "", lambda v: _cost(v, "usd_per_hour")),
    ("budget_left_usd", "What is left of the budget.", "", lambda v: _cost(v, "left_usd")),
    ("last_event_timestamp_seconds", "When the head last recorded something.", "", lambda v: v["updated"]),
)


class RunCollector(Collector):
    """Prometheus' collector of the run on a scheduler.

    Args:
        view: Gives the view now, empty before there is one.
    """

    def __init__(self, view: Callable[[], RunView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        return families(self._view())

    def describe(self) -> list[Metric]:
        """Nothing: names are known once there is a run."""
        return []


def families(view: RunView) -> Iterator[Metric]:
    """The metrics of a view; none before there is a run."""
    if not view:
        return
    everything: tuple[tuple[Any, Kinds], ...] = ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES))
    for family, kinds in everything:
        for name, text, label, read in kinds:
            value = read(view)
            if value is None:
                continue
            made = family(f"idletrain_{name}", text, labels=["run", label] if label else ["run"])
            for key, number in value.items() if label else ((None, value),):
                made.add_metric([view["run"], *([key] if label else [])], number)
            yield made


def _cost(view: RunView, what: str) -> float | None:
    value: float | None = (view["cost"] or {}).get(what)
    return value
