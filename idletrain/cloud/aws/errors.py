"""Classify AWS' errors by what helps against them, and turn them into sentences. Pure."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 (botocore's name for all that happens before an answer)
    CredentialRetrievalError,
    HTTPClientError,
    MetadataRetrievalError,
    NoCredentialsError,
    NoRegionError,
)
from botocore.parsers import ResponseParserError
from botocore.retries.standard import RetryContext, ThrottledRetryableChecker

from idletrain.errors import JobError, UnansweredError

UNREADABLE = (ResponseParserError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What an answer that is not AWS' leads to: a page of a proxy, or fields that are missing or of another type."""
REQUEST_ERRORS = (ClientError, BotoCoreError, *UNREADABLE)
"""All that a call of a client, and reading its answer, may raise."""
# AWS did not answer, or could not be asked: a head gets its credentials from its machine, which may be late with them.
NO_ANSWER = (
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    MetadataRetrievalError,
    NoCredentialsError,
    *UNREADABLE,
)
# Errors of one pool that are not server errors (Karpenter's classes of CreateFleet errors, and AWS' "Error codes for
# the Amazon EC2 API").
POOL_CODES = frozenset(
    {
        "InsufficientFreeAddressesInSubnet",
        "InvalidFleetConfiguration",  # a type that its zone does not offer
        "SpotMaxPriceTooLow",
        "Unsupported",
    }
)
QUOTA_CODES = frozenset(
    {"InstanceLimitExceeded", "MaxFleetCountExceeded", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"}
)
# A clock that is being set, or credentials that are just being renewed: the next request is signed anew.
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
ABSENT_PROFILE = "Invalid IAM Instance Profile"  # EC2 reports it as an invalid parameter


class ErrorKind(enum.Enum):
    """A kind of error, by what helps against it."""

    CAPACITY = "another pool, or the same one in a while"
    QUOTA = "another pool, or a higher limit of the account"
    PASSING = "the same request again: AWS gave no answer, or none that it means"
    ABSENT = "the same request in a moment, if what it names was made a moment ago"
    REFUSED = "a change of the request or of the account"


def error_kind(error: Exception) -> ErrorKind:
    """Classify what a call of a client raised; what is unknown counts as refused."""
    if isinstance(error, NO_ANSWER):
        return ErrorKind.PASSING
    if not isinstance(error, ClientError):
        return ErrorKind.REFUSED
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return kind_of_answer(fault_of(error), status)


def kind_of_answer(error: Mapping[str, str], status: int = HTTPStatus.OK) -> ErrorKind:
    """Classify an error in an answer of AWS.

    Args:
        error: Its `Code` and `Message`.
        status: The answer's HTTP status; 200 for an error of one pool beside machines of others.
    """
    code, message = error["Code"], error.get("Message", "")
    if code in POOL_CODES or code.endswith("Capacity") or code == "ReservationCapacityExceeded":
        return ErrorKind.CAPACITY  # before the status, which is that of a server error
    if code in QUOTA_CODES:
        return ErrorKind.QUOTA
    if _is_passing(code, status):
        return ErrorKind.PASSING
    if "NotFound" in code or ABSENT_PROFILE in message:
        return ErrorKind.ABSENT
    return ErrorKind.REFUSED


def _is_passing(code: str, status: int) -> bool:
    throttled = RetryContext(1, parsed_response={"Error": {"Code": code}})
    return (
        status >= HTTPStatus.INTERNAL_SERVER_ERROR
        or status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        or not code
        or code in EXPIRED_CODES
        or ThrottledRetryableChecker().is_retryable(throttled)
    )


def sentence_of(error: Exception) -> str:
    """Return what AWS says in a request's error, without what to do."""
    if isinstance(error, ClientError):
        fault = fault_of(error)
        if not fault["Code"]:
            return f"AWS is not what answers {error.operation_name}: it refuses without a code"
        return "AWS refuses {}: {Code}: {Message}".format(error.operation_name, **fault)
    if isinstance(error, UNREADABLE):
        return f"AWS is not what answers: {_first_line(error)}"
    return f"AWS cannot be reached: {error}"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors of AWS into one sentence; unknown errors keep AWS' own message.

    Raises:
        JobError: there are no credentials or no region.
        UnansweredError: anything else.
    """
    try:
        yield
    except NoCredentialsError:
        raise JobError("AWS: there are no credentials; run `aws configure`, or set AWS_PROFILE") from None
    except NoRegionError:
        raise JobError("cloud.region: no region is set; name one, such as region: eu-west-1") from None
    except ClientError as error:
        raise UnansweredError(f"{sentence_of(error)}; `idletrain doctor` may say why") from None
    except BotoCoreError as error:
        raise UnansweredError(f"{sentence_of(error)}; check the network and `idletrain doctor`") from None
    except UNREADABLE as error:
        raise UnansweredError(f"{sentence_of(error)}; check the network and proxies") from None


@contextlib.contextmanager
def ignoring(codes: Collection[str]) -> Iterator[None]:
    """Ignore errors with one of these codes."""
    try:
        yield
    except ClientError as error:
        if code_of(error) not in codes:
            raise


def code_of(error: ClientError) -> str:
    """Return the code of an error."""
    return fault_of(error)["Code"]


def fault_of(error: ClientError) -> dict[str, str]:
    """Return `Code` and `Message` of an error, empty where it has none: a proxy's page may happen to be XML."""
    return {"Code": "", "Message": "", **error.response.get("Error", {})}


def required(answer: Mapping[str, Any], name: str) -> Any:
    """Return a field that AWS' answer always has; a page of a proxy that happens to be XML has none.

    Raises:
        ResponseParserError: it is missing.
    """
    if name not in answer:
        raise ResponseParserError(f"the answer has no {name}")
    return answer[name]


def _first_line(error: Exception) -> str:
    """Return what is said of an answer, without the answer itself, which may be a page."""
    if isinstance(error, LookupError):
        return f"the answer has no {error}"[:200]
    return str(error).partition("\n")[0].partition(", invalid XML")[0][:200]
