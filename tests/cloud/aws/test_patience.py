"""A request that is refused for a moment is repeated, with a line on what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from idletrain.cloud.aws.patience import Patience


def failing(*codes: str) -> Callable[[], str]:
    """A request that fails with these codes, one after the other, and then is answered."""
    left = list(codes)

    def send() -> str:
        if left:
            response: Any = {"Error": {"Code": left.pop(0), "Message": "words"}}
            raise ClientError(response, "RunInstances")
        return "answer"

    return send


def test_a_passing_refusal_is_waited_out_and_each_pause_is_announced() -> None:
    lines: list[str] = []
    send = failing("RequestLimitExceeded", "InvalidLaunchTemplateId.NotFound")
    assert Patience(lines.append).request(send) == "answer"
    assert [line.split(";")[0] for line in lines] == [
        "waiting: AWS refuses RunInstances: RequestLimitExceeded: words",
        "waiting: AWS refuses RunInstances: InvalidLaunchTemplateId.NotFound: words",
    ]
    assert "asked again in" in lines[0]


def test_what_is_meant_is_raised_at_once() -> None:
    lines: list[str] = []
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        Patience(lines.append).request(failing("UnauthorizedOperation"))
    assert lines == []


def test_patience_has_an_end() -> None:
    lines: list[str] = []
    with pytest.raises(ClientError, match="RequestLimitExceeded"):
        Patience(lines.append, seconds=0.2).request(failing(*["RequestLimitExceeded"] * 9))
    assert 1 <= len(lines) < 9
