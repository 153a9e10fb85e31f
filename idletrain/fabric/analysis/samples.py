"""What was measured of a fabric: raw samples, as they lie in its JSON file. Pure.

Nodes are numbers, in the order of `Fabric.nodes`; seconds and bytes are plain, rates bytes per second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from idletrain.errors import JobError

FABRIC_SCHEMA = 2
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """Samples of one node talking to another.

    Attributes:
        what: `round trip` (seconds, a sample a ping), `one way` (a sample a slice of time or a transfer), `both ways`
            (the same while as much goes back), `flows` and `incast` (a sample a connection, all at once).
        over: `socket`, `dask`, `dask tls`, or idletrain's own `pull` and `push` (to and from the target's store).
        source: Who sends; of an incast the first of the senders.
        target: Who receives.
        flows: Connections at once.
        cpu_seconds: Of both ends' processes, for all of the bytes.
    """

    what: str
    transport: str
    source: int
    target: int
    samples: tuple[float, ...]
    flows: int = 1
    moved_bytes: int = 0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class CollectiveSample:
    """Samples of one operation of all nodes; a sample is the slowest node's.

    Attributes:
        moved_bytes: The size by nccl-tests' definition: the whole buffer, gathered or to be scattered.
    """

    backend: str
    operation: str
    nodes: int
    moved_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class TrainingSample:
    """Samples of data-parallel steps of one network; a sample is the slowest node's.

    Attributes:
        batch_size: Of each node.
        compute: A step without any exchange, all nodes at once.
        communicate: The exchange of the same buckets alone.
        step: A step of DistributedDataParallel.
    """

    backend: str
    model: str
    nodes: int
    batch_size: int
    gradient_bytes: int
    buckets: tuple[int, ...]
    compute: tuple[float, ...]
    communicate: tuple[float, ...] = ()
    step: tuple[float, ...] = ()


@dataclass(frozen=True)
class StencilSample:
    """Samples of steps of a 7-point stencil on a 3-D grid that is cut among the nodes; a sample is the slowest node's.

    Attributes:
        scaling: `strong` (the same grid for any number of nodes) or `weak` (the same block for each).
        blocking: Whether the halo is waited for before anything is computed.
        cells: Of the whole grid.
        halo: The exchange of the faces alone.
    """

    backend: str
    scaling: str
    blocking: bool
    nodes: int
    cells: int
    compute: tuple[float, ...]
    halo: tuple[float, ...]
    step: tuple[float, ...]


@dataclass(frozen=True)
class Fabric:
    """One measurement of a set of nodes.

    Attributes:
        about: When, by what version and preset, in how many seconds.
        nodes: What each node tells of itself (`fabric.measuring.inventory.describe`), with its `name`.
        faults: What does not work, a sentence each.
        missing: What was not measured and why, a sentence each.
    """

    about: Mapping[str, Any]
    nodes: Sequence[Mapping[str, Any]]
    points: Sequence[Point] = ()
    collectives: Sequence[CollectiveSample] = ()
    training: Sequence[TrainingSample] = ()
    stencil: Sequence[StencilSample] = ()
    faults: Sequence[str] = field(default=())
    missing: Sequence[str] = field(default=())

    def name(self, node: int) -> str:
        """A node's name."""
        return str(self.nodes[node]["name"])

    def as_json(self) -> str:
        """The whole of it."""
        return json.dumps({"schema": FABRIC_SCHEMA, **asdict(self)}, indent=1) + "\n"


def from_json(text: str | bytes, where: str) -> Fabric:
    """A fabric from its file's text.

    Raises:
        JobError: it is no such file.
    """
    try:
        tree = json.loads(text)
        if (schema := tree.pop("schema")) != FABRIC_SCHEMA:
            which = "a newer" if schema > FABRIC_SCHEMA else "an older"
            raise JobError(f"{where} was written by {which} idletrain; measure again, or use that version")
        lists = {"points": Point, "collectives": CollectiveSample, "training": TrainingSample, "stencil": StencilSample}
        return Fabric(**{key: [_record(lists[key], r) for r in v] if key in lists else v for key, v in tree.items()})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise JobError(f"{where} is no file of idletrain fabric; measure again with --out {where}") from None


def _record(kind: type[T], values: Mapping[str, Any]) -> T:
    """A record whose lists are tuples again."""
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})
