"""The raw samples of a fabric's measurement, as its JSON file holds them. Pure.

Nodes are numbers, in the order of `Fabric.nodes`; times are in seconds, sizes in bytes, rates in bytes per second.
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
    """Samples of the link from one node to another.

    Attributes:
        what: `round trip` (seconds, a sample a ping), `one way` (rates, a sample a slice of time or a transfer), `both
            ways` (rates while the other direction is busy, too), `flows` and `incast` (rates, a sample a connection,
            all at once).
        transport: `socket`, `dask`, `dask tls`, or idletrain's own `pull` and `push` (at the target's store).
        source: The sending node; of an incast the first of the senders.
        target: The receiving node.
        samples: Seconds or rates.
        flows: Connections at once.
        moved_bytes: Bytes of all samples together.
        cpu_seconds: CPU time of both ends' processes for all of the bytes.
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
    """Samples of one collective operation; a sample is the slowest node's time.

    Attributes:
        moved_bytes: Size by nccl-tests' definition: the whole buffer, after a gather or before a scatter.
    """

    backend: str
    operation: str
    nodes: int
    moved_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class TrainingSample:
    """Samples of data-parallel steps of one network; a sample is the slowest node's time.

    Attributes:
        batch_size: Batch size on each node.
        gradient_bytes: Bytes of all gradients.
        buckets: Bytes of each of DDP's buckets.
        compute: Seconds of a step without any exchange, on all nodes at once.
        communicate: Seconds of the exchange of the same buckets alone.
        step: Seconds of a step of DistributedDataParallel.
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
    """Samples of a 7-point stencil's steps on a 3-D grid cut among the nodes; a sample is the slowest node's time.

    Attributes:
        scaling: `strong` (the same grid for any number of nodes) or `weak` (the same block for each).
        blocking: Whether the halo is waited for before anything is computed.
        cells: Cells of the whole grid.
        compute: Seconds of the computation alone.
        halo: Seconds of the exchange of the faces alone.
        step: Seconds of a step with both.
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
        about: Date, version, preset, and length of the measurement in seconds.
        nodes: Each node's description (`fabric.measuring.inventory.describe`), with its `name`.
        faults: A sentence for each thing that does not work.
        missing: A sentence for each thing that was not measured, with the reason.
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
        """Return a node's name."""
        return str(self.nodes[node]["name"])

    def as_json(self) -> str:
        """Return the JSON text of the whole measurement."""
        return json.dumps({"schema": FABRIC_SCHEMA, **asdict(self)}, indent=1) + "\n"


def from_json(text: str | bytes, where: str) -> Fabric:
    """Read a fabric from its JSON text.

    Args:
        text: The file's content.
        where: The file's name, for messages.

    Raises:
        JobError: It is no such file, or of another schema.
    """
    try:
        tree = json.loads(text)
        if (schema := tree.pop("schema")) != FABRIC_SCHEMA:
            which = "a newer" if schema > FABRIC_SCHEMA else "an older"
            raise JobError(f"{where} was written by {which} idletrain; measure again, or use that version")
        lists = {"points": Point, "collectives": CollectiveSample, "training": TrainingSample, "stencil": StencilSample}
        return Fabric(**{key: [_record(lists[key], r) for r in v] if key in lists else v for key, v in tree.items()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise JobError(f"{where} is not a file of idletrain fabric; measure again with --out {where}") from None


def _record(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a record, turning JSON's lists back into tuples and leaving unknown fields out."""
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})
