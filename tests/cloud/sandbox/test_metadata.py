"""The metadata service answers as IMDSv2: tokens first, what is live is live, the rest is not there."""

from __future__ import annotations

import datetime
import http.client
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from idletrain.cloud.sandbox.metadata import Facts, MetadataServer, answer

FACTS = Facts(
    instance="i-0123456789abcdef0",
    type="m5.large",
    address="127.1.2.3",
    region="eu-west-1",
    zone="eu-west-1a",
    tags={"idletrain:run": "demo", "Name": "x"},
    role="idletrain-node",
)
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
    assert answer(FACTS, path, NOW) == text


def test_a_notice_and_a_recommendation_name_their_times() -> None:
    facts = replace(FACTS, taken_at=NOW + 120, rebalance_at=NOW)
    notice = json.loads(answer(facts, "spot/instance-action", NOW) or "")
    assert notice == {"action": "terminate", "time": "2027-01-15T08:02:00Z"}
    advice = json.loads(answer(facts, "events/recommendations/rebalance", NOW) or "")
    assert advice == {"noticeTime": "2027-01-15T08:00:00Z"}


def test_credentials_are_temporary() -> None:
    given = json.loads(answer(FACTS, "iam/security-credentials/idletrain-node", NOW) or "")
    assert given["Code"] == "Success"
    assert len(given["AccessKeyId"]) == 20
    assert given["AccessKeyId"].startswith("ASIA")
    assert given["Token"]
    assert datetime.datetime.fromisoformat(given["Expiration"]).timestamp() == NOW + 6 * 3600


def test_without_metadata_tags_and_profile_there_are_none() -> None:
    bare = replace(FACTS, tags=None, role="")
    for path in ("tags/instance", "tags/instance/Name", "iam/security-credentials/"):
        assert answer(bare, path, NOW) is None


class Service:
    """A server whose facts can change, and a caller of it."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.server = MetadataServer(lambda: self.facts)

    def call(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.server.endpoint.removeprefix("http://"), timeout=5)
        words = {f"X-aws-ec2-metadata-{key.replace('_', '-')}": value for key, value in headers.items()}
        connection.request(method, path, headers=words)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text

    def token(self, seconds: str = "60") -> str:
        return self.call("PUT", "/latest/api/token", token_ttl_seconds=seconds)[1]


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.close()


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


def test_a_closed_service_takes_no_calls(service: Service) -> None:
    service.server.close()
    with pytest.raises(ConnectionRefusedError):
        service.call("GET", "/latest/meta-data/instance-id")
