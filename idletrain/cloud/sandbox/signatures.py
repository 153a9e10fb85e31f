"""Check who calls: every request carries an AWS signature (SigV4) by keys that this sandbox made.

botocore, which signs, also recomputes: the signature covers method, path, query, the signed headers and the body's
SHA-256. See AWS, "Create a signed AWS API request".
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

LONGEST_SKEW_SECONDS = 900.0  # AWS takes 15 minutes, too
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(\w{1,128})/(\d{8})/([\w-]{1,64})/([\w-]{1,64})/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;_-]{1,4096}), ?Signature=([0-9a-f]{64})",
    re.ASCII,
)
DATE, SHA256, TOKEN = "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"
DATE_FORMAT = "%Y%m%dT%H%M%SZ"


class SignatureError(Exception):
    """A request is not signed, or not by the keys of this sandbox.

    Attributes:
        code: AWS' error code.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """An access key; no `repr`, so that no log ever shows the secret."""

    id: str
    secret: str
    token: str = ""
    """The session token of temporary keys, which a machine has; empty for the owner's."""


def owner_keys() -> Keys:
    """Return new keys for the user who runs the sandbox."""
    return Keys("AKIA" + _random_id(), secrets.token_urlsafe(30))


def machine_keys() -> Keys:
    """Return new temporary keys for a machine."""
    return Keys("ASIA" + _random_id(), secrets.token_urlsafe(30), secrets.token_urlsafe(96))


def _random_id() -> str:
    return base64.b32encode(secrets.token_bytes(10)).decode()  # 16 characters, 80 bits


@dataclass(frozen=True, slots=True)
class Claim:
    """The parts of an `Authorization` header."""

    key_id: str
    day: str
    region: str
    service: str
    signed: tuple[str, ...]
    """The signed headers' names, in lower case."""
    signature: str


def claim_of(headers: Mapping[str, str]) -> Claim:
    """Read the `Authorization` header of a request.

    Args:
        headers: The request's headers, by lower-case name.

    Raises:
        SignatureError: there is none, or it is no SigV4 over host and date.
    """
    match = AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if match is None:
        raise SignatureError("MissingAuthenticationToken", "the request has no AWS signature (SigV4) in its header")
    key_id, day, region, service, signed, signature = match.groups()
    names = tuple(signed.split(";"))
    if not {"host", DATE} <= set(names) or any(name not in headers for name in names):
        raise SignatureError("IncompleteSignature", f"the signature should cover host, {DATE} and nothing absent")
    return Claim(key_id, day, region, service, names, signature)


def keys_of(claim: Claim, headers: Mapping[str, str], known: Mapping[str, Keys], now: float) -> Keys:
    """Return the keys that a request says it was signed with.

    Args:
        claim: Its claim.
        headers: Its headers, by lower-case name.
        known: The sandbox's keys by their id.
        now: Unix seconds.

    Raises:
        SignatureError: the keys are not the sandbox's, or the date is not about now.
    """
    keys = known.get(claim.key_id)
    if keys is None or not _equal(headers.get(TOKEN, ""), keys.token):
        raise SignatureError("InvalidClientTokenId", "these keys are another rehearsal cloud's; use its own")
    try:
        at = datetime.datetime.strptime(headers[DATE], DATE_FORMAT).replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        raise SignatureError("IncompleteSignature", f"{DATE} should be a time such as 20260101T000000Z") from None
    if abs(now - at) > LONGEST_SKEW_SECONDS or not headers[DATE].startswith(claim.day):
        raise SignatureError("RequestExpired", "the request was signed more than 15 minutes from now; sign it anew")
    return keys


def check(claim: Claim, keys: Keys, method: str, url: str, headers: Mapping[str, str], body: bytes) -> None:
    """Recompute a request's signature and compare.

    Args:
        claim: The request's claim.
        keys: The keys it names.
        method: Its method.
        url: Its whole address, with path and query as they came.
        headers: Its headers, by lower-case name.
        body: Its content.

    Raises:
        SignatureError: the signature is of other keys or of another request, or does not cover the body.
    """
    if SHA256 in headers and not _equal(headers[SHA256], hashlib.sha256(body).hexdigest()):
        raise SignatureError("XAmzContentSHA256Mismatch", f"{SHA256} is not the SHA-256 of the body; sign the body")
    signed = {name: headers[name] for name in claim.signed}
    request = AWSRequest(method=method, url=url, headers=signed, data=body)
    request.context["timestamp"] = headers[DATE]
    signer = _signer(keys, claim.service, claim.region)
    expected = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    if not _equal(expected, claim.signature):
        raise SignatureError("SignatureDoesNotMatch", "the request was signed by other keys, or changed after that")


def sign(keys: Keys, method: str, url: str, body: bytes, region: str) -> dict[str, str]:
    """Return the headers of a request to the sandbox's control, signed for the service `sandbox`."""
    request = AWSRequest(method=method, url=url, data=body)
    _signer(keys, "sandbox", region).add_auth(request)
    return dict(request.headers.items())


def _signer(keys: Keys, service: str, region: str) -> SigV4Auth:
    kind = S3SigV4Auth if service == "s3" else SigV4Auth  # S3 signs its paths as they are
    return kind(Credentials(keys.id, keys.secret, keys.token or None), service, region)


def _equal(one: str, other: str) -> bool:
    """Compare in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
