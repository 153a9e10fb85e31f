"""Run a rehearsal cloud on loopback until its input is closed or it gets a signal: python -m idletrain.cloud.sandbox.

It prints its endpoint and its owner's keys as one line of JSON, which is the only line on its standard output.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idletrain.cloud.sandbox.reclaims import PeriodicReclaims, ReclaimPolicy
from idletrain.cluster.shutdown import when_parent_ends
from idletrain.errors import IdletrainError, JobError
from idletrain.quantities import parse_bytes, parse_seconds
from idletrain.simulation.trace import read_trace


def serve(arguments: argparse.Namespace) -> None:
    """Run a cloud until standard input ends or a SIGTERM or SIGINT arrives."""
    trace = read_trace(_read(arguments.trace)) if arguments.trace else ()
    from idletrain.cloud.sandbox import machines

    parent = machines.warm_up()  # while moto is imported
    gc.disable()  # moto creates a million lasting objects: without garbage collection it starts in 3/4 of the time
    from idletrain.cloud.sandbox.cloud import RehearsalCloud, RehearsalSettings
    from idletrain.cloud.sandbox.instances import REGION

    gc.freeze()
    gc.enable()
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    when_parent_ends(ending.set)
    periodic = PeriodicReclaims(every_seconds=arguments.churn, next_at=arguments.churn) if arguments.churn else None
    market = ReclaimPolicy(periodic=periodic, trace=trace, speed=arguments.speed)
    cloud = RehearsalCloud(
        RehearsalSettings(
            memory_bytes=arguments.memory,
            market=market,
            notice_seconds=arguments.notice,
            logs=arguments.logs,
            port=arguments.port,
        ),
        parent,
    )
    keys = {"access_key_id": cloud.owner.id, "secret_access_key": cloud.owner.secret}
    sys.stdout.write(json.dumps({"endpoint": cloud.endpoint, "region": REGION, **keys}) + "\n")
    sys.stdout.flush()
    ending.wait()
    cloud.close()
    parent.close()


def main(arguments: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m idletrain.cloud.sandbox", description=__doc__)
    parser.add_argument("--churn", type=_of(parse_seconds), help="reclaim a spot instance at this interval")
    parser.add_argument("--notice", type=_of(parse_seconds), default=120.0, help="time from a notice to the end (120s)")
    parser.add_argument("--trace", type=Path, help="CSV file of recorded reclaims: milliseconds,add|remove,node")
    parser.add_argument("--speed", type=float, default=1.0, help="replay the trace this many times faster (1)")
    parser.add_argument("--memory", type=_of(parse_bytes), default="2GiB", help="RAM of a machine (2GiB)")
    parser.add_argument("--logs", type=Path, help="directory for the machines' output")
    parser.add_argument("--port", type=int, default=0, help="port of the endpoint (any free one)")
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
    """Wrap a parser so that argparse prints its error message unchanged."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # everything is closed; freeing moto's tables would take a second
