"""The Grafana dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from idletrain.observe.metrics import COUNTERS, GAUGES

BOARD = json.loads((Path(__file__).parents[2] / "infra/grafana/idletrain.json").read_text())
METRICS = {f"idletrain_{name}_total": label for name, _, label, _ in COUNTERS}
METRICS |= {f"idletrain_{name}": label for name, _, label, _ in GAUGES}


def test_every_panel_asks_for_metrics_and_labels_that_there_are() -> None:
    queried = set()
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"idletrain_[a-z_]+", target["expr"])
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= {"run", METRICS[name]}, panel["title"]
            assert (METRICS[name] in labels) == bool(METRICS[name]), panel["title"]
            queried.add(name)
    assert queried == METRICS.keys()


def test_panels_do_not_overlap() -> None:
    used = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(used) == len(set(used))
    assert max(x for x, _ in used) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
