"""Readers of what a rehearsal of a cloud is asked, by its own processes or by a stranger."""

from __future__ import annotations

import datetime
import functools
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from botocore.awsrequest import AWSRequest
from moto.moto_api._internal import mock_random
from reader import NOW, Reader
from werkzeug.test import EnvironBuilder, run_wsgi_app

from idletrain.cloud.sandbox import account, metadata, shims, signatures
from idletrain.cloud.sandbox.control import Control
from idletrain.cloud.sandbox.faults import InjectedFaults
from idletrain.cloud.sandbox.gateway import Gateway
from idletrain.cloud.sandbox.guard import Guard
from idletrain.cloud.sandbox.instances import Instances
from idletrain.cloud.sandbox.signatures import Keys
from idletrain.errors import RefusedError

AT = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
HOST = "127.0.0.1:9"
KEYS = Keys("AKIA", "secret")
SERVICES = ("ec2", "ssm", "iam", "s3", "sandbox")
FORM, JSON = "application/x-www-form-urlencoded", "application/x-amz-json-1.1"


def signature(content: bytes) -> object:
    """A request's header of the signature, its date and its body, a line each."""
    claimed, date, body, *_ = *content.split(b"\n", 2), b"", b""
    headers = {"authorization": claimed.decode("latin-1"), "host": HOST, signatures.DATE: date.decode("latin-1")}
    claim = signatures.claim_of(headers)
    keys = signatures.keys_of(claim, headers, {KEYS.id: KEYS}, NOW)
    return signatures.check(claim, keys, "POST", f"http://{HOST}/", headers, body)


def signed_body(body: bytes) -> bytes:
    """A request that its owner signed, as `signature` takes it."""
    date = AT.strftime(signatures.DATE_FORMAT)
    request = AWSRequest("POST", f"http://{HOST}/", {"host": HOST, signatures.DATE: date}, body)
    request.context["timestamp"] = date
    signer = signatures._signer(KEYS, "ec2", "eu-west-1")
    value = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    scope = f"{KEYS.id}/{date[:8]}/eu-west-1/ec2/aws4_request"
    named = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host;{signatures.DATE}, Signature={value}"
    return f"{named}\n{date}\n".encode() + body


@functools.cache
def sandbox() -> tuple[Guard, Guard]:
    """The two doors of a rehearsal cloud that starts no machines."""
    mock_random.seed(0)
    account.provision()
    instances, faults = Instances("127.9.9."), InjectedFaults()
    gateway = Gateway(instances, faults, Path(), lambda: None)
    no_machines: Any = SimpleNamespace(processes=list)
    control = Control(instances, no_machines, faults, gateway.calls, lambda: None)
    return Guard(gateway, HOST, {KEYS.id: KEYS}), Guard(control, HOST, {KEYS.id: KEYS})


def request(content: bytes) -> object:
    """A signed request: a byte for the service, a line with method, path and target, and the body."""
    service = SERVICES[content[0] % len(SERVICES) if content else 0]
    line, _, body = content[1:].partition(b"\n")
    method, path, target, *_ = *line.replace(b"\r", b"").decode("latin-1").split(" "), "", "", ""
    headers = {"Host": HOST, "Content-Type": FORM if service in ("ec2", "iam") else JSON}
    headers |= {"X-Amz-Target": target} if target else {}
    url = f"http://{HOST}/{path}"
    signed = AWSRequest(method, url, headers, body)
    with mock.patch("botocore.auth.get_current_datetime", return_value=AT):
        signatures._signer(KEYS, service, "eu-west-1").add_auth(signed)
    environ = EnvironBuilder("/", method=method or "GET", headers=dict(signed.headers), data=body).get_environ()
    environ |= {
        "RAW_URI": f"/{path}",
        "PATH_INFO": f"/{path.partition('?')[0]}",
        "QUERY_STRING": path.partition("?")[2],
    }
    door = sandbox()[service == "sandbox"]
    with mock.patch("time.time", return_value=NOW):
        _, status, _ = run_wsgi_app(door, environ, buffered=True)
    if not status.startswith("2"):
        raise RefusedError(status)
    return status


def metadata_call(content: bytes) -> object:
    """An HTTP request to a machine's metadata service."""
    server = metadata.MetadataServer.__new__(metadata.MetadataServer)
    server.get_facts, server.keys, server.tokens = lambda: FACTS, KEYS, {"t": float("inf")}
    delays: list[float] = []
    server.shut_down, server._secret, server.server_address = delays.append, "s", ("127.0.0.1", 9)
    handler = metadata._Handler.__new__(metadata._Handler)
    answer = io.BytesIO()
    vars(handler).update(rfile=io.BytesIO(content), wfile=answer, server=server, client_address=("127.0.0.1", 1))
    handler.handle()
    assert all(0 <= seconds < float("inf") for seconds in delays)
    if b" 200 " not in answer.getvalue()[:20]:
        raise RefusedError("no")
    return None


