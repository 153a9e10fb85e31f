"""What an account lacks, one sentence each."""

from __future__ import annotations

from rehearsal import Sandbox

from idletrain.cloud.aws import doctor
from idletrain.cloud.aws.account import Account
from idletrain.machine_settings import CloudSettings

IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/idletrain:1"


def test_what_is_there_is_well_and_what_cannot_be_seen_is_unknown(account: Account) -> None:
    results = {f.what: f for f in doctor.examine(account, CloudSettings(image="quay.io/idletrain"), account.bucket)}
    assert {what for what, finding in results.items() if finding.passed} == {
        "credentials",
        "network",
        "heads' last group",
        "bucket",
        "instance profiles",
        "image",
    }
    assert results["spot role"].passed is False
    assert "create-service-linked-role" in results["spot role"].text


def test_a_bucket_that_is_not_there_or_not_ours_is_a_sentence(cloud: Sandbox, account: Account) -> None:
    assert doctor.missing_bucket(account, account.bucket) is None
    assert "there is no bucket nobodys-bucket" in (doctor.missing_bucket(account, "nobodys-bucket") or "")
    cloud.ask("POST", "fault", action="HeadBucket", code="403", status=403, times=1)
    assert "is not ours" in (doctor.missing_bucket(account, account.bucket) or "")


def test_an_image_that_is_not_pushed_is_a_sentence(account: Account) -> None:
    assert doctor.missing_image(account, "quay.io/idletrain:1") is None
    assert f"there is no {IMAGE}; push it" in (doctor.missing_image(account, IMAGE) or "")


def test_quotas_of_machines_with_gpus_are_looked_at_where_nodes_have_some(account: Account) -> None:
    cpus = [finding.what for finding in doctor.examine(account, CloudSettings(), account.bucket)]
    gpus = [finding.what for finding in doctor.examine(account, CloudSettings(), account.bucket, gpu=True)]
    assert gpus == [*cpus, "spot G and VT", "spot P2 to P4", "spot P5"]


def test_profiles_that_are_not_there_are_named(account: Account) -> None:
    (finding,) = [
        finding
        for finding in doctor.examine(account, CloudSettings(profiles=("mine", "yours")), account.bucket)
        if finding.what == "instance profiles"
    ]
    assert finding.passed is False
    assert "no instance profile mine" in finding.text
