"""Readers of what a cloud answers and stores."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import boto3
from botocore.awsrequest import AWSResponse
from reader import NOW, Reader, fields_in, file_of
from rehearsal import RECORD

from idletrain.cloud import leader_lease, record, teardown, workdir
from idletrain.cloud.account import NoMetadataError
from idletrain.cloud.aws import metadata, pricing, run_resources, spot_advisor
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.errors import explained
from idletrain.cloud.aws.schedules import resources
from idletrain.cloud.machines import TAG, Instance, NodeRequest
from idletrain.job import Job
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

REGION = "eu-west-1"
STATUSES = (200, 400, 404)


class Body(io.BytesIO):
    """What came over the line."""

    def stream(self) -> Iterator[bytes]:
        yield self.read()


class Told(Account):
    """An account whose every call gets the same answer, once."""

    def __init__(self) -> None:
        self._session = boto3.Session("id", "secret", region_name=REGION)
        self.region = REGION
        self.status, self.body = 200, b""

    def client(self, service: str, region: str | None = None, attempts: int = 1) -> Any:
        client = super().client(service, region, min(attempts, 1))
        client.meta.events.register("before-send", self._answer)
        return client

    def _answer(self, **_: Any) -> AWSResponse:
        return AWSResponse("https://aws/", self.status, {"ETag": "1"}, Body(self.body))


@functools.cache
def account() -> Told:
    return Told()


def fresh_cache() -> pricing.PriceCache:
    return pricing.PriceCache(Path("nothing"), lambda: NOW)


CALLS: tuple[Callable[[Told], object], ...] = (
    lambda a: a.instances("night"),
    lambda a: a.remnants("night"),
    lambda a: a.site("ami-1", gpu=False),
    lambda a: a.spot_prices(["m5.large"]),
    lambda a: a.regions(),
    lambda a: a.identity("night", "head"),
    lambda a: a.dashboard_token("night"),
    lambda a: a.start_nodes(RECORD.site, NodeRequest(pools=RECORD.heads, count=1, attempt="first", tags={})),
    lambda a: pricing.types(a.ec2, fresh_cache()),
    lambda a: pricing.offerings(a.ec2, fresh_cache()),
    lambda a: pricing.on_demand_prices(a.client("pricing"), REGION, fresh_cache()),
    lambda a: s3_mirror.events(S3Prefix.at("s3://b/p", a.s3)),
    lambda a: a.console("i-1"),
)


def answer(content: bytes) -> object:
    """A body in answer to a call; the first byte chooses which, the second the status."""
    told = account()
    told.status, told.body = STATUSES[content[1] % 3] if content[1:] else 200, content[2:]
    for file in Path("nothing").glob("*"):
        file.unlink()
    with told.explained():
        return CALLS[content[0] % len(CALLS) if content else 0](told)


class Bucket:
    """S3 with a few objects."""

    class exceptions:
        class NoSuchKey(Exception):
            """No such object."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self._objects = {f"runs/{key}": content for key, content in objects.items()}

    def get_object(self, Key: str, **_: Any) -> dict[str, Any]:
        if Key not in self._objects:
            raise self.exceptions.NoSuchKey
        return {"Body": io.BytesIO(self._objects[Key]), "ETag": "1"}

    def get_paginator(self, _: str) -> Any:
        return SimpleNamespace(paginate=self._pages)

    def _pages(self, Prefix: str, **_: Any) -> list[dict[str, Any]]:
        return [{"Contents": [{"Key": key} for key in sorted(self._objects) if key.startswith(Prefix)]}]

    def download_file(self, _: str, key: str, path: str) -> None:
        Path(path).write_bytes(self._objects[key])


def stored(content: bytes) -> object:
    """Objects that a run or a schedule keeps in S3; the first byte chooses which."""
    kind, content = content[0] % 6 if content else 0, content[1:]
    if kind == 0:
        return leader_lease.renewed(runs_with({leader_lease.LEADER_LEASE_KEY: content}))
    if kind == 1:
        return record.read(runs_with({record.RUN_RECORD_KEY: content}))
    if kind == 2:
        return restored(content)
    if kind == 3:
        return workdir.unpack(runs_with({workdir.WORKDIR_KEY: content}), Path("code"))
    if kind == 4:
        objects = {
            "schedules/night/executions/1": content,
            "r/record.json": RECORD.as_json(),
            "r/summary.json": content,
        }
        job = Job.model_validate({**JOB, "checkpoint": {"to": "s3://b/runs"}})
        account = SimpleNamespace(s3=Bucket(objects), bucket="b", region=RECORD.site.region, instances=lambda *_: [])
        return resources.history(account, "night", job, 9)
    file_of(content, "prices/offerings.aws.json")
    client = SimpleNamespace(meta=SimpleNamespace(endpoint_url="https://aws"))
    return pricing.PriceCache(Path("prices"), lambda: NOW).get(client, "offerings", pricing.OFFERINGS, 600, dict)


