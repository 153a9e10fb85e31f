"""Stop and follow a run that another process of this machine trains."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from idletrain.errors import RunError
from idletrain.held_interrupts import notice_if_slow
from idletrain.observe.records import Sink, parse
from idletrain.storage import head_of

POLL_SECONDS = 0.2
END_SECONDS = 60.0  # that a head may take for its last snapshot


def stop_here(run_dir: Path, process: int) -> None:
    """Stop the process that trains a run, as Ctrl-C in its terminal does, and wait for its end.

    Raises:
        RunError: it does not end, or belongs to another user.
    """
    try:
        os.kill(process, signal.SIGINT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise RunError(f"process {process}, which trains {run_dir}, is another user's; only they can stop it") from None
    deadline = time.monotonic() + END_SECONDS
    with notice_if_slow(f"waiting for process {process}, which keeps what it has trained"):
        while head_of(run_dir) == process:
            if time.monotonic() > deadline:
                raise RunError(f"process {process} still trains {run_dir}; kill {process} ends it at once")
            time.sleep(POLL_SECONDS)


def follow_here(run_dir: Path, sink: Sink) -> None:
    """Pass a run's events to a sink, those so far and those that come, until no process trains it.

    Raises:
        OSError: there are none.
        RunError: an idletrain of another schema wrote them.
    """
    rest = b""
    with (run_dir / "events.jsonl").open("rb") as file:
        while True:
            ended = head_of(run_dir) is None  # before what it has written is read to the end
            *lines, rest = (rest + file.read()).split(b"\n")
            for event in parse(lines):
                sink(event)
            if ended:
                return
            time.sleep(POLL_SECONDS)
