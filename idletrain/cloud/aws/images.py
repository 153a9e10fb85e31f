"""Look up container images in Amazon's own registry: whether they are there, and what their tags stand for now."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from idletrain.cloud.aws.clients import Clients
from idletrain.cloud.aws.errors import code_of, explained
from idletrain.cloud.aws.user_data import REGISTRY

DIGEST = "@sha256:"


def in_ecr(image: str) -> bool:
    """Return True if an image is in Amazon's registry, which can be asked about it."""
    return REGISTRY in image.partition("/")[0]


def exists(clients: Clients, image: str) -> bool:
    """Return True if Amazon's registry has an image."""
    return _described(clients, image) is not None


def pinned(clients: Clients, image: str) -> str:
    """Return an image by its digest: all machines of a run, whenever they boot, then run the same bytes.

    An image of another registry is returned as it is.

    Raises:
        RunError: AWS refuses.
    """
    if DIGEST in image or not in_ecr(image):
        return image
    with explained():
        described = _described(clients, image)
    if described is None:
        return image
    host, _, rest = image.partition("/")
    return f"{host}/{rest.partition(':')[0]}@{described['imageDigest']}"


def _described(clients: Clients, image: str) -> dict[str, Any] | None:
    """Return what Amazon's registry says about an image, or None if it has none such."""
    host, _, rest = image.partition("/")
    name, at, digest = rest.partition("@")
    name, _, label = name.partition(":")
    wanted = {"imageDigest": digest} if at else {"imageTag": label or "latest"}
    try:
        answer = clients.client("ecr", host.split(".")[3]).describe_images(repositoryName=name, imageIds=[wanted])
    except ClientError as error:
        if "NotFound" not in code_of(error):
            raise
        return None
    details: dict[str, Any] = answer["imageDetails"][0]
    return details
