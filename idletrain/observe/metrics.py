"""Export a run's view (see `observe.status`) as Prometheus metrics.

Names and units follow https://prometheus.io/docs/practices/naming/: base units, `_total` on counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RunView = Mapping[str, Any]
# Name, help, label, and a function of the view: a number, or numbers by the label's value; None leaves the metric out.
Kinds = tuple[tuple[str, str, str, Callable[[RunView], Any]], ...]
COUNTERS: Kinds = (
    ("rounds", "Rounds committed.", "", lambda v: v["rounds"]),
    ("local_steps", "Local steps of committed rounds.", "", lambda v: v["local_steps"]),
    ("lost_steps", "Local steps lost, by the reason why the lease ended.", "cause", lambda v: v["lost_by_cause"]),
    ("salvaged_steps", "Local steps of preempted workers that were kept.", "", lambda v: v["salvaged_steps"]),
    ("preemptions", "Workers that were preempted, by notice or kill.", "cause", lambda v: v["preemptions"]),
    ("reissues", "Subnets leased again to another worker.", "", lambda v: v["reissues"]),
    ("backups", "Slow subnets leased a second time to an idle worker.", "", lambda v: v["backups"]),
    ("put", "Updates and progress checkpoints pushed to the store, by its reply.", "reply", lambda v: v["puts"]),
    (
        "exchange_bytes",
        "Bytes pulled by workers (down) and pushed to the store (up).",
        "direction",
        lambda v: {"down": v["bytes_down"], "up": v["bytes_up"]},
    ),
)
GAUGES: Kinds = (
    (
        "goodput_ratio",
        "Workers' seconds of committed steps over their seconds alive.",
        "",
        lambda v: v["goodput"],
    ),
    ("planned_rounds", "Rounds that the job asks for.", "", lambda v: v["total_rounds"]),
    ("round_duration_seconds", "Smoothed length of a round.", "", lambda v: v["round_seconds"]),
    ("accuracy_ratio", "Accuracy at the last evaluation.", "", lambda v: v["accuracy"]),
    ("loss", "Test loss at the last evaluation.", "", lambda v: v["loss"]),
    (
        "workers",
        "Workers in the cluster, by state.",
        "state",
        lambda v: {state: count for state, count in v["states"].items() if state != "gone"},
    ),
    (
        "link_bytes_per_second",
        "The fastest transfer of an update so far.",
        "",
        lambda v: v["link_bytes_per_second"],
    ),
    ("cost_usd", "Cost of the machines so far.", "", lambda v: _cost(v, "spent_usd")),
    ("cost_usd_per_hour", "Present cost of the machines per hour.", "", lambda v: _cost(v, "usd_per_hour")),
    ("budget_left_usd", "Rest of the budget.", "", lambda v: _cost(v, "left_usd")),
    ("last_event_timestamp_seconds", "Unix time of the last recorded event.", "", lambda v: v["updated"]),
)


class RunCollector(Collector):
    """The Prometheus collector of a scheduler's run.

    Args:
        view: Returns the present view; empty before there is a run.
    """

    def __init__(self, view: Callable[[], RunView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the present view."""
        return families(self._view())

    def describe(self) -> list[Metric]:
        """Return no names: they are known only once there is a run."""
        return []


def families(view: RunView) -> Iterator[Metric]:
    """Yield the metrics of a view; none before there is a run."""
    if not view:
        return
    everything: tuple[tuple[Any, Kinds], ...] = ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES))
    for family, kinds in everything:
        for name, text, label, read in kinds:
            value = read(view)
            if value is None:
                continue
            metric = family(f"idletrain_{name}", text, labels=["run", label] if label else ["run"])
            for key, number in value.items() if label else ((None, value),):
                metric.add_metric([view["run"], *([key] if label else [])], number)
            yield metric


def _cost(view: RunView, what: str) -> float | None:
    value: float | None = (view["cost"] or {}).get(what)
    return value
