"""Attacks on the endpoint: nobody calls it but the owner's own processes, from no page and under no other name."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import boto3
import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.client import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from rehearsal import Sandbox, eventually

from idletrain.cloud.sandbox import signatures, supervisor
from idletrain.cloud.sandbox.signatures import Keys, owner_keys
from idletrain.cluster import fork_server

BUCKET = "idletrain-123456789012-eu-west-1"


def launch(cloud: Sandbox) -> bytes:
    """The body of a RunInstances whose user data would run as the sandbox's owner."""
    form = {"Action": "RunInstances", "Version": "2016-11-15", "ImageId": cloud.image(), "MinCount": 1, "MaxCount": 1}
    return urlencode({**form, "InstanceType": "m5.large"}).encode()


def send(
    cloud: Sandbox, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, dict[str, str], str]:
    """Send a request just as it is; returns status, headers and text."""
    connection = http.client.HTTPConnection(cloud.endpoint.removeprefix("http://"), timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text


def signed(cloud: Sandbox, body: bytes, keys: Keys | None = None) -> dict[str, str]:
    """Headers of an EC2 request as botocore signs it."""
    request = AWSRequest("POST", cloud.endpoint + "/", {"Content-Type": "application/x-www-form-urlencoded"}, body)
    keys = keys or cloud.keys
    SigV4Auth(Credentials(keys.id, keys.secret), "ec2", "eu-west-1").add_auth(request)
    return {"Host": cloud.endpoint.removeprefix("http://"), **dict(request.headers.items())}


Attack = Callable[[dict[str, str], bytes], tuple[str, dict[str, str], bytes]]


def without(headers: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in names}


ATTACKS: dict[str, Attack] = {
    "no signature": lambda h, b: ("POST", without(h, "Authorization"), b),
    "another body": lambda h, b: ("POST", h, b.replace(b"MaxCount=1", b"MaxCount=9")),
    "a longer body": lambda h, b: ("POST", h, b + b"&UserData=ZWNobw=="),
    "another method": lambda h, b: ("PUT", h, b),
    "a foreign host": lambda h, b: ("POST", {**h, "Host": "evil.example"}, b),
    "a foreign host of this port": lambda h, b: ("POST", {**h, "Host": "evil.example:" + h["Host"].split(":")[1]}, b),
    "no host": lambda h, b: ("POST", without(h, "Host"), b),
    "a page": lambda h, b: ("POST", {**h, "Origin": "https://evil.example"}, b),
    "a page without an origin": lambda h, b: ("POST", {**h, "Sec-Fetch-Site": "cross-site"}, b),
    "a simple POST of a page": lambda h, b: (
        "POST",
        {"Host": h["Host"], "Origin": "null", "Content-Type": "text/plain", "Sec-Fetch-Mode": "no-cors"},
        b,
    ),
    "a form of a page": lambda h, b: (
        "POST",
        {"Host": h["Host"], "Content-Type": "application/x-www-form-urlencoded"},
        b,
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_launches_nothing_and_is_counted_as_no_call(cloud: Sandbox, name: str) -> None:
    body = launch(cloud)
    cloud.ask("POST", "calls/reset")
    method, headers, content = ATTACKS[name](signed(cloud, body), body)
    status, answered, text = send(cloud, method, "/", headers, content)
    assert status == 403
    assert not any(header.startswith("access-control-") for header in answered)
    assert cloud.keys.secret not in text
    assert cloud.inventory()["instances"] == []
    assert cloud.ask("GET", "calls") == {}


def test_the_same_request_unchanged_launches(cloud: Sandbox) -> None:
    body = launch(cloud)
    assert send(cloud, "POST", "/", signed(cloud, body), body)[0] == 200
    assert len(cloud.inventory()["instances"]) == 1


@pytest.mark.parametrize("path", ["/", f"/{BUCKET}/key", "/_sandbox/take", "/moto-api/reset"])
def test_a_preflight_gets_no_permission(cloud: Sandbox, path: str) -> None:
    request = {
        "Host": cloud.endpoint.removeprefix("http://"),
        "Origin": "https://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-amz-date",
    }
    status, answered, _ = send(cloud, "OPTIONS", path, request)
    assert status == 403
    assert not any(header.startswith("access-control-") for header in answered)


def test_an_answer_permits_no_page_to_read_it(cloud: Sandbox) -> None:
    """moto adds `Access-Control-Allow-Origin: *` to all answers but EC2's."""
    answer = cloud.client("s3").list_objects_v2(Bucket=BUCKET)["ResponseMetadata"]["HTTPHeaders"]
    assert not any(header.startswith("access-control-") for header in answer)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/{BUCKET}?list-type=2"),
        ("PUT", f"/{BUCKET}/planted"),
        ("POST", "/moto-api/reset"),
        ("GET", "/moto-api/data.json"),
        ("GET", "/_sandbox/inventory"),
        ("POST", "/_sandbox/take"),
        ("POST", "/_sandbox/fault"),
        ("GET", "/latest/meta-data/"),
        ("GET", "http://127.0.0.1/"),
        ("GET", "/" + "%" * 9000),
    ],
)
def test_no_path_is_open_without_a_signature(cloud: Sandbox, method: str, path: str) -> None:
    status, _, _ = send(cloud, method, path, {"Host": cloud.endpoint.removeprefix("http://")}, b"{}")
    assert status == 403
    assert cloud.ask("GET", "faults") == []


def client(cloud: Sandbox, service: str, keys: Keys, **settings: Any) -> Any:
    return boto3.client(
        service,
        region_name="eu-west-1",
        endpoint_url=cloud.endpoint,
        aws_access_key_id=keys.id,
        aws_secret_access_key=keys.secret,
        config=Config(retries={"total_max_attempts": 1}, **settings),
    )


@pytest.mark.parametrize(
    ("service", "method", "arguments"),
    [
        ("ec2", "describe_instances", {}),
        ("s3", "list_objects_v2", {"Bucket": BUCKET}),
        ("ssm", "describe_parameters", {}),
        ("iam", "list_roles", {}),
        ("sts", "get_caller_identity", {}),
        ("scheduler", "list_schedules", {}),
    ],
)
def test_made_up_keys_open_no_service_and_the_answer_is_in_its_words(
    cloud: Sandbox, service: str, method: str, arguments: dict[str, Any]
) -> None:
    for keys, code in (
        (Keys("sandbox", "sandbox"), "InvalidClientTokenId"),
        (owner_keys(), "InvalidClientTokenId"),
        (Keys(cloud.keys.id, "guessed"), "SignatureDoesNotMatch"),
    ):
        with pytest.raises(ClientError) as caught:
            getattr(client(cloud, service, keys), method)(**arguments)
        assert caught.value.response["Error"]["Code"] == code
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_an_object_whose_body_is_not_signed_is_not_stored(cloud: Sandbox) -> None:
    s3 = client(cloud, "s3", cloud.keys, s3={"payload_signing_enabled": False})
    with pytest.raises(ClientError, match="sign the body"):
        s3.put_object(Bucket=BUCKET, Key="planted", Body=b"x")
    url = f"{cloud.endpoint}/{BUCKET}/planted"
    request = AWSRequest("PUT", url, {}, b"good")
    S3SigV4Auth(Credentials(cloud.keys.id, cloud.keys.secret), "s3", "eu-west-1").add_auth(request)
    headers = {"Host": cloud.endpoint.removeprefix("http://"), **dict(request.headers.items())}
    assert send(cloud, "PUT", f"/{BUCKET}/planted", headers, b"evil")[0] == 403
    assert "Contents" not in cloud.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="planted")


