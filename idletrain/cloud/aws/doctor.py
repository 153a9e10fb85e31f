"""Check what an account lacks before a run can start in it, one sentence each (`idletrain doctor`).

Reads only. A check that cannot be made is reported as unknown, not as passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from botocore.exceptions import BotoCoreError, ClientError

from idletrain.cloud.aws import images, quotas
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.errors import code_of
from idletrain.errors import IdletrainError
from idletrain.machine_settings import NO_IMAGE, CloudSettings
from idletrain.providers.protocol import CheckResult

SPOT_ROLE = "AWSServiceRoleForEC2Spot"


def examine(account: Account, cloud: CloudSettings, bucket: str, *, gpu: bool = False) -> list[CheckResult]:
    """Run all checks, in the order in which a launch would fail; GPU quotas only if nodes have GPUs."""
    checks: dict[str, Callable[[], tuple[bool, str]]] = {
        "credentials": lambda: (True, account.owner),
        "network": lambda: _network(account, cloud),
        "heads' last group": lambda: (True, account.ended_heads_group(account.site(cloud.ami, gpu=False).vpc)),
        "bucket": lambda: _bucket(account, bucket),
        "spot role": lambda: _role(account),
        "instance profiles": lambda: _profiles(account, cloud),
        "image": lambda: _image(account, cloud.image),
        "spot quota": lambda: _quota(account, "standard", "spot"),
        "on-demand quota": lambda: _quota(account, "standard", "on-demand"),
    }
    for families in quotas.GPU_QUOTAS if gpu else ():
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
        text = messages.get(code_of(error))
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
    if not images.in_ecr(image):
        return True, f"{image} (in a registry that cannot be checked from here)"
    if not images.exists(account, image):
        return False, f"cloud.image: there is no {image}; push it, or name another"
    return True, image


def _quota(account: Account, families: str, market: str) -> tuple[bool, str]:
    vcpus = quotas.vcpus_allowed(account, families, market)
    code = quotas.QUOTAS[families][1][market]
    return vcpus > 0, f"{vcpus} vCPUs" + ("" if vcpus else f"; ask for more under Service Quotas, {code}")
