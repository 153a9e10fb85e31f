"""Read EC2's instance metadata service (IMDSv2) on a machine: its id, its tags and its interruption notices.

See AWS, "Instance metadata and user data" and "Spot Instance interruption notices".
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request

from idletrain.cloud.account import Announcement, NoMetadataError
from idletrain.cloud.aws.account import Account

ADDRESS = "http://169.254.169.254"
METADATA_TIMEOUT_SECONDS = 2.0  # it is a hop away; aws-node-termination-handler waits as long
TOKEN_SECONDS = 21600  # the longest that IMDSv2 allows
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # its address is this machine's own


class Metadata:
    """A client of the service, which reuses its token between calls.

    Args:
        address: Base address of the service; None for AWS_EC2_METADATA_SERVICE_ENDPOINT if set, else AWS' own.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = (address or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or ADDRESS).rstrip("/")
        self._token = ""

    def instance_id(self) -> str:
        """Return this machine's id, `i-...`."""
        return self._required("instance-id")

    def private_address(self) -> str:
        """Return its address within the VPC."""
        return self._required("local-ipv4")

    def region(self) -> str:
        """Return its region, such as `eu-west-1`."""
        return self._required("placement/region")

    def account(self) -> Account:
        """Return the account that it belongs to, with the rights of its instance profile."""
        return Account(self.region())

    def tags(self) -> dict[str, str]:
        """Return its tags; they need `InstanceMetadataTags` in the launch request."""
        return {key: self._required(f"tags/instance/{key}") for key in self._required("tags/instance").split()}

    def announced(self) -> Announcement:
        """Return what is announced now: nothing in the ordinary case.

        Raises:
            NoMetadataError: the service does not answer.
        """
        action = self._get("spot/instance-action")
        requested = self._get("tags/instance/idletrain:interrupt")
        reclaimed = action is not None and _action_in(action) in ("terminate", "stop", "hibernate")
        return Announcement(
            reclaimed or requested is not None, self._get("events/recommendations/rebalance") is not None
        )

    def _required(self, path: str) -> str:
        text = self._get(path)
        if text is None:
            raise NoMetadataError(f"the instance metadata service has no {path}")
        return text

    def _get(self, path: str) -> str | None:
        """Return the text below `meta-data/`, or None where there is none; renew an expired token once."""
        for last in (False, True):
            self._token = self._token or self._new_token()
            try:
                return self._fetch(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code == http.HTTPStatus.NOT_FOUND:
                    return None
                if error.code != http.HTTPStatus.UNAUTHORIZED or last:
                    raise NoMetadataError(f"{path}: {error}") from None
                self._token = ""
        raise AssertionError("unreachable")

    def _new_token(self) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        try:
            return self._fetch("/latest/api/token", lifetime, method="PUT")
        except urllib.error.HTTPError as error:
            raise NoMetadataError(f"no token: {error}") from None

    def _fetch(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._address + path, headers=headers, method=method)  # noqa: S310
        try:
            with _DIRECT.open(request, timeout=METADATA_TIMEOUT_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoMetadataError(f"{self._address} does not answer ({error}); is this an EC2 instance?") from None


def _action_in(notice: str) -> str:
    """Return the action of an interruption notice."""
    try:
        return str(json.loads(notice)["action"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise NoMetadataError(f"the interruption notice cannot be read ({error})") from None
