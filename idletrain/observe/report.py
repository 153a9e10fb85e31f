"""Report on runs for `idletrain report`: as one self-contained HTML file, and as a few lines of text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from idletrain.job import Job
from idletrain.observe import charts, cost, record_fields, time_use
from idletrain.observe.display import BAR_WIDTH, bar_of, final_lines
from idletrain.observe.records import Record
from idletrain.observe.status import View, thinned, view_of
from idletrain.observe.summary import Summary, summary_of

LIVE_SECONDS = 120.0  # since the last event of a run that has not ended, after which its head counts as gone
WHICH_RUN = ("name", "checkpoint.to")  # settings that tell where a run is, not how it trains
RUN_COLOURS = 5  # in the style sheet
LANES_ROUNDS = 2000  # most rounds given to a timeline


@dataclass(frozen=True)
class PastRun:
    """A run for a report.

    Attributes:
        name: The run's name in the report.
        events: All of its events.
        summary: The sum of the events.
        view: The view at the report's time.
        shares: Shares of the workers' time, by purpose; those that round to zero are left out.
        machines: Items of the bill, each with the reason why the machine ended ("" if unknown).
        wasted_usd: Cost of steps lost to preemption; None without priced machines.
    """

    name: str
    events: Sequence[Record]
    summary: Summary
    view: View
    shares: Mapping[str, float]
    machines: Sequence[tuple[cost.BillItem, str]]
    wasted_usd: float | None

    @classmethod
    def of(cls, name: str, events: Sequence[Record], now: float, *, is_over: bool = False) -> PastRun:
        """Build it from a run's events; machines without a recorded end are billed until `now` (Unix seconds).

        A run without a recorded end was interrupted if it is over, or silent for long.
        """
        summary = summary_of(events)
        summary.run = summary.run or name
        view = view_of(summary, now)
        if summary.status == "running" and (is_over or view["heard_seconds"] > LIVE_SECONDS):
            view["status"] = "interrupted"
        view["seconds"], view["heard_seconds"] = summary.seconds, 0.0
        all_shares = time_use.time_shares(events, summary.alive_seconds)
        shares = {part: share for part, share in all_shares.items() if share >= 0.0005}
        ends = {event["instance"]: event["reason"] for event in events if event["kind"] == "instance_ended"}
        items = cost.accrued(summary.machines, now).items
        wasted = cost.wasted_usd(events, now) if items else None
        return cls(name, events, summary, view, shares, [(i, ends.get(i.instance, "")) for i in items], wasted)

    @property
    def job_yaml(self) -> str:
        """The job file as YAML, as far as the records hold it."""
        job = self.summary.settings.get("job")
        return yaml.safe_dump(job, sort_keys=False, allow_unicode=True) if job else ""

    @property
    def cohorts(self) -> list[str]:
        """The workers' cohorts (hardware and libraries with the same bitwise results), each once."""
        return sorted({e["cohort"] for e in self.events if e["kind"] == "worker_joined" and e.get("cohort")})

    @property
    def rounds(self) -> list[tuple[str, float | None, float]]:
        """Each part of a round with its median seconds as forecast (None without a forecast) and as measured."""
        measured = [e for e in self.events if e["kind"] == "round_committed" and e.get("measured")]
        forecasts = [e["expected"] for e in measured if "expected" in e]
        return [
            (
                part,
                statistics.median([expected[part] for expected in forecasts]) if forecasts else None,
                statistics.median([e["measured"][part] for e in measured]),
            )
            for part in (record_fields.ROUND_PARTS if measured else ())
        ]

    @property
    def why(self) -> list[str]:
        """The reasons for the settings that a launch chose, as sentences."""
        return next((list(e["why"]) for e in reversed(self.events) if e["kind"] == "run_started" and e.get("why")), [])

    @property
    def timeline(self) -> charts.Timeline:
        """The chart of workers and rounds over time."""
        summary = self.summary
        rounds = thinned(summary.round_ends, LANES_ROUNDS)
        return charts.worker_timeline(summary.all_workers, rounds, summary.seconds)


def report_page(runs: Sequence[PastRun]) -> str:
    """Return the report's HTML: one run in full, or several side by side."""
    template = charts.templates().get_template("report.html")
    compared = {"rows": comparison(runs), "charts": _charts(runs)} if len(runs) > 1 else {}
    return template.render(runs=runs, made=time.time(), **compared)


def short(run: PastRun) -> list[str]:
    """Return the report as a few lines of text."""
    summary, view = run.summary, run.view
    lines = final_lines(summary, f"{summary.run}: {view['status']}")
    if run.shares:
        ranked = sorted(run.shares.items(), key=lambda part: -part[1])
        lines.append(
            "  the workers' time: " + ", ".join(f"{share:.0%} {part}" for part, share in ranked if share >= 0.005)
        )
    if fallbacks := sum(event.get("sampler_fallbacks", 0) for event in run.events):
        draws = sum(event.get("sampler_draws", 0) for event in run.events)
        lines.append(f"  the sampler retrieved nothing, and drew uniformly, in {fallbacks:,} of {draws:,} batches")
    if view["cost"]:
        lines.append("  " + cost_line({**view["cost"], "wasted_usd": run.wasted_usd}))
    for item, reason in run.machines:
        machine = f"{item.instance}  {item.role:6}  {item.market} {item.type} in {item.zone}"
        lines.append(f"  {machine}  {item.seconds:.0f} s  ${item.usd:.4f}  {reason}")
    return lines


