"""Check what an account lacks before a run can start in it, one sentence each (`idletrain doctor`).

Reads only. A check that cannot be made is reported as unknown, not as passed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from botocore.exceptions import BotoCoreError, ClientError

from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.instance_types import Offer
from idletrain.errors import IdletrainError
from idletrain.job import NO_IMAGE, CloudSettings

# Families that share a quota of vCPUs, and its codes (AWS, "Amazon EC2 service quotas" and "Spot Instance quotas").
# A new account's are 0 for GPUs. Families that are not listed, such as P6, are not checked.
QUOTAS = {
    "standard": (r"(a|c|d|h|i|im|is|m|r|t|z)\d", {"spot": "L-34B43A08", "on-demand": "L-1216C47A"}),
    "G and VT": (r"(g|gr|vt)\d", {"spot": "L-3819A6DF", "on-demand": "L-DB2E81BA"}),
    "P2 to P4": (r"p[234]", {"spot": "L-7212CCBC", "on-demand": "L-417A185B"}),
    "P5": (r"p5", {"spot": "L-C4BD4855", "on-demand": "L-417A185B"}),
    "X": (r"x\d", {"spot": "L-E3A00192", "on-demand": "L-7295265B"}),
}
GPU_QUOTAS = ("G and VT", "P2 to P4", "P5")
SPOT_ROLE = "AWSServiceRoleForEC2Spot"


@dataclass(frozen=True)
class CheckResult:
    """One check's result; `passed` is None if the check could not be made."""

    what: str
    passed: bool | None
    text: str


def examine(account: Account, cloud: CloudSettings, bucket: str, *, gpu: bool = False) -> list[CheckResult]:
    """Run all checks, in the order in which a launch would fail; GPU quotas only if nodes have GPUs."""
    checks: dict[str, Callable[[], tuple[bool, str]]] = {
        "credentials": lambda: (True, account.owner),
        "network": lambda: _network(account, cloud),
        "bucket": lambda: _bucket(account, bucket),
        "spot role": lambda: _role(account),
        "instance profiles": lambda: _profiles(account, cloud),
        "image": lambda: _image(account, cloud.image),
        "spot quota": lambda: _quota(account, "standard", "spot"),
        "on-demand quota": lambda: _quota(account, "standard", "on-demand"),
    }
    for families in GPU_QUOTAS if gpu else ():
        checks[f"spot {families}"] = functools.partial(_quota, account, families, "spot")
    return [_check(what, check) for what, check in checks.items()]


def missing_bucket(account: Account, bucket: str) -> str | None:
    """Return why a run's bucket cannot be used, or None."""
    passed, text = _bucket(account, bucket)
    return None if passed else text


def missing_image(account: Account, image: str) -> str | None:
    """Return why a container image cannot be used, or None; only images in Amazon's own registry are checked."""
    passed, text = _image(account, image)
    return None if passed else text


def quota_fault(account: Account, nodes: int, offers: Collection[Offer]) -> str | None:
    """Return why an account's quotas allow a fleet of none of these offers, or None; None if a quota is unreadable."""
    smallest: dict[tuple[str, str], int] = {}
    for offer in offers:
        families = next((name for name, (family, _) in QUOTAS.items() if re.match(family, offer.type.name)), None)
        if families is None:
            return None
        key = families, offer.market
        smallest[key] = min(offer.type.vcpus, smallest.get(key, offer.type.vcpus))
    faults = []
    for (families, market), vcpus in sorted(smallest.items(), key=lambda item: item[1]):
        try:
            allowed = _vcpus_allowed(account, families, market)
        except (ClientError, BotoCoreError):
            return None
        faults.append(quota_sentence(nodes, vcpus, allowed, families, market))
    return faults[0] if all(faults) else None


def quota_sentence(nodes: int, vcpus: int, allowed: int, families: str, market: str) -> str | None:
    """Return why `nodes` machines of `vcpus` vCPUs each exceed a quota of `allowed` vCPUs, or None."""
    needed = nodes * vcpus
    if needed <= allowed:
        return None
    return (
        f"nodes.count: {nodes} nodes need {needed} vCPUs of {market} quota ({families}) and the account has {allowed}; "
        f"ask for {needed} under Service Quotas ({QUOTAS[families][1][market]}), or for fewer nodes"
    )


def _check(what: str, check: Callable[[], tuple[bool, str]]) -> CheckResult:
    try:
        passed, text = check()
    except IdletrainError as error:
        return CheckResult(what, False, str(error))
    except (ClientError, BotoCoreError) as error:
        return CheckResult(what, None, f"cannot be checked: {str(error)[:120]}")
    return CheckResult(what, passed, text)


def _network(account: Account, cloud: CloudSettings) -> tuple[bool, str]:
    site = account.site(cloud.ami, gpu=False)
    return True, f"{site.vpc} with internet access in {', '.join(sorted(site.subnets))}; machine image {site.ami}"


def _bucket(account: Account, bucket: str) -> tuple[bool, str]:
    try:
        account.s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        messages = {
            "404": f"there is no bucket {bucket}; deploy infra/aws, which makes it",
            "403": f"the bucket {bucket} is not ours; name one that is",
        }
        text = messages.get(error.response["Error"]["Code"])
        if text is None:
            raise
        return False, f"checkpoint.to: {text}"
    return True, bucket


def _role(account: Account) -> tuple[bool, str]:
    iam = account.client("iam")
    try:
        iam.get_role(RoleName=SPOT_ROLE)
    except iam.exceptions.NoSuchEntityException:
        return False, "missing; run `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`"
    return True, SPOT_ROLE


def _profiles(account: Account, cloud: CloudSettings) -> tuple[bool, str]:
    iam = account.client("iam")
    for name in cloud.profiles:
        try:
            iam.get_instance_profile(InstanceProfileName=name)
        except iam.exceptions.NoSuchEntityException:
            return False, f"cloud.profiles: there is no instance profile {name}; deploy infra/aws, which makes it"
    return True, ", ".join(cloud.profiles)


def _image(account: Account, image: str | None) -> tuple[bool, str]:
    if image is None:
        return False, NO_IMAGE
    host, _, rest = image.partition("/")
    if ".dkr.ecr." not in host:
        return True, f"{image} (in a registry that cannot be checked from here)"
    name, _, label = rest.partition(":")
    try:
        account.client("ecr", host.split(".")[3]).describe_images(
            repositoryName=name, imageIds=[{"imageTag": label or "latest"}]
        )
    except ClientError as error:
        if "NotFound" not in error.response["Error"]["Code"]:
            raise
        return False, f"cloud.image: there is no {image}; push it, or name another"
    return True, image


def _quota(account: Account, families: str, market: str) -> tuple[bool, str]:
    vcpus = _vcpus_allowed(account, families, market)
    code = QUOTAS[families][1][market]
    return vcpus > 0, f"{vcpus} vCPUs" + ("" if vcpus else f"; ask for more under Service Quotas, {code}")


def _vcpus_allowed(account: Account, families: str, market: str) -> int:
    code = QUOTAS[families][1][market]
    answer = account.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)
    return int(answer["Quota"]["Value"])
