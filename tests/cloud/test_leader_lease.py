"""One head leads a run."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time

import pytest

from idletrain.cloud import leader_lease
from idletrain.cloud.leader_lease import LeaderLease
from idletrain.errors import RefusedError
from idletrain.storage import S3Prefix


def holder(prefix: S3Prefix) -> str:
    stored = prefix.get(leader_lease.LEADER_LEASE_KEY)
    assert stored is not None
    name: str = json.loads(stored.content)["holder"]
    return name


def test_a_lease_is_taken_given_back_and_taken_by_the_next_at_once(prefix: S3Prefix) -> None:
    async def check() -> None:
        first, second = LeaderLease(prefix, "i-1"), LeaderLease(prefix, "i-2")
        await first.acquire()
        assert holder(prefix) == "i-1"
        await first.release()
        await asyncio.wait_for(second.acquire(), 5)
        assert holder(prefix) == "i-2"

    asyncio.run(check())


def test_the_lease_of_a_head_that_is_gone_can_be_taken_away_and_a_zombie_loses_it(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lease, "RENEW_SECONDS", 0.1)

    async def check() -> None:
        first, second = LeaderLease(prefix, "i-1"), LeaderLease(prefix, "i-2")
        await first.acquire()
        leader_lease.end(prefix)
        await asyncio.wait_for(second.acquire(), 5)
        with pytest.raises(RefusedError, match="another head leads the run"):
            await asyncio.wait_for(first.renew(), 5)
        assert holder(prefix) == "i-2"
        leader_lease.end(prefix)
        leader_lease.end(prefix)

    asyncio.run(check())


def test_a_lease_is_renewed_or_not_whatever_its_clock_says(prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_lease, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(leader_lease, "LEASE_POLL_SECONDS", 0.05)
    hour_ago = itertools.count(time.time() - 3600)

    def write() -> None:
        content = {"holder": "i-1", "renewed": next(hour_ago)}
        prefix.put(leader_lease.LEADER_LEASE_KEY, json.dumps(content).encode())

    assert not leader_lease.is_renewed(prefix)
    write()
    assert not leader_lease.is_renewed(prefix)
    later = threading.Timer(0.5, write)
    later.start()
    assert leader_lease.is_renewed(prefix)
    later.join()


def test_a_second_head_is_refused_while_the_first_renews(prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_lease, "RENEW_SECONDS", 0.2)

    async def check() -> None:
        first = LeaderLease(prefix, "i-1")
        await first.acquire()
        keeping = asyncio.ensure_future(first.renew())
        with pytest.raises(RefusedError, match="i-1 leads the run"):
            await LeaderLease(prefix, "i-2").acquire()
        assert not keeping.done()
        keeping.cancel()
        assert holder(prefix) == "i-1"

    asyncio.run(check())


def test_a_dead_head_s_lease_runs_out(prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_lease, "LEASE_SECONDS", 0.5)

    async def check() -> None:
        await LeaderLease(prefix, "i-1").acquire()
        await asyncio.wait_for(LeaderLease(prefix, "i-2").acquire(), 10)
        assert holder(prefix) == "i-2"

    asyncio.run(check())


def test_a_head_that_lost_its_lease_learns_it_when_it_renews(prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_lease, "LEASE_SECONDS", 0.1)
    monkeypatch.setattr(leader_lease, "RENEW_SECONDS", 0.1)

    async def check() -> None:
        first = LeaderLease(prefix, "i-1")
        await first.acquire()
        await LeaderLease(prefix, "i-2").acquire()
        with pytest.raises(RefusedError, match="leads the run"):
            await asyncio.wait_for(first.renew(), 10)

    asyncio.run(check())


def test_renewals_that_fail_or_whose_answer_is_lost_cost_no_lease(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lease, "RENEW_SECONDS", 0.05)
    put, troubles = prefix.put_if, ["before", "behind", ""]

    def flaky(key: str, content: bytes, tag: str | None) -> str:
        trouble = troubles.pop(0) if troubles else ""
        if trouble == "before":
            raise OSError("unreachable")
        new = put(key, content, tag)
        if trouble == "behind":
            raise OSError("unreachable")
        return new

    async def check() -> None:
        first = LeaderLease(prefix, "i-1")
        await first.acquire()
        monkeypatch.setattr(prefix, "put_if", flaky)
        keeping = asyncio.ensure_future(first.renew())
        while troubles:
            await asyncio.sleep(0.05)
        renewed = leader_lease.renewed(prefix)
        while leader_lease.renewed(prefix) == renewed:
            assert not keeping.done()
            await asyncio.sleep(0.05)
        keeping.cancel()
        assert holder(prefix) == "i-1"

    asyncio.run(asyncio.wait_for(check(), 20))
