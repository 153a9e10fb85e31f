"""python -m idletrain.cloud.sandbox: a rehearsal cloud on loopback, until its input is closed or it is told to end.

It says where it is in one line of JSON, which is the only line on its standard output.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idletrain.cloud.sandbox.reclaims import PeriodicReclaims, ReclaimPolicy, read_trace
from idletrain.cluster.shutdown import when_parent_ends
from idletrain.errors import IdletrainError, JobError, RunError
from idletrain.job import parse_bytes, parse_seconds


def serve(arguments: argparse.Namespace) -> None:
    """Run a cloud until our input ends or we are told to."""
    trace = read_trace(_read(arguments.trace)) if arguments.trace else ()
    if importlib.util.find_spec("moto") is None:
        raise RunError("the rehearsal cloud needs moto; install it by `pip install 'idletrain[sandbox]'`")
    gc.disable()  # moto makes a million objects that stay: without looking for garbage it starts in 3/4 of the time
    from idletrain.cloud.sandbox.cloud import RehearsalCloud, RehearsalSettings
    from idletrain.cloud.sandbox.instances import REGION

    gc.freeze()
    gc.enable()
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    when_parent_ends(ending.set)
    turns = PeriodicReclaims(every_seconds=arguments.churn, next_at=arguments.churn) if arguments.churn else None
    market = ReclaimPolicy(periodic=turns, trace=trace, speed=arguments.speed)
    cloud = RehearsalCloud(
        RehearsalSettings(
            memory_bytes=arguments.memory,
            market=market,
            notice_seconds=arguments.notice,
            logs=arguments.logs,
            port=arguments.port,
        )
    )
    sys.stdout.write(json.dumps({"endpoint": cloud.endpoint, "region": REGION}) + "\n")
    sys.stdout.flush()
    ending.wait()
    cloud.close()


def main(arguments: Sequence[str]) -> int:
    """Run the program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m idletrain.cloud.sandbox", description=__doc__)
    parser.add_argument("--churn", type=_of(parse_seconds), help="take a spot instance back every so often")
    parser.add_argument("--notice", type=_of(parse_seconds), default=120.0, help="from a notice to the end (120s)")
    parser.add_argument("--trace", type=Path, help="a recorded market: lines of milliseconds,add|remove,node")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than recorded")
    parser.add_argument("--memory", type=_of(parse_bytes), default="2GiB", help="RAM of a machine (2GiB)")
    parser.add_argument("--logs", type=Path, help="directory for the machines' output")
    parser.add_argument("--port", type=int, default=0, help="of the endpoint (any)")
    try:
        serve(parser.parse_args(arguments))
    except IdletrainError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _read(trace: Path) -> str:
    try:
        return trace.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--trace: {trace} cannot be read ({error}); name a CSV file") from None


def _of(parse: Callable[[Any], Any]) -> Callable[[str], Any]:
    """A parser whose complaint argparse repeats word for word."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # all is closed; to free moto's catalogues would take a second
