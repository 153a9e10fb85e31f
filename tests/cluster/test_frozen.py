"""A worker that sends nothing is ended, and no other."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from idletrain.cluster import frozen
from idletrain.cluster.known_workers import SeenWorker

from .test_local import fleet


def test_a_worker_that_sends_nothing_for_a_minute_is_killed_whatever_the_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "FROZEN_POLL_SECONDS", 0.01)
    monkeypatch.setattr(frozen, "FROZEN_SECONDS", 0.3)
    records: list[dict[str, str]] = []

    async def check() -> None:
        async with fleet(tmp_path / "logs") as nodes:
            silent, lively = nodes.start(2)
            await asyncio.to_thread(nodes.pid, silent)  # it has started, so that a signal reaches it at once
            clock = itertools.count(1e9, -3600.0)  # it is set back at every sign of life

            async def known() -> list[SeenWorker]:
                lasting = [SeenWorker(silent, "tcp://a", 5.0), SeenWorker("another's", "tcp://c", 5.0)]
                return [SeenWorker(lively, "tcp://b", next(clock)), *lasting]

            watching = asyncio.ensure_future(
                frozen.end_frozen(nodes, known, lambda _, **fields: records.append(fields))
            )
            started = time.monotonic()
            while silent in nodes.alive():
                await asyncio.sleep(0.01)
            assert time.monotonic() - started >= 0.3
            await asyncio.sleep(0.5)
            watching.cancel()
            assert nodes.alive() == {lively}

    asyncio.run(check())
    assert [(r["worker"], r["name"][:5], r["cause"]) for r in records] == [("tcp://a", "local", "frozen")]
