"""Time a fleet: launch to first round, notice to a node that is gone, loss to the first lease of the replacement.

Whole `launch --spot` runs in the rehearsal cloud: sandbox, head and four nodes share this machine's cores. In one, of
a small network, a node is taken without a word; in another, whose subnets are of 10 MB, a node gets a notice.

    python -m benchmarks.spot_latency [--tiny] [--json FILE]

Targets: 10 s, 2 s and 10 s (medians of the runs).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml

from benchmarks.report import at_most, report, with_preset
from benchmarks.runs import of_kind
from idletrain.cloud.sandbox import signatures
from idletrain.cloud.sandbox.signatures import Keys
from idletrain.observe.records import Record
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

NOTICE_SECONDS = 30.0
POLL_SECONDS = 0.5  # events tell their own times; looking at them costs the run something
LONGEST_RUN_SECONDS = 300.0
TARGETS_SECONDS = {
    "launch to first round": 10.0,
    "loss to its replacement's first lease": 10.0,
    "notice to gone, subnet of 10 MB": 2.0,
}


@dataclass(frozen=True)
class Preset:
    """Repetitions and sizes; a subnet has `width` / `nodes` neurons in each of two layers."""

    runs: int = 3
    nodes: int = 4
    width: int = 6144  # 1536 x 1536 + 74 x 1536 float32: 9.9 MB


TINY = Preset(runs=1, nodes=1, width=64)


def tree(nodes: int, width: int) -> dict[str, Any]:
    """Return a job on digits that trains for as long as it takes, by a method that no trial has to choose."""
    training = {"method": "ist", "subnets": nodes, "local_steps": 50, "rounds": 10000}
    return {
        "name": "spot-latency",
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, width, width, 10]}},
        "data": {"name": "digits"},
        "training": {**training, "optimizer": {"name": "sgd", "lr": 0.05}},
        "nodes": {"count": nodes},
    }


class SpotRun:
    """One launch, and its records so far."""

    def __init__(self, nodes: int, width: int, place: Path) -> None:
        (place / "job.yaml").write_text(yaml.safe_dump(tree(nodes, width)))
        command = [sys.executable, "-m", "idletrain", "launch", "job.yaml", "--spot", "--cloud", "sandbox", "--json"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}  # not ours
        environment |= {"PYTHONPATH": str(Path.cwd()), "HOME": str(place)}  # below which its address is written
        self.started = time.time()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=place)
        address_file = place / ".cache/idletrain/sandboxes" / str(self.process.pid) / "address.json"
        self._wait(lambda: address_file.exists() and address_file.read_text())
        address = json.loads(address_file.read_text())
        self._endpoint = address["endpoint"]
        self._keys, self._region = Keys(address["access_key_id"], address["secret_access_key"]), address["region"]
        keys = {"aws_access_key_id": self._keys.id, "aws_secret_access_key": self._keys.secret}
        client_settings = {"endpoint_url": self._endpoint, "region_name": self._region, **keys}
        number = boto3.client("sts", **client_settings).get_caller_identity()["Account"]
        bucket = f"idletrain-{number}-{self._region}"
        self._prefix = S3Prefix(boto3.client("s3", **client_settings), bucket, "runs/spot-latency/")
        self._events: list[Record] = []
        self._seen = ""

    def until(self, kind: str, count: int = 1) -> list[Record]:
        """Wait for events of a kind."""

        def arrived() -> bool:
            self._seen = s3_mirror.tail(self._prefix, "events.jsonl", self._acquire, self._seen)
            return len(of_kind(self._events, kind)) >= count

        self._wait(arrived)
        return of_kind(self._events, kind)

    def _acquire(self, text: bytes) -> None:
        self._events += map(json.loads, text.splitlines())

    def ask(self, action: str, **body: Any) -> None:
        """Call a control endpoint of the sandbox."""
        url, content = f"{self._endpoint}/_sandbox/{action}", json.dumps(body).encode()
        headers = signatures.sign(self._keys, "POST", url, content, self._region)
        request = urllib.request.Request(url, content, headers)
        urllib.request.urlopen(request, timeout=30).close()

    def end(self) -> None:
        """Stop it in order, which takes the sandbox down."""
        self.process.terminate()  # as Ctrl-C does, which a shell in the background may have it ignore
        self.process.wait(LONGEST_RUN_SECONDS)

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + LONGEST_RUN_SECONDS
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("the run did not go on")
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def spot_run(nodes: int, width: int) -> Iterator[SpotRun]:
    """Launch a run, yield it once its workers have joined, and end it after the context."""
    with tempfile.TemporaryDirectory() as place:
        run = SpotRun(nodes, width, Path(place))
        try:
            run.until("worker_joined", nodes)
            run.until("round_committed")
            yield run
        finally:
            run.end()


def a_node_of(run: SpotRun) -> str:
    """Return the instance of the first worker."""
    name: str = run.until("worker_joined")[0]["name"]
    return name.rsplit("-", 2)[0]


def seconds_of(preset: Preset) -> tuple[float, float, float]:
    """Return the three times, in the targets' order."""
    with spot_run(preset.nodes, 64) as run:
        first = run.until("round_committed")[0]["t"] - run.started
        run.ask("take", instance=a_node_of(run))
        lost = run.until("worker_left")[0]["t"]
        replacement = run.until("worker_joined", preset.nodes + 1)[-1]["worker"]
        while not (leases := [e["t"] for e in run.until("leased") if e["worker"] == replacement]):
            time.sleep(POLL_SECONDS)
    with spot_run(preset.nodes, preset.width) as run:
        noticed = time.time()
        run.ask("notice", instance=a_node_of(run), seconds=NOTICE_SECONDS)
        left_at = run.until("worker_left")[0]["t"]
    return first, leases[0] - lost, left_at - noticed


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Rehearse and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    runs = [seconds_of(preset) for _ in range(preset.runs)]
    figures = [
        at_most(what, statistics.median(samples), "s", target, list(samples))
        for (what, target), samples in zip(TARGETS_SECONDS.items(), zip(*runs, strict=True), strict=True)
    ]
    return report("spot_latency", options, figures)


if __name__ == "__main__":
    main()
