"""How runs went, as a file and in a few lines."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from test_status import evaluated, launched, stamped
from test_summary import CHURN, event, started

from idletrain.observe.report import PastRun, comparison, loss_plot, report_page, short

JOB = {"name": "demo", "training": {"rounds": 3, "optimizer": {"name": "sgd", "lr": 0.1}}}
STARTED = {
    **CHURN[0],
    "job": JOB,
    "command": "idletrain launch job.yaml --churn 15s",
    "versions": {"python": "3.12", "torch": "2.13"},
    "hardware": {"cpu": "a CPU", "cores": 2, "ram_bytes": 4e9, "system": "Linux"},
}


def past(events: list[dict[str, Any]], name: str = "demo", now: float = 1010.0) -> PastRun:
    return PastRun.of(name, stamped(events), now)


class Reader(HTMLParser):
    """A page's tags, what they refer to, figures by key, and text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.figures: dict[str, str] = {}
        self.text = ""
        self._key = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self._key = dict(attrs).get("data-key") or ""

    def handle_startendtag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._key = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._key and data.strip():
            self.figures.setdefault(self._key, data.strip())


def test_a_report_needs_nothing_but_itself() -> None:
    content = report_page([past([STARTED, *CHURN[1:]])])
    read = Reader(content)
    assert read.open == []
    assert read.links == []
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert "url(" not in content
    assert "@import" not in content
    assert "prefers-color-scheme: dark" in content


def test_a_report_s_figures_are_the_records() -> None:
    read = Reader(report_page([past([STARTED, *CHURN[1:]])]))
    assert read.figures["status"] == "completed"
    assert read.figures["rounds"] == "1"
    assert read.figures["accuracy"] == "0.8000"
    assert read.figures["loss"] == "0.5000"
    assert read.figures["goodput"] == "64.3%"
    assert read.figures["preemptions"] == "2"
    assert read.figures["lost_steps"] == "5"
    assert read.figures["local_steps"] == "100"
    assert read.figures["spent_usd"] == "-"


def test_a_report_says_how_to_do_it_again() -> None:
    text = Reader(report_page([past([STARTED, *CHURN[1:]])])).text
    for part in (
        STARTED["command"],
        "name: demo\ntraining:\n  rounds: 3",
        "torch 2.13",
        "a CPU, 2 cores, 3.73 GiB",
        "Workers: c.",
    ):
        assert part in text


def test_a_report_of_records_before_they_told_that_says_so() -> None:
    assert "Versions and job are not in these records." in Reader(report_page([past(CHURN)])).text


def test_machines_are_reported_with_their_cost_and_end() -> None:
    ended = event("instance_ended", 3600.0, instance="i-1", reason="Server.Spot")
    run = past([STARTED, launched("i-1", 1.0), *CHURN[1:-2], ended], now=9000.0)
    assert "  i-1  worker  spot m5.large in a  3600 s  $1.0083  Server.Spot" in short(run)
    text = Reader(report_page([run])).text
    assert "$1.01; on demand $3.61, 72.1% saved" in text
    assert "Server.Spot" in text


def test_runs_are_compared_figure_by_figure_with_the_settings_that_differ() -> None:
    other = {**STARTED, "job": {**JOB, "training": {"rounds": 3, "optimizer": {"name": "sgd", "lr": 0.5}}}}
    runs = [past([STARTED, *CHURN[1:]], "first"), past([other, *CHURN[1:8]], "second")]
    content = report_page(runs)
    rows = dict(re.findall(r"<tr><td>([^<]*)</td>((?:<td class=\"n\">[^<]*</td>)+)", content))
    cells = {name: re.findall(r">([^<]*)</td>", row) for name, row in rows.items()}
    assert cells["accuracy"] == ["0.8000", "-"]
    assert cells["loss of a constant prediction"] == ["2.3000", "-"]
    assert cells["preemptions without notice"] == ["1", "0"]
    assert cells["training.optimizer.lr"] == ["0.1", "0.5"]
    assert "training.rounds" not in cells
    assert Reader(content).open == []


