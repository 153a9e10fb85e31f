"""Local nodes can be started, warned, killed and asked for, in any order and more than once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from idletrain.fleet.local import LocalFleet


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
