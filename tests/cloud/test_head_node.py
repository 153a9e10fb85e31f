"""A head that cannot lead its run leaves nothing of it behind; heads that lead are tested with whole runs, in chaos."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from rehearsal import Sandbox, sleeping

from idletrain.cloud import head_node, record
from idletrain.cloud.aws.account import Account
from idletrain.cloud.machines import TAG
from idletrain.cloud.record import RunRecord
from idletrain.errors import RefusedError, RunError
from idletrain.storage import S3Prefix


class Head:
    """A machine that boots as the head of a run."""

    def __init__(self, account: Account, id_: str, prefix: S3Prefix) -> None:
        self._account, self._id, self._prefix = account, id_, prefix

    def tags(self) -> dict[str, str]:
        return {TAG + "prefix": self._prefix.url}

    def account(self) -> Any:
        return self._account

    def instance_id(self) -> str:
        return self._id

    def private_address(self) -> str:
        return "127.0.0.1"


@pytest.fixture
def run(account: Account, prefix: S3Prefix) -> RunRecord:
    """A run with a group and a template, and no secrets."""
    made = replace(sleeping(account), deadline=time.time() + 3600)
    record.claim(prefix, made)
    return made


def boot(cloud: Sandbox, account: Account, prefix: S3Prefix) -> None:
    (machine,) = cloud.start("sleep 60")
    asyncio.run(head_node.serve_head(Head(account, machine, prefix)))  # type: ignore[arg-type]


def test_a_run_that_was_ended_while_its_head_booted_leaves_nothing(
    cloud: Sandbox, account: Account, prefix: S3Prefix, run: RunRecord
) -> None:
    record.update(prefix, state="ended")
    assert account.remnants(run.run) != []
    with pytest.raises(RefusedError, match="was ended before its head came up; start it again with --resume"):
        boot(cloud, account, prefix)
    assert account.remnants(run.run) == []
    assert record.read(prefix).state == "ended"


def test_a_run_whose_secrets_cannot_be_read_fails_with_the_reason_and_leaves_nothing(
    cloud: Sandbox, account: Account, prefix: S3Prefix, run: RunRecord
) -> None:
    with pytest.raises(RunError, match="ParameterNotFound"):
        boot(cloud, account, prefix)
    assert "ParameterNotFound" in record.read(prefix).failure
    assert account.remnants(run.run) == []
    assert record.read(prefix).state == "ended"
