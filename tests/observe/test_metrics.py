"""A run as Prometheus sees it."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_status import launched, stamped
from test_summary import CHURN, event, summary_of

from idletrain.observe.metrics import RunCollector
from idletrain.observe.status import view_of

BASE_UNITS = ("_total", "_ratio", "_seconds", "_bytes", "_usd", "_usd_per_hour", "_bytes_per_second")
COUNTED = {"idletrain_workers", "idletrain_planned_rounds", "idletrain_loss"}  # of things, or of nothing


def view() -> dict[str, Any]:
    started = {**CHURN[0], "job": {"nodes": {"budget_usd": 5.0}}}
    refused = event("refused", 7.0, round=0, subnet=1, attempt=9, reply="corrupt")
    return view_of(summary_of(stamped([started, launched("i-1", 1.0), refused, *CHURN[1:-2]])), 4600.0)


def exposed(shown: dict[str, Any]) -> str:
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: shown))
    return generate_latest(registry).decode()


def samples(shown: dict[str, Any]) -> dict[tuple[str, str], float]:
    values = {}
    for family in text_string_to_metric_families(exposed(shown)):
        for sample in family.samples:
            assert sample.labels["run"] == "demo"
            (label,) = [value for name, value in sample.labels.items() if name != "run"] or [""]
            values[sample.name.removeprefix("idletrain_"), label] = sample.value
    return values


def test_every_figure_of_the_view_is_a_metric() -> None:
    shown = view()
    values = samples(shown)
    assert values["goodput_ratio", ""] == pytest.approx(shown["goodput"])
    assert values["rounds_total", ""] == 1
    assert values["local_steps_total", ""] == 100
    assert {key[1]: value for key, value in values.items() if key[0] == "lost_steps_total"} == {"notice": 0, "kill": 5}
    assert {key[1]: value for key, value in values.items() if key[0] == "preemptions_total"} == {"notice": 1, "kill": 1}
    assert {key[1]: value for key, value in values.items() if key[0] == "put_total"} == {"accepted": 2, "corrupt": 1}
    assert values["exchange_bytes_total", "down"] == 1000
    assert values["exchange_bytes_total", "up"] == 500
    states = {key[1]: value for key, value in values.items() if key[0] == "workers"}
    assert states == {"training": 1, "draining": 0, "joining": 1}
    assert values["cost_usd", ""] == pytest.approx(1.0, abs=0.01)
    assert values["budget_left_usd", ""] == pytest.approx(4.0, abs=0.01)
    assert values["last_event_timestamp_seconds", ""] == 1008.5
    assert (values["accuracy_ratio", ""], values["loss", ""]) == (0.8, 0.5)


def test_names_and_units_follow_prometheus_conventions() -> None:
    for family in text_string_to_metric_families(exposed(view())):
        assert re.fullmatch(r"idletrain_[a-z]+(_[a-z]+)*", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert family.type in ("counter", "gauge"), family.name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert sample.name.endswith(BASE_UNITS) or sample.name in COUNTED, sample.name


def test_what_is_not_known_yet_is_left_out() -> None:
    values = samples(view_of(summary_of(stamped(CHURN[:1])), 1000.0))
    assert not {
        key for key in values if key[0] in ("goodput_ratio", "accuracy_ratio", "cost_usd", "link_bytes_per_second")
    }
    assert values["rounds_total", ""] == 0


def test_before_a_run_there_is_nothing() -> None:
    assert exposed({}) == ""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
def test_promtool_finds_no_fault() -> None:
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=exposed(view()), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
