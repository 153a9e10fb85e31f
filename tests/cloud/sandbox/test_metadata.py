"""The metadata service answers as IMDSv2: tokens first, what is live is live, the rest is not there."""

from __future__ import annotations

import datetime
import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from idletrain.cloud.sandbox.metadata import Facts, MetadataServer, answer
from idletrain.cloud.sandbox.signatures import machine_keys

FACTS = Facts(
    instance="i-0123456789abcdef0",
    type="m5.large",
    address="127.1.2.3",
    region="eu-west-1",
    zone="eu-west-1a",
    tags={"idletrain:run": "demo", "Name": "x"},
    role="idletrain-node",
)
KEYS = machine_keys()
NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("instance-id", "i-0123456789abcdef0"),
        ("instance-type", "m5.large"),
        ("local-ipv4", "127.1.2.3"),
        ("placement/region", "eu-west-1"),
        ("placement/availability-zone", "eu-west-1a"),
        ("tags/instance", "idletrain:run\nName"),
        ("tags/instance/", "idletrain:run\nName"),
        ("tags/instance/idletrain:run", "demo"),
        ("iam/security-credentials/", "idletrain-node"),
        ("tags/instance/none", None),
        ("iam/security-credentials/other", None),
        ("spot/instance-action", None),
        ("events/recommendations/rebalance", None),
        ("public-ipv4", None),
        ("", None),
    ],
)
def test_what_an_instance_may_know(path: str, text: str | None) -> None:
    assert answer(FACTS, KEYS, path, NOW) == text


def test_a_notice_and_a_recommendation_name_their_times() -> None:
    facts = replace(FACTS, taken_at=NOW + 120, rebalance_at=NOW)
    notice = json.loads(answer(facts, KEYS, "spot/instance-action", NOW) or "")
    assert notice == {"action": "terminate", "time": "2027-01-15T08:02:00Z"}
    advice = json.loads(answer(facts, KEYS, "events/recommendations/rebalance", NOW) or "")
    assert advice == {"noticeTime": "2027-01-15T08:00:00Z"}


def test_credentials_are_temporary() -> None:
    given = json.loads(answer(FACTS, KEYS, "iam/security-credentials/idletrain-node", NOW) or "")
    assert given["Code"] == "Success"
    assert len(given["AccessKeyId"]) == 20
    assert given["AccessKeyId"].startswith("ASIA")
    assert (given["AccessKeyId"], given["SecretAccessKey"], given["Token"]) == (KEYS.id, KEYS.secret, KEYS.token)
    assert datetime.datetime.fromisoformat(given["Expiration"]).timestamp() == NOW + 6 * 3600


def test_without_metadata_tags_and_profile_there_are_none() -> None:
    bare = replace(FACTS, tags=None, role="")
    for path in ("tags/instance", "tags/instance/Name", "iam/security-credentials/"):
        assert answer(bare, KEYS, path, NOW) is None


class Service:
    """A server whose facts can change, and a caller of it."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.shutdowns: list[float] = []
        self.server = MetadataServer(lambda: self.facts, KEYS, self.shutdowns.append)
        self.address = urlsplit(self.server.endpoint)

    def call(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        """Call it as its machine does, which knows its secret path."""
        prefixed = {f"X-aws-ec2-metadata-{key.replace('_', '-')}": value for key, value in headers.items()}
        return self.send(method, self.address.path + path, prefixed)

    def send(self, method: str, path: str, headers: dict[str, str], body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.address.netloc, timeout=5)
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    def token(self, seconds: str = "60") -> str:
        return self.call("PUT", "/latest/api/token", token_ttl_seconds=seconds)[1]


@pytest.fixture
def service() -> Iterator[Service]:
    created = Service()
    yield created
    created.server.close()


@pytest.mark.parametrize(("seconds", "status"), [("1", 200), ("21600", 200), ("0", 400), ("21601", 400), ("x", 400)])
def test_a_token_is_given_for_a_second_to_six_hours(service: Service, seconds: str, status: int) -> None:
    assert service.call("PUT", "/latest/api/token", token_ttl_seconds=seconds)[0] == status


def test_a_token_needs_a_lifetime_and_nothing_else_is_put(service: Service) -> None:
    assert service.call("PUT", "/latest/api/token")[0] == 400
    assert service.call("PUT", "/latest/meta-data/instance-id", token_ttl_seconds="60")[0] == 404


def test_without_a_token_that_holds_there_is_no_answer(service: Service) -> None:
    path = "/latest/meta-data/instance-id"
    assert service.call("GET", path)[0] == 401
    assert service.call("GET", path, token="made up")[0] == 401
    token = service.token()
    assert service.call("GET", path, token=token) == (200, FACTS.instance)
    service.server.tokens[token] = 0.0  # it has expired
    assert service.call("GET", path, token=token)[0] == 401


def test_answers_are_live_and_what_is_not_there_is_not_found(service: Service) -> None:
    token, path = service.token(), "/latest/meta-data/tags/instance/asked%3Afor"
    assert service.call("GET", path, token=token)[0] == 404
    service.facts = replace(FACTS, tags={"asked:for": "now"})
    assert service.call("GET", path, token=token) == (200, "now")
    assert service.call("GET", "/latest/user-data", token=token)[0] == 404


def test_a_caller_without_the_secret_path_gets_nothing(service: Service) -> None:
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    secret = service.address.path
    for below in ("", "/", "/made-up", secret[:-1], secret + "x", secret.swapcase()):
        assert service.send("PUT", below + "/latest/api/token", lifetime) == (404, "")
    assert service.server.tokens == {}
    token = service.token()
    shown = {"X-aws-ec2-metadata-token": token}
    assert service.send("GET", "/latest/meta-data/iam/security-credentials/idletrain-node", shown) == (404, "")
    assert service.send("POST", "/shutdown", {}, "1") == (404, "")
    assert service.shutdowns == []


def test_a_page_that_another_name_leads_here_gets_nothing(service: Service) -> None:
    path = service.address.path + "/latest/api/token"
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    assert service.send("PUT", path, {**lifetime, "Host": "evil.example"})[0] == 404
    assert service.send("PUT", path, lifetime)[0] == 200


def test_a_machine_shuts_itself_down_here(service: Service) -> None:
    path = service.address.path + "/shutdown"
    assert service.send("POST", path, {}, "60.0")[0] == 200
    assert service.send("POST", path, {}, "soon")[0] == 400
    assert service.shutdowns == [60.0]


def test_a_caller_that_is_killed_while_it_waits_leaves_no_trace(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, handled = [], threading.Event()

    def shut_down(seconds: float) -> None:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a killed process ends
        caller.close()
        broken.append(seconds)

    def finish(request: Any) -> None:
        handled.set()
        close(request)

    close, service.server.shut_down = service.server.shutdown_request, shut_down
    service.server.shutdown_request = finish  # type: ignore[method-assign]
    caller = socket.create_connection((service.address.hostname, service.address.port))
    lines = (f"POST {service.address.path}/shutdown HTTP/1.1", f"Host: {service.address.netloc}", "Content-Length: 4")
    caller.sendall("\r\n".join([*lines, "", "60.0"]).encode())
    assert handled.wait(5)
    assert (broken, capfd.readouterr().err) == ([60.0], "")


def test_a_closed_service_takes_no_calls(service: Service) -> None:
    service.server.close()
    with pytest.raises(ConnectionRefusedError):
        service.call("GET", "/latest/meta-data/instance-id")
