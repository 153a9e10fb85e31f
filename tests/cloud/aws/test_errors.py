"""What helps against each error, and the sentence that it becomes."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    MetadataRetrievalError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)
from botocore.httpsession import ConnectionClosedError
from botocore.parsers import ResponseParserError

from idletrain.cloud.aws.errors import ErrorKind, error_kind, explained, required, sentence_of
from idletrain.errors import JobError, RunError

URL = "https://ec2.eu-west-1.amazonaws.com"


def answered(code: str, status: int, message: str = "words") -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "CreateFleet")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # No answer, or none that is AWS'.
        (EndpointConnectionError(endpoint_url=URL), ErrorKind.PASSING),
        (ConnectTimeoutError(endpoint_url=URL), ErrorKind.PASSING),
        (ReadTimeoutError(endpoint_url=URL), ErrorKind.PASSING),
        (ConnectionClosedError(endpoint_url=URL), ErrorKind.PASSING),
        (ProxyConnectionError(proxy_url="http://proxy"), ErrorKind.PASSING),
        (SSLError(endpoint_url=URL, error="expired"), ErrorKind.PASSING),
        (ResponseParserError("Unable to parse response, invalid XML received"), ErrorKind.PASSING),
        (ClientError({}, "CreateFleet"), ErrorKind.PASSING),
        (ClientError({"Error": {"Message": "words"}}, "CreateFleet"), ErrorKind.PASSING),
        (NoCredentialsError(), ErrorKind.PASSING),
        (CredentialRetrievalError(provider="iam-role", error_msg="late"), ErrorKind.PASSING),
        (MetadataRetrievalError(error_msg="late"), ErrorKind.PASSING),
        # A balancer's bare number, server errors of any name, throttling under each of its names.
        (answered("503", 503), ErrorKind.PASSING),
        (answered("502", 502), ErrorKind.PASSING),
        (answered("InternalError", 500), ErrorKind.PASSING),
        (answered("NobodyKnowsThisError", 500), ErrorKind.PASSING),
        (answered("RequestLimitExceeded", 503), ErrorKind.PASSING),
        (answered("ThrottlingException", 400), ErrorKind.PASSING),
        (answered("EC2ThrottledException", 400), ErrorKind.PASSING),
        (answered("429", 429), ErrorKind.PASSING),
        (answered("408", 408), ErrorKind.PASSING),
        (answered("RequestExpired", 400), ErrorKind.PASSING),
        (answered("ExpiredToken", 403), ErrorKind.PASSING),
        (answered("ExpiredTokenException", 400), ErrorKind.PASSING),
        # Pools, of which some arrive as server errors.
        (answered("InsufficientInstanceCapacity", 500), ErrorKind.CAPACITY),
        (answered("InsufficientHostCapacity", 500), ErrorKind.CAPACITY),
        (answered("UnfulfillableCapacity", 400), ErrorKind.CAPACITY),
        (answered("InsufficientFreeAddressesInSubnet", 400), ErrorKind.CAPACITY),
        (answered("Unsupported", 400), ErrorKind.CAPACITY),
        (answered("VcpuLimitExceeded", 400), ErrorKind.QUOTA),
        (answered("MaxSpotInstanceCountExceeded", 400), ErrorKind.QUOTA),
        # Made a moment ago, or never.
        (answered("InvalidLaunchTemplateId.NotFound", 400), ErrorKind.ABSENT),
        (answered("InvalidLaunchTemplateName.NotFoundException", 400), ErrorKind.ABSENT),
        (answered("InvalidGroup.NotFound", 400), ErrorKind.ABSENT),
        (answered("InvalidParameterValue", 400, "Invalid IAM Instance Profile name"), ErrorKind.ABSENT),
        # Meant as they are.
        (answered("UnauthorizedOperation", 403), ErrorKind.REFUSED),
        (answered("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403), ErrorKind.REFUSED),
        (answered("InvalidParameterValue", 400), ErrorKind.REFUSED),
        (answered("IdempotentParameterMismatch", 400), ErrorKind.REFUSED),
        (answered("NobodyKnowsThisError", 400), ErrorKind.REFUSED),
        (ParamValidationError(report="a body of ours"), ErrorKind.REFUSED),
    ],
)
def test_every_error_has_a_kind(error: Exception, kind: ErrorKind) -> None:
    assert error_kind(error) is kind


@pytest.mark.parametrize(
    ("error", "kind", "arguments"),
    [
        (NoCredentialsError(), JobError, "no credentials; run `aws configure`"),
        (NoRegionError(), JobError, "cloud.region: no region is set"),
        (answered("Odd", 400), RunError, "AWS refuses CreateFleet: Odd: words; `idletrain doctor`"),
        (ClientError({}, "CreateFleet"), RunError, "AWS is not what answers CreateFleet: it refuses without a code;"),
        (EndpointConnectionError(endpoint_url=URL), RunError, "AWS cannot be reached: Could not connect .*; check"),
        (ResponseParserError("Unable to parse, invalid XML: <html>"), RunError, "not what answers: Unable to parse;"),
    ],
)
def test_errors_are_one_sentence(error: Exception, kind: type[Exception], arguments: str) -> None:
    with pytest.raises(kind, match=arguments), explained():
        raise error


def test_a_page_is_not_quoted() -> None:
    error = ResponseParserError("Unable to parse response (syntax error), invalid XML received:\n<html>secret</html>")
    assert sentence_of(error) == "AWS is not what answers: Unable to parse response (syntax error)"


def test_an_answer_without_what_it_always_has_is_none() -> None:
    assert required({"Reservations": []}, "Reservations") == []
    with pytest.raises(ResponseParserError, match="the answer has no Reservations"):
        required({}, "Reservations")
