"""A wall clock that is set back stops neither Dask's messages nor its periodic work."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOUR_SECONDS = 3600
PROGRAM = f"""
import asyncio, sys, time

shift, real = 0.0, time.time
time.time = lambda: real() + shift  # before anything binds it

from distributed.batched import BatchedSend
from distributed.comm import connect, listen
from tornado.ioloop import IOLoop, PeriodicCallback

from idletrain.cluster import dask_settings

received, ticks = [], []


async def keep(comm):
    while True:
        received.extend(await comm.read())


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def main():
    global shift
    if "steady" in sys.argv:
        dask_settings.apply()
    async with listen("tcp://127.0.0.1:0", keep) as listener:
        comm = await connect(listener.contact_address)
        sender = BatchedSend(interval="500ms", loop=IOLoop.current())
        sender.start(comm)
        ticking = PeriodicCallback(lambda: ticks.append(time.monotonic()), 50)
        ticking.start()
        sender.send("sent before")
        await until(lambda: received and ticks)
        shift = -{HOUR_SECONDS}
        sender.send("sent after")
        before = len(ticks)
        if "ticks" in sys.argv:
            await until(lambda: len(ticks) >= before + 5)
        else:
            await until(lambda: received == ["sent before", "sent after"])
        print("went on", flush=True)


asyncio.run(main())
"""


def run(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("what", ["ticks", "messages"])
def test_they_go_on_when_the_clock_is_set_back(what: str) -> None:
    assert run("steady", what) == "went on\n"


@pytest.mark.parametrize("what", ["ticks", "messages"])
def test_with_dask_s_own_clock_they_wait(what: str) -> None:
    """Which says that this module is still needed."""
    assert "TimeoutError" in run(what)
