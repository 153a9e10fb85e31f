"""Read a recorded trace of nodes that come and go, such as the g4dn trace of Bamboo (NSDI'23)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from idletrain.errors import JobError


@dataclass(frozen=True, slots=True)
class TraceChange:
    """A line of a trace: a node appears or disappears."""

    at_ms: int
    node: str
    present: bool


def read_trace(text: str) -> tuple[TraceChange, ...]:
    """Parse lines of `milliseconds,add|remove,node`.

    Raises:
        JobError: a line is something else.
    """
    changes = []
    for number, line in enumerate(text.splitlines(), 1):
        match [part.strip() for part in line.split(",")]:
            case [at, "add" | "remove" as verb, node] if re.fullmatch(r"[0-9]{1,15}", at) and node:
                changes.append(TraceChange(int(at), node, verb == "add"))
            case [""]:
                continue
            case _:
                raise JobError(f"--trace: line {number} is {line[:100]!r}; write lines such as 480000,add,node1")
    return tuple(sorted(changes, key=lambda change: change.at_ms))


def check_trace(changes: Sequence[TraceChange]) -> None:
    """Check that each node of a trace comes before it goes, and goes before it comes again.

    Raises:
        JobError: one does not.
    """
    here: set[str] = set()
    for change in changes:
        if change.present == (change.node in here):
            what = "comes twice without going" if change.present else "goes without having come"
            raise JobError(f"--trace: {change.node} {what} at {change.at_ms} ms; leave that line out")
        here ^= {change.node}
