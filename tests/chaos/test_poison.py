"""A module that ends its process on every machine of a rehearsed cloud: the run stops, and says what it died of."""

from __future__ import annotations

import re
from pathlib import Path

from rehearsal import Sandbox

from idletrain.cloud.aws.account import Account

from .helpers import PATIENCE_SECONDS, until
from .spot_run import Launcher, job_tree

DEADLY = '''
import os

import torch
from distributed import get_worker
from torch import nn


class Deadly(nn.Module):
    """An MLP that ends its worker's process at the third training step."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.steps = 0

    def forward(self, x):
        if self.training and x.device.type != "meta" and in_worker():
            self.steps += 1
            if self.steps > 2:
                print("about to die of step 3", flush=True)
                os._exit(9)
        return self.last(torch.relu(self.first(x.flatten(1))))


def in_worker():
    try:
        return bool(get_worker())
    except ValueError:
        return False
'''


def test_a_module_that_ends_every_machine_s_worker_stops_the_run_after_three_deaths_on_two_machines(
    cloud: Sandbox, account: Account, tmp_path: Path
) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    tree = job_tree("poison")
    tree["model"] = {"factory": "deadly:Deadly", "args": {}}
    tree["workdir"] = str(tmp_path)
    tree["nodes"]["count"] = 2
    tree["training"] |= {"subnets": 2}
    run = Launcher(cloud, account, tree, tmp_path)
    try:
        code = run.process.wait(2 * PATIENCE_SECONDS)
        until("the head's end", lambda: not cloud.inventory()["processes"])
        events, output = run.events(), run.output()
    finally:
        run.end()
    assert code == 1, output
    (end,) = [event for event in events if event["kind"] == "run_ended"]
    assert end["status"] == "failed"
    found = re.search(
        r"subnet (\d) of round 0 ended the process of every worker that trained it \((.*)\) before it stored a step",
        end["reason"],
    )
    assert found, end["reason"]
    dead = {e["worker"]: e["name"] for e in events if e["kind"] == "worker_left" and e["cause"] == "kill"}
    blamed = found[2].split(", ")
    assert set(blamed) <= set(dead.values())
    assert len({name.rsplit("-", 2)[0] for name in blamed}) >= 2, "one machine's word is not enough"
    lost = [e for e in events if e["kind"] == "lost" and e["subnet"] == int(found[1])]
    assert {e["worker"] for e in lost} <= dead.keys()
    assert len(blamed) >= 3
    assert len(dead) <= 8
    assert "about to die of step 3" in end["reason"]
    assert "about to die of step 3" in output
    assert not any(e["kind"] == "staged" for e in events)
