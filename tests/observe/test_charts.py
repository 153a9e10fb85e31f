"""The geometry of charts, and the formats of numbers."""

from __future__ import annotations

import pytest

from idletrain.observe import charts
from idletrain.observe.charts import Series
from idletrain.observe.run_totals import RoundEnd, WorkerView
from idletrain.observe.time_use import OUTSIDE_ROUNDS


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 5, 10]),
        (0.97, 0.999, [0.97, 0.98, 0.99, 1.0]),
        (0.5, 0.5, [0.4, 0.6]),
        (0, 0, [0, 0.5]),
        (-3, 4, [-4, -2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_hold_the_range(low: float, high: float, expected: list[float]) -> None:
    ticks = charts.ticks(low, high)
    assert ticks == pytest.approx(expected)
    assert ticks[0] <= low <= high <= ticks[-1] + 1e-9


@pytest.mark.parametrize(
    ("last", "texts"),
    [
        (100, ["0 s", "50 s", "100 s"]),
        (400, ["0 min", "2 min", "4 min", "6 min"]),
        (30_000, ["0 h", "5 h"]),
        (0.4, ["0 s", "0.1 s", "0.2 s", "0.3 s", "0.4 s"]),
    ],
)
def test_a_time_axis_has_one_unit(last: float, texts: list[str]) -> None:
    assert [text for _, text in charts.axis("time", last)] == texts


def test_a_chart_s_points_stand_where_their_values_are() -> None:
    chart = charts.chart("accuracy", "rounds", [Series("a", [(0, 0.0), (10, 1.0)])], [(5.0, "kill", "w")], target=0.5)
    (curve,) = chart.curves
    first, last = (tuple(float(part) for part in point.split(",")) for point in curve.path.split(" "))
    assert first == (chart.left, chart.bottom)
    assert last == (chart.right, chart.top) == (curve.x, curve.y)
    (mark,) = chart.marks
    assert (mark.at, mark.kind, mark.text) == ((chart.left + chart.right) / 2, "kill", "w: kill at 5")
    assert chart.target is not None
    assert chart.target.at == (chart.top + chart.bottom) / 2


def test_a_chart_without_points_is_empty() -> None:
    assert not charts.chart("accuracy", "time", [Series("a", [])], [(1.0, "kill", "w")]).curves


def test_a_cause_that_the_style_does_not_know_is_drawn_as_a_kill() -> None:
    chart = charts.chart("loss", "time", [Series("a", [(1, 1)])], [(1.0, '"><script>', "w")])
    assert chart.marks[0].kind == "kill"


def test_a_run_has_charts_of_its_metrics_beside_accuracy_and_loss() -> None:
    f1 = {"better": "higher", "points": [[1, 10.0, 0.25], [2, 20.0, None], [3, 30.0, 0.75]]}
    view = {"curve": [[1, 10.0, 0.5, 2.0]], "metric_curves": {"f1": f1}, "preempted": [], "target": 0.9}
    drawn = charts.run_charts(view)
    assert [(c.what, c.over, c.better) for c in drawn] == [
        (what, over, better)
        for what, better in (("accuracy", ""), ("loss", ""), ("f1", "higher"))
        for over in ("rounds", "time")
    ]
    assert [c.target is not None for c in drawn] == [True, True, False, False, False, False]
    (of_rounds,), (of_time,) = drawn[4].curves, drawn[5].curves
    assert (of_rounds.label, of_time.label) == ("f1: 0.75 at 3", "f1: 0.75 at 30 s")
    assert len(of_rounds.path.split()) == 2


def worker(joined: float, left: float | None, cause: str = "") -> WorkerView:
    return WorkerView("w", joined, left=left, cause=cause)


def test_a_worker_takes_the_first_lane_that_is_free_when_it_joins() -> None:
    workers = [worker(0, 5), worker(0, None), worker(4, 9), worker(5, 6), worker(9, None)]
    assert list(charts.lanes(workers, 10)) == [0, 1, 2, 0, 0]


def test_a_timeline_shows_when_workers_were_there_and_how_they_ended() -> None:
    rounds = [RoundEnd(n, n + 1.0, 1.0, 10) for n in range(10)]
    timeline = charts.worker_timeline([worker(0, 5, "kill"), worker(5, None), worker(6, 9, "end")], rounds, 10.0)
    span = timeline.width - 2 * charts.EDGE
    boxes = [((box.x - charts.EDGE) / span, box.width / span, box.kind) for box in timeline.workers]
    assert boxes == [(0, 0.5, "kill"), (0.5, 0.5, ""), (pytest.approx(0.6), pytest.approx(0.3), "")]
    assert [box.y for box in timeline.workers] == [1, 1, 19]
    assert len(timeline.bands) == 5  # every other round
    assert timeline.more == 0


def test_a_fleet_too_large_for_a_timeline_is_reported() -> None:
    timeline = charts.worker_timeline([worker(0, None)] * (charts.LANES + 7), [], 10.0)
    assert (len(timeline.workers), timeline.more) == (charts.LANES, 7)


def test_a_timeline_of_nobody_is_drawn() -> None:
    assert charts.worker_timeline([], [], 0.0).workers == []


def test_shares_stand_behind_each_other() -> None:
    first, second, _ = charts.stack({"compute": 0.25, "pull": 0.5, OUTSIDE_ROUNDS: 0.25})
    assert (first.x, first.width) == (0, charts.TIMELINE_WIDTH / 4)
    assert (second.x, second.text) == (charts.TIMELINE_WIDTH / 4, "50.0%")
    assert [box.kind for box in charts.stack({"pull": 1.0})] == [second.kind]  # of several runs' bars, the same colour


@pytest.mark.parametrize(
    ("formatted", "text"),
    [
        (charts.duration(None), "-"),
        (charts.duration(0.25), "0.2 s"),
        (charts.duration(5), "5 s"),
        (charts.duration(119.7), "120 s"),
        (charts.duration(600), "10 min"),
        (charts.duration(9000), "2.5 h"),
        (charts.size(None), "-"),
        (charts.size(0), "0 B"),
        (charts.size(1234), "1.23 kB"),
        (charts.size(243_456_789), "243 MB"),
        (charts.size(5e12), "5000 GB"),
        (charts.percent(0.4567), "45.7%"),
        (charts.percent(None), "-"),
        (charts.number(38400), "38,400"),
        (charts.number(12.34), "12.3"),
        (charts.number(None), "-"),
        (charts.fixed(0.5), "0.5000"),
        (charts.usd(1234.5), "$1,234.50"),
        (charts.usd(0.01234), "$0.0123"),
        (charts.usd(None), "-"),
        (charts.moment(0), "1970-01-01 00:00 UTC"),
    ],
)
def test_numbers_are_formatted_in_the_unit_that_fits(formatted: str, text: str) -> None:
    assert formatted == text


def test_what_a_peer_says_is_text_in_a_template() -> None:
    template = charts.templates().from_string("{{ name }}")
    assert template.render(name="<script>") == "&lt;script&gt;"


@pytest.mark.parametrize(("what", "better", "best"), [("accuracy", "", 3.0), ("loss", "", 1.0), ("f1", "lower", 1.0)])
def test_a_chart_marks_the_best_point_where_it_is_known_which_value_is_better(
    what: str, better: str, best: float
) -> None:
    (curve,) = charts.chart(
        what, "rounds", [Series("a", [(0, 2.0), (1, 3.0), (2, 1.0), (3, 2.0)])], better=better
    ).curves
    assert curve.best is not None
    assert curve.best.text == f"a: best {best:.4g} at {1 if best == 3.0 else 2}"


def test_a_chart_marks_nothing_as_best_where_that_is_unknown_or_there_is_one_point() -> None:
    (curve,) = charts.chart("f1", "rounds", [Series("a", [(0, 2.0), (1, 3.0)])]).curves
    (point,) = charts.chart("loss", "rounds", [Series("a", [(1, 3.0)])]).curves
    assert (curve.best, point.best) == (None, None)


def test_memory_is_told_in_gib() -> None:
    assert charts.memory(2**31) == "2 GiB"
