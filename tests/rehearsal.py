"""A rehearsal cloud as a process of its own, for tests, and clients of it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import waiting
from botocore.config import Config

from idletrain.cloud.aws import requests, run_resources
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.machines import LaunchSite, Pool, run_tags
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.cloud.record import RunRecord
from idletrain.cloud.sandbox import signatures
from idletrain.cloud.sandbox.signatures import Keys

DEADLINE_SECONDS = 20.0
SPOT, DEAR = Pool("spot", "m5.large", "eu-west-1a"), Pool("on-demand", "t3.medium", "eu-west-1a")
RECORD = RunRecord(
    run="night",
    job={"name": "night", "nodes": {"budget_usd": None}},
    tags={"idletrain:run": "night"},
    created=1.0,
    deadline=2.0,
    site=LaunchSite("eu-west-1", "vpc-1", {"eu-west-1a": "subnet-a"}, "ami-1"),
    wanted=DesiredFleet(2, "auto", (SPOT, DEAR)),
    heads=(DEAR,),
    prices={SPOT: 0.1, DEAR: 0.2},
    on_demand={"m5.large": 0.3},
    need_bytes=1 << 30,
    most_slots=1,
)
SPOT_POOLS = tuple(
    Pool("spot", name, zone) for name in ("m5.large", "c5.large") for zone in ("eu-west-1a", "eu-west-1b")
)
DEAR_POOLS = tuple(replace(pool, market="on-demand") for pool in SPOT_POOLS)


def sleeping(account: Account, **wanted: Any) -> RunRecord:
    """A run of its own, whose machines sleep."""
    now = time.time()
    run = f"night-{time.monotonic_ns()}"
    site = account.site(None, gpu=False)
    tags = run_tags(run, "s3://none/", "arn:me", "0", now, now + 3600)
    site = replace(site, group=run_resources.make_group(account, run, site.vpc, tags, Patience()))
    boot = "#!/bin/bash\nsleep 600\n"
    template = run_resources.make_template(
        account, requests.launch_template(run, site, "idletrain-node", boot, tags), Patience()
    )
    return RunRecord(
        run=run,
        job={"nodes": {"budget_usd": None, "max_price": None}},
        tags=tags,
        created=now,
        deadline=now + 3600,
        site=replace(site, template=template),
        wanted=DesiredFleet(**{"count": 2, "policy": "spot", "pools": (*SPOT_POOLS, *DEAR_POOLS), **wanted}),
        heads=(DEAR_POOLS[0],),
        prices=dict.fromkeys((*SPOT_POOLS, *DEAR_POOLS), 0.1),
        on_demand={"m5.large": 0.2, "c5.large": 0.2},
        need_bytes=1 << 30,
        most_slots=1,
    )


class Sandbox:
    """A sandbox process and clients of it."""

    def __init__(self, logs: Path, *arguments: str) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "idletrain.cloud.sandbox", "--logs", str(logs), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin
        assert self.process.stdout
        self.logs = logs
        address = json.loads(self.process.stdout.readline())
        self.started_seconds = time.perf_counter() - began
        self.endpoint, self.region = address["endpoint"], address["region"]
        self.keys = Keys(address["access_key_id"], address["secret_access_key"])
        self._clients: dict[str, Any] = {}

    def client(self, service: str, region: str = "eu-west-1") -> Any:
        """A boto3 client that tries once."""
        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.endpoint,
            aws_access_key_id=self.keys.id,
            aws_secret_access_key=self.keys.secret,
            config=Config(retries={"total_max_attempts": 1}),
        )

    @property
    def environment(self) -> dict[str, str]:
        """What makes it a process' cloud."""
        keys = {"AWS_ACCESS_KEY_ID": self.keys.id, "AWS_SECRET_ACCESS_KEY": self.keys.secret}
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_DEFAULT_REGION": self.region, **keys}

    @property
    def ec2(self) -> Any:
        if "ec2" not in self._clients:
            self._clients["ec2"] = self.client("ec2")
        return self._clients["ec2"]

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """Call a control endpoint."""
        url, content = f"{self.endpoint}/_sandbox/{path}", json.dumps(body).encode()
        headers = signatures.sign(self.keys, method, url, content, self.region)
        request = urllib.request.Request(url, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def refusal(self, method: str, path: str, **body: Any) -> tuple[int, str]:
        """What a control endpoint says that refuses: status and words."""
        try:
            self.ask(method, path, **body)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())["error"]
        raise AssertionError("it did not refuse")

    def inventory(self) -> dict[str, list[Any]]:
        listed: dict[str, list[Any]] = self.ask("GET", "inventory")
        return listed

    def image(self) -> str:
        name = "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id"
        if name not in self._clients:
            self._clients[name] = self.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
        image: str = self._clients[name]
        return image

    def template(self, program: str = "", **data: Any) -> str:
        """Make a launch template; returns its id."""
        encoded = {"UserData": base64.b64encode(program.encode()).decode()} if program else {}
        body = {"ImageId": self.image(), "InstanceInitiatedShutdownBehavior": "terminate", **encoded, **data}
        name = f"template-{time.monotonic_ns()}"
        response = self.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=body)
        id_: str = response["LaunchTemplate"]["LaunchTemplateId"]
        return id_

    def fleet(self, template: str, count: int, *overrides: dict[str, str], market: str = "spot", **more: Any) -> Any:
        """Call CreateFleet."""
        config = {
            "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "$Default"},
            "Overrides": list(overrides) or [{"InstanceType": "m5.large", "AvailabilityZone": "eu-west-1a"}],
        }
        body = {
            "Type": "instant",
            "LaunchTemplateConfigs": [config],
            "TargetCapacitySpecification": {"TotalTargetCapacity": count, "DefaultTargetCapacityType": market},
            "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        }
        return self.ec2.create_fleet(**{**body, **more})

    def start(self, program: str, count: int = 1, market: str = "spot", **data: Any) -> list[str]:
        """Start instances that run a program; returns their ids."""
        return ids_of(self.fleet(self.template(f"#!/bin/bash\n{program}\n", **data), count, market=market))

    def state(self, instance: str) -> dict[str, Any]:
        """An instance as EC2 describes it."""
        listed = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]
        return dict(listed)

    def log(self, instance: str) -> str:
        log = self.logs / f"{instance}.log"
        return log.read_text() if log.exists() else ""

    def pids(self, instance: str) -> list[int]:
        """The processes of an instance's machine."""
        return [pid for p in self.inventory()["processes"] if p["instance"] == instance for pid in p["pids"]]

    def clean(self) -> None:
        """Take everything away and lift what was set."""
        for limit in self.ask("POST", "capacity", market="-", count=0):
            self.ask("POST", "capacity", market=limit["market"], type=limit["type"], zone=limit["zone"], count=None)
        left = self.inventory()
        if left["instances"]:
            self.ec2.terminate_instances(InstanceIds=left["instances"])
        for template in left["launch_templates"]:
            self.ec2.delete_launch_template(LaunchTemplateId=template)
        for group in left["security_groups"]:
            self.ec2.delete_security_group(GroupId=group)
        if left["parameters"]:
            self.client("ssm").delete_parameters(Names=left["parameters"])
        eventually(lambda: not any(self.inventory().values()), instead=self.inventory)
        self.ask("POST", "calls/reset")

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(DEADLINE_SECONDS)
        self.process.stdout.close()


def ids_of(answer: Any) -> list[str]:
    """The instances that a CreateFleet launched."""
    return [id_ for item in answer["Instances"] for id_ in item["InstanceIds"]]


def eventually(
    check: Callable[[], Any], seconds: float = DEADLINE_SECONDS, *, instead: Callable[[], Any] | None = None
) -> Any:
    """Wait until something is so and return it; if it does not come in time, fail with what is there instead."""
    began = looked_at = time.monotonic()
    while not (listed := check()):
        assert time.monotonic() < began + seconds, ("it did not come about in time", instead and instead())
        waiting.rest(looked_at)
        looked_at = time.monotonic()
    return listed