def test_an_old_recording_is_not_played_again(cloud: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime

    from botocore import auth

    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=16)
    ec2 = cloud.client("ec2")
    with monkeypatch.context() as past:
        past.setattr(auth, "get_current_datetime", lambda *_: then.replace(tzinfo=None))
        with pytest.raises(ClientError) as caught:
            ec2.describe_instances()
    assert caught.value.response["Error"]["Code"] == "RequestExpired"


@pytest.mark.parametrize("key", ["plain", "with space", "a/b//c", "pl+us", "ü-ß", "q?x=1&y", "~tilde", "%41", "a:b@c"])
def test_keys_of_any_spelling_are_signed_and_stored(cloud: Sandbox, key: str) -> None:
    s3 = cloud.client("s3")
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"x", Metadata={"with_underscore": "a  b"})
    assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"x"
    assert [o["Key"] for o in s3.list_objects_v2(Bucket=BUCKET, Prefix=key)["Contents"]] == [key]
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key}]})


def test_a_file_of_many_parts_is_signed_part_by_part(cloud: Sandbox, tmp_path: Path) -> None:
    file, copy, s3 = tmp_path / "file", tmp_path / "copy", cloud.client("s3")
    file.write_bytes(os.urandom(20 << 20))  # s3transfer takes parts above 8 MB
    s3.upload_file(str(file), BUCKET, "parts")
    s3.download_file(BUCKET, "parts", str(copy))
    assert copy.read_bytes() == file.read_bytes()
    assert cloud.ask("GET", "calls")["s3"]["UploadPart"] == 3
    s3.delete_object(Bucket=BUCKET, Key="parts")


