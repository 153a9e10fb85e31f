"""A run in the rehearsal cloud as a test launches it, and what it says of itself."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warm
import yaml
from rehearsal import Sandbox

from idletrain.cloud.aws.account import Account
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

from . import steered
from .helpers import until

IDLETRAIN = (sys.executable, "-m", "idletrain")


def job_tree(name: str, rounds: int = 16) -> dict[str, Any]:
    """Digits, in rounds of about a second, most of which workers sleep."""
    training = {
        "subnets": 3,
        "local_steps": 30,
        "loss": f"{steered.__name__}:paced",
        "rounds": rounds,
        "batch_size": 64,
        "optimizer": {"name": "sgd", "lr": 0.05},
    }
    return {
        "name": name,
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 128, 128, 10]}},
        "data": {"name": "digits"},
        "training": {"method": "ist", **training},
        "nodes": {"count": 3, "memory": "1GiB"},
        "preemption": {"progress_every": "200ms"},
    }


class Launcher:
    """`idletrain launch --spot --cloud sandbox` as a process, and its run seen through its prefix."""

    def __init__(self, cloud: Sandbox, account: Account, tree: dict[str, Any], place: Path, *options: str) -> None:
        self.cloud, self.account, self.name = cloud, account, tree["name"]
        (place / "job.yaml").write_text(yaml.safe_dump(tree))
        self.prefix = S3Prefix.at(f"s3://{account.bucket}/runs/{self.name}", account.s3)
        self._out = place / f"out-{time.monotonic_ns()}"
        command = [*IDLETRAIN, "launch", str(place / "job.yaml"), "--spot", "--cloud", "sandbox", "--json", *options]
        own = {"HOME": str(place), "XDG_STATE_HOME": str(place / "state")}  # other tests have runs of this name
        environment = {**os.environ, **cloud.environment, **own}
        self.process = warm.start(command, environment, self._out, place)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        s3_mirror.tail(self.prefix, "events.jsonl", lambda lines: records.extend(map(json.loads, lines.splitlines())))
        return [event for event in records if kind in ("", event["kind"])]

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        def check() -> Any:
            assert self.process.poll() is None, self.output()
            return condition()

        return until(what, check)

    def output(self) -> str:
        return self._out.read_text()

    def last(self) -> dict[str, Any]:
        lines = [line for line in self.output().splitlines() if line.startswith("{")]
        records: dict[str, Any] = json.loads(lines[-1])
        return records

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def workers(self) -> dict[str, str]:
        """Instances whose workers are there, and the workers' addresses."""
        there = {e["worker"]: e["name"].rsplit("-", 2)[0] for e in self.events("worker_joined")}
        for event in self.events("worker_left"):
            there.pop(event["worker"], None)
        return {instance: worker for worker, instance in there.items()}
