"""What a machine learns of itself, from a real machine's metadata service."""

from __future__ import annotations

import pytest
from rehearsal import Sandbox, eventually

from idletrain.cloud.account import Announcement, NoMetadataError
from idletrain.cloud.aws.metadata import Metadata


@pytest.fixture
def machine(cloud: Sandbox) -> str:
    """A spot instance that has said where its metadata is."""
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "idletrain:run", "Value": "night"}]}]
    template = cloud.template(
        "#!/bin/bash\necho at $AWS_EC2_METADATA_SERVICE_ENDPOINT\nsleep 60\n",
        MetadataOptions={"InstanceMetadataTags": "enabled"},
    )
    answer = cloud.fleet(template, 1, TagSpecifications=tags)
    instance: str = answer["Instances"][0]["InstanceIds"][0]
    eventually(lambda: "at http" in cloud.log(instance))
    return instance


def metadata_of(cloud: Sandbox, instance: str) -> Metadata:
    return Metadata(cloud.log(instance).split("at ", 1)[1].split()[0])


def test_a_machine_knows_its_id_address_region_and_tags(cloud: Sandbox, machine: str) -> None:
    metadata = metadata_of(cloud, machine)
    assert metadata.instance_id() == machine
    assert metadata.private_address() == cloud.state(machine)["PrivateIpAddress"]
    assert metadata.region() == cloud.region
    assert metadata.tags().items() >= {"idletrain:run": "night"}.items()


def test_what_is_announced_is_seen_when_it_is(cloud: Sandbox, machine: str) -> None:
    metadata = metadata_of(cloud, machine)
    assert metadata.announced() == Announcement()
    cloud.ask("POST", "rebalance", instance=machine)
    assert metadata.announced() == Announcement(rebalance=True)
    cloud.ask("POST", "notice", instance=machine, seconds=60)
    assert metadata.announced() == Announcement(notice=True, rebalance=True)


def test_being_asked_to_go_by_tag_is_a_notice(cloud: Sandbox, machine: str) -> None:
    metadata = metadata_of(cloud, machine)
    cloud.ec2.create_tags(Resources=[machine], Tags=[{"Key": "idletrain:interrupt", "Value": "asked"}])
    assert metadata.announced() == Announcement(notice=True)


def test_a_token_that_ran_out_is_renewed(cloud: Sandbox, machine: str) -> None:
    metadata = metadata_of(cloud, machine)
    assert metadata.instance_id() == machine
    metadata._token = "worn out"
    assert metadata.instance_id() == machine


def test_where_there_is_no_service_it_says_so() -> None:
    with pytest.raises(NoMetadataError, match="is this an EC2 instance"):
        Metadata("http://127.0.0.1:1").instance_id()


def test_a_proxy_is_not_asked_for_what_is_this_machines_own(cloud: Sandbox, machine: str) -> None:
    with pytest.MonkeyPatch.context() as patch:  # which ends before the cloud is cleaned
        patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        patch.setattr("urllib.request._opener", None)  # made once, from the environment of then
        assert metadata_of(cloud, machine).instance_id() == machine
