"""Images in Amazon's registry by their digests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest
from moto import mock_aws

from idletrain.cloud.aws import images
from idletrain.cloud.aws.clients import Clients

REGION = "eu-west-1"
HOST = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        yield Clients(REGION)


def push(label: str, content: str) -> str:
    """Push an image that differs by its content; returns its digest."""
    ecr = boto3.client("ecr", region_name=REGION)
    if not ecr.describe_repositories()["repositories"]:
        ecr.create_repository(repositoryName="team/idletrain")
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "layers": [{"digest": content, "size": 1}]})
    image = ecr.put_image(repositoryName="team/idletrain", imageManifest=manifest, imageTag=label)["image"]
    digest: str = image["imageId"]["imageDigest"]
    return digest


def test_a_tag_is_what_it_stands_for_when_the_run_starts(clients: Clients) -> None:
    first = push("1", "a")
    pinned = images.pinned(clients, f"{HOST}/team/idletrain:1")
    assert pinned == f"{HOST}/team/idletrain@{first}"
    second = push("1", "b")  # the tag moves while the run goes on
    assert images.pinned(clients, pinned) == pinned
    pinned = images.pinned(clients, f"{HOST}/team/idletrain:1")
    assert pinned == f"{HOST}/team/idletrain@{second}"
    assert second != first
    assert images.exists(clients, pinned)
    assert not images.exists(clients, f"{HOST}/team/idletrain@sha256:{'0' * 64}")
    assert not images.exists(clients, f"{HOST}/team/other:1")


def test_an_image_of_another_registry_stays_as_it_is(clients: Clients) -> None:
    assert images.pinned(clients, "quay.io/idletrain:1") == "quay.io/idletrain:1"
