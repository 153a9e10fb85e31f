"""`idletrain doctor`: what an account lacks before a run can start in it, one sentence each.

Looks and changes nothing. What cannot be looked at is said to be unknown, not to be well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from botocore.exceptions import BotoCoreError, ClientError

from idletrain.errors import IdletrainError
from idletrain.fleet.aws import Account
from idletrain.job import CloudSettings

SPOT_QUOTA, ON_DEMAND_QUOTA = "L-34B43A08", "L-1216C47A"  # Service Quotas: vCPUs of standard instances
SPOT_ROLE = "AWSServiceRoleForEC2Spot"


@dataclass(frozen=True)
class Finding:
    """One check's result; `well` is None where it could not be looked at."""

    what: str
    well: bool | None
    text: str


def examine(account: Account, cloud: CloudSettings, bucket: str) -> list[Finding]:
    """All checks, in the order in which a launch would fail."""
    checks: dict[str, Callable[[], tuple[bool, str]]] = {
        "credentials": lambda: (True, account.owner),
        "network": lambda: _network(account, cloud),
        "bucket": lambda: _bucket(account, bucket),
        "spot role": lambda: _role(account),
        "instance profiles": lambda: _profiles(account, cloud),
        "image": lambda: _image(account, cloud.image),
        "spot quota": lambda: _quota(account, SPOT_QUOTA),
        "on-demand quota": lambda: _quota(account, ON_DEMAND_QUOTA),
    }
    return [_look(what, check) for what, check in checks.items()]


def missing_bucket(account: Account, bucket: str) -> str | None:
    """Why a run's bucket cannot be used, or None."""
    well, text = _bucket(account, bucket)
    return None if well else text


def missing_image(account: Account, image: str) -> str | None:
    """Why a container image cannot be used, or None; only Amazon's own registry can be asked."""
    well, text = _image(account, image)
    return None if well else text


def quota_fault(account: Account, nodes: int, vcpus: int, market: str) -> str | None:
    """Why an account's quota does not allow a fleet, or None; also where quotas cannot be read."""
    code = SPOT_QUOTA if market == "spot" else ON_DEMAND_QUOTA
    try:
        allowed = _vcpus_allowed(account, code)
    except (ClientError, BotoCoreError):
        return None
    return quota_sentence(nodes, vcpus, allowed, market, code)


def quota_sentence(nodes: int, vcpus: int, allowed: int, market: str, code: str) -> str | None:
    """What is wrong with a fleet of machines of `vcpus` each under a quota of `allowed`, or None."""
    needed = nodes * vcpus
    if needed <= allowed:
        return None
    return (
        f"nodes.count: {nodes} nodes need {needed} vCPUs of {market} quota and the account has {allowed}; "
        f"ask for {needed} under Service Quotas ({code}), or for fewer nodes"
    )


def _look(what: str, check: Callable[[], tuple[bool, str]]) -> Finding:
    try:
        well, text = check()
    except IdletrainError as error:
        return Finding(what, False, str(error))
    except (ClientError, BotoCoreError) as error:
        return Finding(what, None, f"cannot be looked at: {str(error)[:120]}")
    return Finding(what, well, text)


def _network(account: Account, cloud: CloudSettings) -> tuple[bool, str]:
    site = account.site(cloud.ami, gpu=False)
    return True, f"{site.vpc} with a way out of {', '.join(sorted(site.subnets))}; machine image {site.ami}"


def _bucket(account: Account, bucket: str) -> tuple[bool, str]:
    try:
        account.s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        known = {
            "404": f"there is no bucket {bucket}; deploy infra/aws, which makes it",
            "403": f"the bucket {bucket} is not ours; name one that is",
        }
        text = known.get(error.response["Error"]["Code"])
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
        return False, "cloud.image: is missing; build the Dockerfile, push it, and name it there"
    host, _, rest = image.partition("/")
    if ".dkr.ecr." not in host:
        return True, f"{image} (in a registry that cannot be asked from here)"
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


def _quota(account: Account, code: str) -> tuple[bool, str]:
    vcpus = _vcpus_allowed(account, code)
    return vcpus > 0, f"{vcpus} vCPUs" + ("" if vcpus else f"; ask for more under Service Quotas, {code}")


def _vcpus_allowed(account: Account, code: str) -> int:
    found = account.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)
    return int(found["Quota"]["Value"])
