"""Create the clients of an AWS account in one region, each on first use."""

from __future__ import annotations

import functools
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import NoRegionError
from botocore.loaders import Loader, create_loader

from idletrain.cloud.aws.errors import explained

ATTEMPTS = 10  # of one request, with botocore's growing pauses: a minute and a half


class Clients:
    """Clients of AWS' services; a node needs two of them, and each takes a tenth of a second to create.

    Args:
        region: The region; None for the one of AWS' own configuration.
    """

    def __init__(self, region: str | None = None) -> None:
        with explained():
            self._session = _session(region)
            if not self._session.region_name:
                raise NoRegionError
        self.region: str = self._session.region_name

    @functools.cached_property
    def ec2(self) -> Any:
        """Client of EC2, with retries."""
        return self.client("ec2")

    @functools.cached_property
    def launcher(self) -> Any:
        """Client of EC2 that asks once: botocore takes a lack of capacity for a server error and would ask for more,
        and repeats without a word.
        """
        return self.client("ec2", attempts=1)

    @functools.cached_property
    def ssm(self) -> Any:
        """Client of the parameter store."""
        return self.client("ssm")

    @functools.cached_property
    def s3(self) -> Any:
        """Client of S3."""
        return self.client("s3")

    def client(self, service: str, region: str | None = None, attempts: int = ATTEMPTS) -> Any:
        """Create a client of a service."""
        config = Config(retries={"mode": "standard", "total_max_attempts": attempts})
        with explained():
            return self._session.client(service, region_name=region or self.region, config=config)

    @functools.cached_property
    def owner(self) -> str:
        """ARN of the identity that calls AWS."""
        with explained():
            arn: str = self.client("sts").get_caller_identity()["Arn"]
            return arn

    @property
    def number(self) -> str:
        """Number of the account."""
        return str(self.owner).split(":")[4]

    @property
    def bucket(self) -> str:
        """Name of the bucket that infra/aws creates for the account in this region."""
        return f"idletrain-{self.number}-{self.region}"


def _session(region: str | None) -> boto3.Session:
    """Open a session, which has a configuration of its own and reads no service's description a second time."""
    opened = botocore.session.get_session()
    loader = _loader(opened.get_config_variable("data_path"))
    opened.register_component("data_loader", loader)
    session = boto3.Session(botocore_session=opened, region_name=region)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # to which each session adds boto3's own
    return session


@functools.cache
def _loader(places: str | None) -> Loader:
    """Return what reads the descriptions of AWS' services and keeps them: EC2's takes a tenth of a second."""
    return create_loader(places)