def cost_line(totals: Mapping[str, Any]) -> str:
    """Return the bill as one line."""
    return (
        f"cost ${totals['spent_usd']:.4f}; on demand it would have been ${totals['on_demand_usd']:.4f} "
        f"({totals['saving']:.0%} saved); preemption wasted ${totals['wasted_usd']:.4f}"
    )


def comparison(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """Return the rows of a comparison: a figure or a setting that differs, and its value in each run."""
    views = [run.view for run in runs]
    rows = [
        ("status", [view["status"] for view in views]),
        ("rounds", [f"{view['rounds']} of {view['total_rounds']}" for view in views]),
        ("accuracy", [charts.fixed(view["accuracy"]) for view in views]),
        ("loss", [charts.fixed(view["loss"]) for view in views]),
        ("loss of a constant prediction", [charts.fixed(run.summary.constant_loss) for run in runs]),
        *_metric_rows(views),
        ("expected calibration error", [charts.fixed(view["calibration_error"]) for view in views]),
        ("best temperature", [charts.fixed(view["temperature"]) for view in views]),
        ("time", [charts.duration(view["seconds"]) for view in views]),
        ("local steps", [charts.number(view["local_steps"]) for view in views]),
        ("goodput", [charts.percent(view["goodput"]) for view in views]),
        ("preemptions with notice", [charts.number(view["preemptions"]["notice"]) for view in views]),
        ("preemptions without notice", [charts.number(view["preemptions"]["kill"]) for view in views]),
        ("lost steps", [charts.number(view["lost_steps"]) for view in views]),
        ("steps of preempted workers kept", [charts.number(view["salvaged_steps"]) for view in views]),
        ("bytes pulled", [charts.size(view["bytes_down"]) for view in views]),
        ("bytes pushed", [charts.size(view["bytes_up"]) for view in views]),
    ]
    if any(view["cost"] for view in views):
        rows.append(("cost", [charts.usd((view["cost"] or {}).get("spent_usd")) for view in views]))
        rows.append(("wasted by preemption", [charts.usd(run.wasted_usd) for run in runs]))
    return [row for row in rows if set(row[1]) != {charts.NOTHING}] + _differences(runs)


def loss_plot(runs: Sequence[PastRun]) -> list[str]:
    """Return the test losses over rounds as a row of bars for each run, all at one scale; empty without any."""
    curves = [[(row[0], row[3]) for row in run.view["curve"] if row[3] is not None] for run in runs]
    points = [point for curve in curves for point in curve]
    if not points:
        return []
    last, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    ends = [last * (column + 1) / BAR_WIDTH for column in range(BAR_WIDTH)]

    def bar(curve: Sequence[tuple[float, float]], end: float) -> str:
        y = next((y for x, y in reversed(curve) if x <= end), None)
        return " " if y is None or end > curve[-1][0] * (1 + 1 / BAR_WIDTH) else bar_of(y, low, high)

    rows = [f"{''.join(bar(curve, end) for end in ends)}  {run.name}" for run, curve in zip(runs, curves, strict=True)]
    return [f"loss over rounds, up to {last}; the lowest bar is {low:.4g}, the highest {high:.4g}", *rows]


def _metric_rows(views: Sequence[View]) -> list[tuple[str, list[str]]]:
    """Return a row for each metric that a run has."""
    better = {name: curve["better"] for view in views for name, curve in view["metric_curves"].items()}
    return [
        (
            f"{name} ({said} is better)" if said else name,
            [charts.fixed(view["metrics"].get(name)) for view in views],
        )
        for name, said in better.items()
    ]


def _differences(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """Return rows for the settings that differ between the jobs."""
    jobs = [_all_settings(run.summary.settings.get("job", {})) for run in runs]
    keys = dict.fromkeys(key for job in jobs for key in job)
    return [
        (key, [str(job.get(key, charts.NOTHING)) for job in jobs])
        for key in keys
        if key not in WHICH_RUN and len({str(job.get(key)) for job in jobs}) > 1
    ]


def _all_settings(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded job's settings by their paths, with the defaults of what its file left out."""
    try:
        return _flat(Job.model_validate(job).model_dump(mode="json"))
    except ValidationError:  # of another version
        return _flat(job)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def _charts(runs: Sequence[PastRun]) -> list[charts.Chart]:
    """Return charts with the curves of all runs."""
    by_name = [{name: rows for name, _, rows in charts.curves_of(run.view)} for run in runs]
    better = {name: said for run in runs for name, said, _ in charts.curves_of(run.view)}
    result = []
    for name, said in better.items():
        for over, x in (("rounds", 0), ("time", 1)):
            points = [[(row[x], row[2]) for row in rows.get(name, ()) if row[2] is not None] for rows in by_name]
            lines = [charts.Series(run.name, points[n], n % RUN_COLOURS) for n, run in enumerate(runs)]
            result.append(charts.chart(name, over, lines, better=said))
    return result
