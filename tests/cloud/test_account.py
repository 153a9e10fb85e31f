"""A second cloud: an account in memory is kept as AWS' is, and nothing of AWS is imported for it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, itertools, sys, time

from idletrain.cloud import follow, head_node, launcher, machine_log, quote, teardown, worker_node  # noqa: F401
from idletrain.cloud.controller import FleetController
from idletrain.cloud.machines import Instance, LaunchedMachine, LaunchOutcome, LaunchSite, Pool, run_tags
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.cloud.record import RunRecord

POOL = Pool("spot", "small", "here")


class Memory:
    region = "nowhere"

    def __init__(self):
        self.there, self.ids, self.answers = {}, itertools.count(), [LaunchOutcome(why="the line is busy", repeat=True)]

    def instances(self, run, states):
        return [i for i in self.there.values() if i.run == run and i.state in states]

    def start_nodes(self, site, request):
        if self.answers:
            return self.answers.pop()
        made = [f"m-{next(self.ids)}" for _ in range(request.count)]
        for name in made:
            tags = {**request.tags, "idletrain:role": "worker"}
            self.there[name] = Instance(name, "running", POOL, time.time(), "", tags, "")
        return LaunchOutcome(tuple(LaunchedMachine(name, POOL) for name in made))

    def terminate(self, ids):
        for name in ids:
            del self.there[name]


async def main():
    now = time.time()
    tags = run_tags("night", "s3://b/night/", "me", "1", now, now + 60)
    run = RunRecord(
        run="night", job={"nodes": {"budget_usd": None, "max_price": None}}, tags=tags, created=now, deadline=now + 60,
        site=LaunchSite("nowhere", "", {}, ""), wanted=DesiredFleet(2, "spot", (POOL,)), heads=(POOL,),
        prices={POOL: 0.1}, on_demand={}, need_bytes=1, most_slots=1,
    )
    cloud, told = Memory(), []
    controller = FleetController(cloud, run, "tls://127.0.0.1:1")
    controller.attach(lambda **event: told.append(event))
    while len(cloud.there) < 2:
        await asyncio.sleep(min(await controller.check(), 1.0))
    controller({"kind": "worker_joined", "worker": "w", "name": "m-0-1-0"})
    controller({"kind": "worker_left", "worker": "w"})
    while "m-0" in cloud.there or len(cloud.there) < 2:
        await asyncio.sleep(min(await controller.check(), 1.0))
    print(sorted(cloud.there), [event["reason"] for event in told if event["kind"] == "waiting"])
    print([name for name in ("boto3", "botocore", "idletrain.cloud.aws") if name in sys.modules])


asyncio.run(main())
"""


def test_another_cloud_s_account_is_kept_by_the_same_code_without_anything_of_aws() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['m-1', 'm-2'] ['the line is busy; the cloud is asked again']", "[]"]