# A machine shows what its own credentials open: EC2, but neither the control nor, once it has ended, anything.
MACHINE = f"""{sys.executable} - <<'END'
import boto3, json
keys = boto3.Session(region_name="eu-west-1").get_credentials().get_frozen_credentials()
boto3.client("ec2", region_name="eu-west-1").describe_instances()
print(json.dumps(keys[:3]), flush=True)
END
sleep 300
"""


def test_a_machines_credentials_end_with_it_and_take_no_other_machine(cloud: Sandbox) -> None:
    import json

    (id_,) = cloud.start(MACHINE, IamInstanceProfile={"Name": "idletrain-node"})
    keys = Keys(*json.loads(eventually(lambda: cloud.log(id_).strip())))
    url = f"{cloud.endpoint}/_sandbox/take"
    body = json.dumps({"instance": id_}).encode()
    headers = {"Host": cloud.endpoint.removeprefix("http://")} | signatures.sign(keys, "POST", url, body, "eu-west-1")
    assert send(cloud, "POST", "/_sandbox/take", headers, body)[0] == 403
    assert cloud.inventory()["instances"] == [id_]
    settings = {"region_name": "eu-west-1", "endpoint_url": cloud.endpoint, "aws_session_token": keys.token}
    ec2 = boto3.client("ec2", aws_access_key_id=keys.id, aws_secret_access_key=keys.secret, **settings)
    ec2.describe_instances()
    cloud.ec2.terminate_instances(InstanceIds=[id_])
    eventually(lambda: not cloud.inventory()["processes"])
    with pytest.raises(ClientError, match="InvalidClientTokenId"):
        ec2.describe_instances()


def test_no_argument_of_a_process_shows_a_secret(cloud: Sandbox) -> None:
    """Arguments can be read by every user of a machine, an environment by its owner alone."""
    (id_,) = cloud.start("echo $AWS_EC2_METADATA_SERVICE_ENDPOINT; shutdown -h +60; sleep 300")
    secret = eventually(lambda: cloud.log(id_).strip()).rsplit("/", 1)[1]
    eventually(lambda: len(cloud.pids(id_)) == 2)
    lines = [path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(cloud.keys.secret in line or secret in line for line in lines)
    assert len(secret) == 40


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_finds_a_closed_door(cloud: Sandbox) -> None:
    """As `nobody`: the endpoint, a machine's metadata service, the machine's directory and the log."""
    (id_,) = cloud.start("echo $AWS_EC2_METADATA_SERVICE_ENDPOINT $HOME; sleep 300")
    metadata, home_dir = eventually(lambda: cloud.log(id_).split())
    script = """
import os, pwd, sys, urllib.error, urllib.request
def status(url, method):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, b"Action=RunInstances", method=method)).status
    except urllib.error.HTTPError as error:
        return error.code
def readable(path):
    try:
        return bool(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read())
    except PermissionError:
        return False
endpoint, metadata, *paths = sys.argv[1:]
status(endpoint, "POST")  # imports what it needs from where nobody may not read
nobody = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)
print(status(endpoint, "POST"), status(metadata + "/latest/api/token", "PUT"), *map(readable, paths))
"""
    (pid,) = (p.parent.name for p in map(Path, cloud_environments(home_dir)))
    arguments = [cloud.endpoint, metadata.rsplit("/", 1)[0], home_dir, f"/proc/{pid}/environ"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["403", "404", "False", "False"]


def cloud_environments(home_dir: str) -> list[str]:
    """The environments of a machine's supervisor, which runs in the machine's directory."""
    environments = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            supervises = path.read_text().strip() == fork_server.title(supervisor.__name__, ())
            if supervises and path.with_name("cwd").readlink() == Path(home_dir):
                environments.append(str(path.with_name("environ")))
        except OSError:
            continue
    return environments