def test_a_default_that_one_job_names_and_where_a_run_lies_are_no_differences() -> None:
    job = {**JOB, "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}
    named = {**job, "checkpoint": {"to": "/elsewhere"}, "training": {**JOB["training"], "seed": 0, "batch_size": 128}}
    runs = [past([{**STARTED, "job": each}, *CHURN[1:]], name) for name, each in (("a", job), ("b", named))]
    rows = dict(comparison(runs))
    assert not [name for name in rows if "." in name]


def test_metrics_have_a_tile_and_charts_with_their_better_direction_and_a_row_of_a_comparison() -> None:
    begun = {**STARTED, "better": {"f1": "higher"}}
    run = past([begun, evaluated(1.0, 1, f1=0.25), evaluated(2.0, 2, f1=0.75)], "first")
    alone, compared = report_page([run]), report_page([run, past([STARTED, *CHURN[1:]], "second")])
    assert Reader(alone).figures["metrics.f1"] == "0.7500"
    for content in (alone, compared):
        assert re.findall(r"<figcaption>f1 <span>([^<]*)", content) == [
            "over rounds; higher is better",
            "over time; higher is better",
        ]
    assert re.search(r"f1 \(higher is better\)</td><td class=\"n\">0.7500</td><td class=\"n\">-</td>", compared)


def test_the_short_form_is_the_summary_and_where_the_time_went() -> None:
    whole = [{**one, "seconds": 8.0} if one["kind"] == "round_committed" else one for one in CHURN]
    lines = short(past([STARTED, *whole[1:]]))
    assert lines[0] == "demo: completed"
    assert "  goodput 64.3% of the workers' time" in lines
    assert "  30 steps of preempted workers were kept, 5 lost" in lines
    (spent,) = (line for line in lines if line.startswith("  the workers' time: "))
    assert spent == "  the workers' time: 64% compute, 14% lost, 14% outside committed rounds, 7% control"


def test_the_short_form_tells_how_often_a_sampler_found_nothing() -> None:
    about = {"round": 0, "subnet": 0, "attempt": 2, "worker": "tcp://b", "ended": "done"}
    report = {"kind": "attempt_ended", "s": 6.0, **about}
    ended = [{**report, "sampler_draws": 1500, "sampler_fallbacks": n} for n in (3, 0)]
    line = "  the sampler retrieved nothing, and drew uniformly, in 3 of 3,000 batches"
    assert line in short(past([STARTED, *CHURN[1:], *ended]))
    assert not any("sampler" in line for line in short(past([STARTED, *CHURN[1:]])))


@pytest.mark.parametrize(("now", "status"), [(1012.0, "running"), (9000.0, "interrupted")])
def test_a_run_whose_head_is_silent_for_long_was_interrupted(now: float, status: str) -> None:
    run = past([STARTED, *CHURN[1:8]], now=now)
    assert short(run)[0] == f"demo: {status}"
    assert Reader(report_page([run])).figures["status"] == status


def test_a_run_that_has_hardly_begun_has_a_report() -> None:
    assert "no value yet" in Reader(report_page([past([started()])])).text
    assert Reader(report_page([past([event("waiting", 1.0, reason="for workers")], "early")])).open == []


def test_what_peers_say_is_text() -> None:
    named = [{**one, "name": "<b>w</b>"} if one["kind"] == "worker_joined" else one for one in CHURN]
    content = report_page([past([{**STARTED, "run": "<script>alert(1)</script>"}, *named[1:]])])
    assert "<script" not in content
    assert "<b>w</b>" not in content


def test_a_round_is_reported_as_it_was_expected_and_as_it_was() -> None:
    parts = {"pull": 0.25, "compute": 6.5, "push": 0.75, "commit": 0.5}
    times = {"measured": parts, "expected": {part: 2 * seconds for part, seconds in parts.items()}}
    events = [{**one, **times} if one["kind"] == "round_committed" else one for one in CHURN]
    content = report_page([past([{**STARTED, "why": ["ist: because"]}, *events[1:]])])
    assert '<tr><td>compute</td><td class="n">13.000</td><td class="n">6.500</td></tr>' in content
    assert "ist: because" in content
    bare = [{**one, "measured": parts} if one["kind"] == "round_committed" else one for one in CHURN]
    assert '<tr><td>push</td><td class="n">-</td><td class="n">0.750</td></tr>' in report_page(
        [past([STARTED, *bare[1:]])]
    )
    assert "Seconds of a round" not in report_page([past(CHURN)])


def test_a_report_has_a_row_for_each_worker() -> None:
    rows = re.findall(r"<tr><td>([abc])</td>(.*?)</tr>", report_page([past(CHURN)]))
    cells = {name: re.findall(r"<td[^>]*>(.*?)</td>", rest) for name, rest in rows}
    assert cells["b"] == ["cpu", "1 GiB", "0 s", "6 s", "1", "50", "5", "-", "-", "kill"]


def test_losses_of_runs_are_rows_of_bars_at_one_scale_over_the_same_rounds() -> None:
    def of(name: str, *points: tuple[int, float]) -> PastRun:
        scores = [{**evaluated(float(n), n), "loss": loss} for n, loss in points]
        return past([{**started(), "rounds": 60}, *scores], name)

    lines = loss_plot([of("a", (1, 1.0), (30, 0.5), (60, 0.0)), of("b", (1, 0.5), (30, 0.0)), of("none")])
    assert lines[0] == "loss over rounds, up to 60; the lowest bar is 0, the highest 1"
    assert lines[1] == "█" * 29 + "▅" * 30 + "▁  a"
    assert lines[2] == "▅" * 29 + "▁" + " " * 30 + "  b"
    assert lines[3] == " " * 60 + "  none"
    assert loss_plot([of("none")]) == []
