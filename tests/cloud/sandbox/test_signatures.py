"""A signature is the caller's proof: of these keys, of this request, of now."""

from __future__ import annotations

import time
from typing import Any

import pytest

from idletrain.cloud.sandbox.signatures import (
    Keys,
    SignatureError,
    check,
    claim_of,
    keys_of,
    machine_keys,
    owner_keys,
    sign,
)

KEYS, URL = owner_keys(), "http://127.0.0.1:9/a%20b/c?x=1&y"
BODY = b"Action=RunInstances"


def received(keys: Keys = KEYS, **changed: str) -> dict[str, str]:
    """The headers of a signed request as a server sees them, some changed."""
    headers = {name.lower(): value for name, value in sign(keys, "POST", URL, BODY, "eu-west-1").items()}
    return {**headers, "host": "127.0.0.1:9", **changed}


def verdict(
    headers: dict[str, str], method: str = "POST", url: str = URL, body: bytes = BODY, now: float | None = None
) -> str:
    """The error code that a request meets, or nothing."""
    try:
        claim = claim_of(headers)
        keys = keys_of(claim, headers, {KEYS.id: KEYS}, time.time() if now is None else now)
        check(claim, keys, method, url, headers, body)
    except SignatureError as error:
        return error.code
    return ""


def test_what_is_signed_by_our_keys_passes() -> None:
    assert verdict(received()) == ""


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"body": BODY + b"&Count=9"}, "SignatureDoesNotMatch"),
        ({"body": b""}, "SignatureDoesNotMatch"),
        ({"method": "GET"}, "SignatureDoesNotMatch"),
        ({"url": URL + "z"}, "SignatureDoesNotMatch"),
        ({"url": URL.replace("a%20b", "other")}, "SignatureDoesNotMatch"),
    ],
)
def test_another_request_or_another_time_is_refused(change: dict[str, Any], code: str) -> None:
    assert verdict(received(), **change) == code


@pytest.mark.parametrize(
    ("seconds", "code"), [(-910, "RequestExpired"), (-880, ""), (880, ""), (910, "RequestExpired")]
)
def test_a_clock_may_be_wrong_by_a_quarter_of_an_hour(seconds: int, code: str) -> None:
    assert verdict(received(), now=time.time() + seconds) == code


def test_other_keys_are_refused_under_their_own_name_and_under_ours() -> None:
    assert verdict(received(owner_keys())) == "InvalidClientTokenId"
    assert verdict(received(Keys(KEYS.id, "guessed"))) == "SignatureDoesNotMatch"


def test_temporary_keys_need_their_token() -> None:
    keys = machine_keys()
    headers = received(keys)
    claim = claim_of(headers)
    assert "x-amz-security-token" in claim.signed
    known = {keys.id: keys}
    assert keys_of(claim, headers, known, time.time()) is keys
    for token in ("", "other", keys.token + "x"):
        with pytest.raises(SignatureError):
            keys_of(claim, {**headers, "x-amz-security-token": token}, known, time.time())


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Basic eDp5",
        "AWS4-HMAC-SHA256",
        "AWS4-HMAC-SHA256 Credential=a/b",
        "AWS4-HMAC-SHA256 Credential=/20260101/r/s/aws4_request, SignedHeaders=host;x-amz-date, Signature=" + "0" * 64,
        "AWS4-HMAC-SHA256 Credential=A/20260101/r/s/aws4_request, SignedHeaders=host, Signature=" + "0" * 64,
        "AWS4-HMAC-SHA256 Credential=A/20260101/r/s/aws4_request, SignedHeaders=host;x-amz-date;no, Signature="
        + "0" * 64,
        "AWS4-HMAC-SHA256 Credential=A/20260101/r/s/aws4_request, SignedHeaders=host;x-amz-date, Signature=é",
        "x" * 100_000,
    ],
)
def test_what_is_no_whole_signature_is_refused(authorization: str) -> None:
    with pytest.raises(SignatureError):
        claim_of(received(authorization=authorization))


@pytest.mark.parametrize("date", ["", "now", "20260101T000000", "99999999T999999Z", "é"])
def test_a_date_that_is_none_is_refused(date: str) -> None:
    assert verdict(received(**{"x-amz-date": date})) == "IncompleteSignature"


@pytest.mark.parametrize("hashed", ["UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "0" * 64])
def test_a_body_that_is_not_signed_is_refused(hashed: str) -> None:
    assert verdict(received(**{"x-amz-content-sha256": hashed})) == "XAmzContentSHA256Mismatch"


def test_no_log_shows_a_secret() -> None:
    assert KEYS.secret not in f"{KEYS} {KEYS!r}"
