"""Local workers can be started, warned, killed and listed, in any order and more than once."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from idletrain.cluster import local
from idletrain.cluster.local import LocalFleet


@asynccontextmanager
async def fleet(logs: Path) -> AsyncIterator[LocalFleet]:
    """A fleet whose scheduler takes connections and never answers: its workers stay and wait."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = LocalFleet(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 1 << 28, logs)
        try:
            yield made
        finally:
            await made.close()


def test_nodes_are_alive_until_they_are_stopped_and_stopping_again_is_no_error(tmp_path: Path) -> None:
    async def check() -> None:
        async with fleet(tmp_path / "logs") as nodes:
            first, second = nodes.start(2)
            assert nodes.alive() == {first, second}
            pid = nodes.pid(first)
            os.kill(pid, 0)
            nodes.stop([first, "nobody"])
            while first in nodes.alive():
                await asyncio.sleep(0.01)
            nodes.stop([first])
            nodes.notice([first, "nobody"])
            assert nodes.alive() == {second}
            (third,) = nodes.start(1)
            assert third not in (first, second)
            assert {p.stem for p in (tmp_path / "logs").iterdir()} == {first, second, third}
        assert nodes.alive() == frozenset()

    asyncio.run(check())


def test_nodes_that_end_as_soon_as_they_start_are_reported_once_with_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "REPLACE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reasons: list[str] = []

    async def check() -> None:
        async with fleet(tmp_path / "logs") as nodes:
            keeping = asyncio.ensure_future(local.keep_workers(nodes, 2, lambda _kind, reason: reasons.append(reason)))
            while len(reasons) < 2 or len(list((tmp_path / "logs").iterdir())) < 12:
                await asyncio.sleep(0.05)
            keeping.cancel()

    asyncio.run(check())
    ended, waiting = reasons
    assert ended.endswith(f"-0 was not taken, but ended by itself with exit code 1; {ended_log(tmp_path, ended)}")
    assert waiting == f"for workers: they end as soon as they start; {tmp_path}/logs says why"


def ended_log(path: Path, reason: str) -> str:
    """What a warning says of the log of the worker that it begins with."""
    return f"{path}/logs/{reason.partition(' ')[0]}.log says why, if code of the job does not"


def test_who_ended_by_itself_left_the_last_lines_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talker = tmp_path / "talker"
    talker.write_text("#!/bin/sh\nfor n in $(seq 2000); do echo line $n >&2; done\nexit 9\n")
    talker.chmod(0o700)

    async def check() -> None:
        async with fleet(tmp_path / "logs") as nodes:
            nodes.start(1)
            assert nodes.last_words() == {}
            monkeypatch.setattr(sys, "executable", str(talker))
            (failing,) = nodes.start(1)
            while failing in nodes.alive():
                await asyncio.sleep(0.01)
            last = range(2001 - local.LOG_LINES, 2001)
            assert nodes.last_words() == {failing: "\n".join(f"line {n}" for n in last)}

    asyncio.run(check())


def test_a_worker_s_own_fault_is_in_its_log(tmp_path: Path) -> None:
    async def check() -> None:
        made = LocalFleet("nowhere", 1 << 28, tmp_path / "logs", options=("--no-such-option",))
        (failing,) = made.start(1)
        while failing in made.alive():
            await asyncio.sleep(0.01)
        assert made.last_words() == {
            failing: "idletrain: No such option: --no-such-option; see idletrain worker --help"
        }

    asyncio.run(check())


def test_nodes_that_cannot_be_started_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "REPLACE_SECONDS", 0.0)
    reasons: list[str] = []

    async def check() -> None:
        async with fleet(tmp_path / "logs") as nodes:
            (tmp_path / "logs").rename(tmp_path / "moved")
            keeping = asyncio.ensure_future(local.keep_workers(nodes, 1, lambda _kind, reason: reasons.append(reason)))
            for _ in range(2):  # at first, and when one is to be replaced
                reasons.clear()
                while not reasons:
                    await asyncio.sleep(0.01)
                assert "none can be started" in reasons[0]
                assert nodes.alive() == frozenset()
                (tmp_path / "moved").rename(tmp_path / "logs")
                while not nodes.alive():
                    await asyncio.sleep(0.01)
                (tmp_path / "logs").rename(tmp_path / "moved")
                nodes.stop(nodes.alive())
            (tmp_path / "moved").rename(tmp_path / "logs")
            keeping.cancel()

    asyncio.run(check())


def test_churn_takes_the_oldest_worker_that_has_trained_and_waits_while_none_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "FLEET_POLL_SECONDS", 0.01)
    able: set[str] = set()

    async def trained() -> set[str]:
        return able

    async def check() -> None:
        async with fleet(tmp_path / "logs") as nodes:
            first, second, third = nodes.start(3)
            taking = asyncio.ensure_future(local.churn(nodes, 0.01, trained))
            await asyncio.sleep(0.3)
            assert nodes.alive() == {first, second, third}
            able.update((second, third, "nobody"))
            while {second, third} & nodes.alive():
                await asyncio.sleep(0.01)
                assert second not in nodes.alive() or third in nodes.alive()
            taking.cancel()
            assert nodes.alive() == {first}

    asyncio.run(check())