def runs_with(objects: Mapping[str, bytes]) -> S3Prefix:
    return S3Prefix.at("s3://b/runs", Bucket(objects))


def restored(content: bytes) -> object:
    """The copy of a run directory: its keys and their content as JSON."""
    prefix = runs_with({key: str(value).encode(errors="replace") for key, value in fields_in(content).items()})
    before = set(Path().iterdir())
    s3_mirror.restore(prefix, Path("copy"))
    assert set(Path().iterdir()) <= {*before, Path("copy")}
    return s3_mirror.Mirror(Path("copy"), prefix)


def tags(content: bytes) -> object:
    """Tags of somebody's machine, that are taken for ours by their names."""
    told = {TAG + "run": "night", **{key: str(value) for key, value in fields_in(content).items()}}
    machine = Instance("i-1", "running", RECORD.heads[0], NOW, "10.0.0.1", told, "")
    over = teardown.over(SimpleNamespace(s3=Bucket({}), explained=explained), [machine], NOW)
    return teardown.orphans([machine], [], NOW, 60.0, over)


def told_by_machine(content: bytes) -> object:
    """What the instance metadata service says to any question."""
    opener = SimpleNamespace(open=lambda *_, **__: io.BytesIO(content))
    with mock.patch.object(metadata, "_DIRECT", opener):
        service = metadata.Metadata("http://169.254.169.254")
        return service.announced(), service.tags(), service.instance_id()


def code() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.py"), io.BytesIO(b""))
    return file.getvalue()[:1536]


def ec2(action: str, inner: str) -> bytes:
    return f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">{inner}</{action}Response>'.encode()


JOB = {"name": "t", "model": {"factory": "a.b:c"}, "data": {"name": "digits"}}
MACHINE = (
    "<instanceId>i-1</instanceId><instanceState><name>running</name></instanceState><instanceType>m5.large"
    "</instanceType><placement><availabilityZone>eu-west-1a</availabilityZone></placement><launchTime>"
    "2026-11-25T00:00:00.000Z</launchTime><tagSet><item><key>k</key><value>v</value></item></tagSet>"
)
PRODUCT = {
    "product": {"attributes": {"instanceType": "m5.large"}},
    "terms": {"OnDemand": {"1": {"priceDimensions": {"1": {"pricePerUnit": {"USD": "0.1"}, "unit": "Hrs"}}}}},
}
PRICE = "<instanceType>m5.large</instanceType><availabilityZone>eu-west-1a</availabilityZone><spotPrice>0.1</spotPrice>"
AT = "<timestamp>2026-11-25T00:00:00.000Z</timestamp>"
TYPE = (
    "<instanceType>m5.large</instanceType><vCpuInfo><defaultVCpus>2</defaultVCpus></vCpuInfo><memoryInfo><sizeInMiB>"
    "8192</sizeInMiB></memoryInfo><processorInfo><supportedArchitectures><item>x86_64</item></supportedArchitectures>"
    "</processorInfo>"
)
OFFER = "<item><instanceType>m5.large</instanceType><location>eu-west-1a</location></item>"
IDENTITY = json.dumps({"ca": "x", "cert": "y", "key": "z"})
FLEET = (
    "<fleetId>f</fleetId><fleetInstanceSet><item><launchTemplateAndOverrides><overrides><instanceType>m5.large"
    "</instanceType><subnetId>subnet-a</subnetId></overrides></launchTemplateAndOverrides><instanceIds><item>i-1</item>"
    "</instanceIds></item></fleetInstanceSet>"
)
PARAMETER = {"Name": run_resources.parameter_name("night", "head"), "Value": IDENTITY}
OWN_TAGS = {TAG + "prefix": "s3://b/runs", TAG + "created": "2026-11-25T00:00:00+00:00", TAG + "deadline": "1"}

