"""Serve the instance metadata service (IMDSv2) of one instance, on a loopback port of its own.

On EC2 the hypervisor knows which machine asks. Here anybody on this computer can connect, so the service is below a
secret path, which stands in the environment of the machine's processes alone. Its answers come from a function that is
called every time: tags, notices and rebalance recommendations are live.
See AWS, "Use IMDSv2" and "Instance metadata categories".
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import http.server
import json
import math
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from idletrain.cloud.sandbox.signatures import Keys

TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
LONGEST_TTL_SECONDS = 21600  # AWS takes 1 second to 6 hours
CREDENTIALS_HOURS = 6
LONGEST_BODY_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The current metadata of an instance.

    Attributes:
        tags: Its tags, or None where `InstanceMetadataTags` is not enabled.
        role: Role of its instance profile, or empty.
        taken_at: Unix seconds at which it is reclaimed, once there is a notice.
        rebalance_at: Unix seconds of a rebalance recommendation.
    """

    instance: str
    type: str
    address: str
    region: str
    zone: str
    tags: Mapping[str, str] | None
    role: str = ""
    taken_at: float | None = None
    rebalance_at: float | None = None


def answer(facts: Facts, keys: Keys, path: str, now: float) -> str | None:
    """Return the text at a path below `/latest/meta-data/`, or None where there is none."""
    texts = {
        "instance-id": facts.instance,
        "instance-type": facts.type,
        "local-ipv4": facts.address,
        "placement/region": facts.region,
        "placement/availability-zone": facts.zone,
    }
    if facts.tags is not None:
        texts["tags/instance"] = "\n".join(facts.tags)
        texts |= {f"tags/instance/{key}": value for key, value in facts.tags.items()}
    if facts.role:
        texts["iam/security-credentials"] = facts.role
        texts[f"iam/security-credentials/{facts.role}"] = json.dumps(_credentials(keys, now))
    if facts.taken_at is not None:
        texts["spot/instance-action"] = json.dumps({"action": "terminate", "time": iso(facts.taken_at)})
    if facts.rebalance_at is not None:
        texts["events/recommendations/rebalance"] = json.dumps({"noticeTime": iso(facts.rebalance_at)})
    return texts.get(path.strip("/"))


def iso(unix_seconds: float) -> str:
    """Format a time as AWS does."""
    return datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _credentials(keys: Keys, now: float) -> dict[str, str]:
    return {
        "Code": "Success",
        "LastUpdated": iso(now),
        "Type": "AWS-HMAC",
        "AccessKeyId": keys.id,
        "SecretAccessKey": keys.secret,
        "Token": keys.token,
        "Expiration": iso(now + CREDENTIALS_HOURS * 3600),
    }


class MetadataServer(socketserver.ThreadingTCPServer):
    """The service of one instance, until it is closed.

    Args:
        get_facts: Returns the instance's current metadata.
        keys: The credentials of its role.
        shut_down: Called with the seconds after which the machine wants to end: this door of the machine to its cloud
            stands in for the power button, which EC2 watches.
    """

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, get_facts: Callable[[], Facts], keys: Keys, shut_down: Callable[[float], None]) -> None:
        self.get_facts, self.keys, self.shut_down = get_facts, keys, shut_down
        self.tokens: dict[str, float] = {}
        self._secret = secrets.token_urlsafe(30)
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self._accept, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what a request broke on, but for a caller that was killed while it waited."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def endpoint(self) -> str:
        """Its base address, as `AWS_EC2_METADATA_SERVICE_ENDPOINT` takes it."""
        return f"http://{self._host}/{self._secret}"

    @property
    def _host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def path_below(self, path: str, host: str | None) -> str | None:
        """Return a request's path below the secret, `/latest/...`; None if the caller does not know the secret."""
        _, secret, rest = (path if path.count("/") > 1 else "///").split("/", 2)
        known = hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode())
        return f"/{rest}" if known and host == self._host else None

    def close(self) -> None:
        """Accept no more calls."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self.server_close()

    def _accept(self) -> None:
        # serve_forever would wake twice a second for each of a hundred instances
        with contextlib.suppress(OSError):
            while True:
                self.process_request(*self.get_request())


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetadataServer
    timeout = 10  # a caller that connects and says nothing

    def do_PUT(self) -> None:
        if self._path() != "/latest/api/token":
            return self._reply(HTTPStatus.NOT_FOUND)
        ttl = self.headers.get(TTL_HEADER, "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= LONGEST_TTL_SECONDS:
            return self._reply(HTTPStatus.BAD_REQUEST)
        token = secrets.token_urlsafe(40)
        self.server.tokens[token] = time.monotonic() + int(ttl)
        return self._reply(HTTPStatus.OK, token, {TTL_HEADER: ttl})

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return self._reply(HTTPStatus.NOT_FOUND)
        expires = self.server.tokens.get(self.headers.get(TOKEN_HEADER, ""), 0.0)
        if time.monotonic() >= expires:
            return self._reply(HTTPStatus.UNAUTHORIZED)
        if not path.startswith("/latest/meta-data/"):
            return self._reply(HTTPStatus.NOT_FOUND)
        name = unquote(path.removeprefix("/latest/meta-data/"))
        text = answer(self.server.get_facts(), self.server.keys, name, time.time())
        return self._reply(HTTPStatus.NOT_FOUND) if text is None else self._reply(HTTPStatus.OK, text)

    def do_POST(self) -> None:
        if self._path() != "/shutdown":
            return self._reply(HTTPStatus.NOT_FOUND)
        try:
            size = min(int(self.headers["Content-Length"]), LONGEST_BODY_BYTES)
            seconds = float(self.rfile.read(max(0, size)))
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            return self._reply(HTTPStatus.BAD_REQUEST)
        self.server.shut_down(seconds)
        return self._reply(HTTPStatus.OK)

    def _path(self) -> str | None:
        return self.server.path_below(self.path, self.headers.get("Host"))

    def _reply(self, status: HTTPStatus, text: str = "", headers: Mapping[str, str] | None = None) -> None:
        content = text.encode()
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""
