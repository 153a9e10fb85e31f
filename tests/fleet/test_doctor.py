"""What an account lacks, one sentence each."""

from __future__ import annotations

from rehearsal import Sandbox

from idletrain.fleet import doctor
from idletrain.fleet.aws import Account
from idletrain.job import CloudSettings

IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/idletrain:1"


def test_what_is_there_is_well_and_what_cannot_be_seen_is_unknown(account: Account) -> None:
    found = {f.what: f for f in doctor.examine(account, CloudSettings(image="quay.io/idletrain"), account.bucket)}
    assert {what for what, finding in found.items() if finding.well} == {
        "credentials",
        "network",
        "bucket",
        "instance profiles",
        "image",
    }
    assert found["spot role"].well is False
    assert "create-service-linked-role" in found["spot role"].text


def test_a_bucket_that_is_not_there_or_not_ours_is_a_sentence(cloud: Sandbox, account: Account) -> None:
    assert doctor.missing_bucket(account, account.bucket) is None
    assert "there is no bucket nobodys-bucket" in (doctor.missing_bucket(account, "nobodys-bucket") or "")
    cloud.ask("POST", "fault", action="HeadBucket", code="403", status=403, times=1)
    assert "is not ours" in (doctor.missing_bucket(account, account.bucket) or "")


def test_an_image_that_is_not_pushed_is_a_sentence(account: Account) -> None:
    assert doctor.missing_image(account, "quay.io/idletrain:1") is None
    assert f"there is no {IMAGE}; push it" in (doctor.missing_image(account, IMAGE) or "")


def test_a_quota_that_is_too_small_is_refused_with_the_number_to_ask_for() -> None:
    assert doctor.quota_sentence(8, 2, 16, "spot", "L-1") is None
    assert doctor.quota_sentence(8, 2, 15, "spot", "L-1") == (
        "nodes.count: 8 nodes need 16 vCPUs of spot quota and the account has 15; "
        "ask for 16 under Service Quotas (L-1), or for fewer nodes"
    )


def test_a_quota_that_cannot_be_read_refuses_nothing(account: Account) -> None:
    assert doctor.quota_fault(account, 1000, 64, "spot") is None


def test_profiles_that_are_not_there_are_named(account: Account) -> None:
    (finding,) = [
        finding
        for finding in doctor.examine(account, CloudSettings(profiles=("mine", "yours")), account.bucket)
        if finding.what == "instance profiles"
    ]
    assert finding.well is False
    assert "no instance profile mine" in finding.text