READERS = {
    "aws answers": Reader(
        answer,
        runs=45_000,
        sound=(
            b"\0\0"
            + ec2(
                "DescribeInstances",
                f"<reservationSet><item><instancesSet><item>{MACHINE}</item></instancesSet></item></reservationSet>",
            ),
            b"\3\0"
            + ec2("DescribeSpotPriceHistory", f"<spotPriceHistorySet><item>{PRICE}{AT}</item></spotPriceHistorySet>"),
            b"\4\0" + ec2("DescribeRegions", "<regionInfo><item><regionName>r</regionName></item></regionInfo>"),
            b"\5\0" + json.dumps({"Parameter": PARAMETER}).encode(),
            b"\6\0" + json.dumps({"Parameters": [PARAMETER]}).encode(),
            b"\7\0" + ec2("CreateFleet", FLEET),
            b"\x08\0" + ec2("DescribeInstanceTypes", f"<instanceTypeSet><item>{TYPE}</item></instanceTypeSet>"),
            b"\x09\0"
            + ec2("DescribeInstanceTypeOfferings", f"<instanceTypeOfferingSet>{OFFER}</instanceTypeOfferingSet>"),
            b"\x0a\0" + json.dumps({"PriceList": [json.dumps(PRODUCT)]}).encode(),
            b"\x0c\0" + ec2("GetConsoleOutput", "<output>eA==</output>"),
        ),
        modules=("cloud.aws.pricing", "cloud.aws.account"),
        odd=(
            b"\0\0<html><body>welcome</body></html>",
            b"\5\0{}",
            b"\x08\2" + ec2("DescribeInstanceTypes", "<instanceTypeSet/>"),
            b"\5\0" + b"9" * 30,
            b"\5\0\xff",
            b'\x0a\0{"PriceList": ["{}"]}',
            b"\3\0"
            + ec2(
                "DescribeSpotPriceHistory",
                f"<spotPriceHistorySet><item>{PRICE}<timestamp>x</timestamp></item></spotPriceHistorySet>",
            ),
            b"\x00\1<Response><Errors><Error><Code>UnauthorizedOperation</Code></Error></Errors></Response>",
            b"\x0b\0<ListBucketResult><Contents><Key>p/events.jsonl/x</Key></Contents></ListBucketResult>",
        ),
    ),
    "stored objects": Reader(
        stored,
        runs=150_000,
        sound=(
            b'\0{"holder": "i-1", "renewed": 1.0}',
            b"\1" + RECORD.as_json(),
            b'\2{"wal/000000000000000": "", "events.jsonl/000000000000000": "", "updates/00000000": "x"}',
            b"\3" + code(),
            b'\4{"due": "2026-11-25T00:00:00+00:00", "run": "r", "note": "", "status": "completed"}',
            b'\5{"at": 1.8e9, "answer": {"m5.large": ["eu-west-1a"]}}',
        ),
        modules=(
            "cloud.leader_lease",
            "cloud.record",
            "rounds.durable.s3_mirror",
            "cloud.workdir",
            "cloud.aws.schedules.resources",
        ),
        odd=(
            b'\2{"wal/0": "", "snapshots/../../out/x": "x"}',
            b'\2{"wal/x": ""}',
            b"\3x",
            b"\4[]",
            b'\5{"at": 1.8e9, "answer": 1}',
            b'\2{"wal/0": "", "updates/": "x"}',
            b"\0[]",
        ),
    ),
    "interruptions": Reader(
        functools.partial(spot_advisor.interruption_shares, region="r"),
        runs=1_000_000,
        sound=(
            b'{"ranges": [{"index": 0, "max": 5}], "spot_advisor": {"r": {"Linux": {"m5.large": {"s": 60, "r": 0}}}}}',
        ),
        modules=("cloud.aws.spot_advisor",),
        odd=(b"[]", b'{"ranges": [{"index": 1e400, "max": 5}]}', b'{"ranges": [], "spot_advisor": {"r": 1}}'),
        errors=(ValueError,),
    ),
    "tags": Reader(
        tags,
        runs=3_000_000,
        sound=(json.dumps(OWN_TAGS).encode(), json.dumps({**OWN_TAGS, TAG + "role": "head"}).encode()),
        modules=("cloud.teardown",),
        odd=(
            json.dumps({**OWN_TAGS, TAG + "created": "x"}).encode(),
            json.dumps({**OWN_TAGS, TAG + "deadline": ""}).encode(),
        ),
    ),
    "machine's metadata": Reader(
        told_by_machine,
        runs=2_000_000,
        sound=(b'{"action": "terminate"}',),
        modules=("cloud.aws.metadata",),
        odd=(b"\xff", b"[]"),
        errors=(NoMetadataError,),
    ),
}