def command(content: bytes) -> object:
    """Arguments of a command on a machine; the first byte chooses which."""
    kind, arguments = content[0] % 3 if content else 0, content[1:].decode(errors="replace").split("\0")
    if kind == 0:
        assert 0 <= shims.shutdown_seconds(arguments) < float("inf")
        return None
    if kind == 1:
        assert shims.installed(Path("/machine"), arguments).is_relative_to("/machine")
        return None
    return shims.container(arguments, {"PATH": "/bin"})


FACTS = metadata.Facts(
    instance="i-1",
    type="m5.large",
    address="127.9.9.2",
    region="eu-west-1",
    zone="eu-west-1a",
    tags={"k": "v"},
    role="node",
    taken_at=NOW,
    rebalance_at=NOW,
)
BUCKET = account.BUCKET.encode()
TOKEN = b"X-aws-ec2-metadata-token"

READERS = {
    "signature": Reader(
        signature,
        runs=9_000_000,
        sound=(signed_body(b"Action=DescribeInstances"),),
        modules=("cloud.sandbox.signatures",),
        odd=(
            b"AWS4-HMAC-SHA256 Credential=A/20260101/r/ec2/aws4_request, SignedHeaders=host;x-amz-date, Signature="
            + b"0" * 64,
        ),
        errors=(signatures.SignatureError,),
    ),
    "sandbox request": Reader(
        request,
        runs=20_000,
        sound=(
            b"\0POST\nAction=DescribeInstances&Version=2016-11-15&Filter.1.Name=tag-key&Filter.1.Value.1=x",
            b"\0POST\nAction=RunInstances&Version=2016-11-15&ImageId=ami-03cf127a&MinCount=1&MaxCount=1&InstanceType=m5.large",
            b"\0POST\nAction=DescribeSpotPriceHistory&Version=2016-11-15&InstanceType.1=m5.large&MaxResults=1",
            b'\1POST  AmazonSSM.PutParameter\n{"Name": "/x", "Value": "v", "Type": "String", "Overwrite": true}',
            b"\2POST\nAction=ListRoles&Version=2010-05-08",
            b"\3PUT " + BUCKET + b"/x\nbody",
            b"\3GET " + BUCKET + b"?list-type=2&prefix=x\n",
            b"\4GET _sandbox/inventory\n",
            b'\4POST _sandbox/capacity\n{"count": 100}',
            b'\4POST _sandbox/fault\n{"action": "DescribeVpcs"}',
        ),
        modules=("cloud.sandbox.gateway", "cloud.sandbox.guard", "cloud.sandbox.control", "cloud.sandbox.launch_spec"),
        odd=(
            b"\0POST\nAction=CreateLaunchTemplate&LaunchTemplateName=n&LaunchTemplateData.UserData=eA==",
            b"\0POST\nAction=RunInstances&MinCount=x&MaxCount=1",
            b'\1POST  AmazonSSM.PutParameter\n{"Name": "\xcf"}',
            b"\2POST\nAction=ListNothing",
            b"\0POST\nAction=CreateFleet&LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateId=lt&Type=instant",
        ),
    ),
    "metadata call": Reader(
        metadata_call,
        runs=1_500_000,
        sound=(
            b"PUT /s/latest/api/token HTTP/1.1\r\nHost: 127.0.0.1:9\r\n" + TOKEN + b"-ttl-seconds: 60\r\n\r\n",
            b"GET /s/latest/meta-data/tags/instance/k HTTP/1.1\r\nHost: 127.0.0.1:9\r\n" + TOKEN + b": t\r\n\r\n",
            b"POST /s/shutdown HTTP/1.1\r\nHost: 127.0.0.1:9\r\nContent-Length: 2\r\n\r\n60",
        ),
        modules=("cloud.sandbox.metadata",),
        odd=(b"PUT /s/latest/api/token HTTP/1.1\r\nHost: 127.0.0.1:9\r\n" + TOKEN + b"-ttl-seconds: \xb2\r\n\r\n",),
    ),
    "machine's commands": Reader(
        command,
        runs=4_000_000,
        sound=(b"\0-h\0+5", b"\1-D\0/dev/stdin\0/etc/x", b"\2run\0--rm\0-e\0A=b\0image\0node"),
        modules=("cloud.sandbox.shims",),
        odd=(b"\0-h\0+\xc2\xb2", b"\0-h\0+" + b"9" * 400),
        errors=(shims.UsageError,),
    ),
}
