"""What is measured between whom, how often and how long. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALL_PAIRS = 32  # nodes: with more, pairs are sampled
PARTNERS = 4  # of each node, when they are
KB, MB, GB = 1000, 1000**2, 1000**3
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
# Of a stream, what is not counted: slow start, and what a token bucket lets through at once.
WARM_SECONDS = 0.1
# NCCL's variants by the environment that makes them: without GPUDirect, data is staged through the host's memory.
STAGED = {"NCCL_NET_GDR_LEVEL": "LOC", "NCCL_P2P_DISABLE": "1"}


@dataclass(frozen=True)
class TimedModel:
    """A network to train steps of: its name in `models`, and the batch sizes of each node."""

    name: str
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FabricPreset:
    """How much is measured.

    Attributes:
        pings: Round trips of each pair.
        pairs_seconds: For the streams of all pairs together, which sets each one's length within `stream_seconds`.
        transfers: Of each kind over Dask and the exchange, of `transfer_seconds` and `transfer_most` bytes at most.
        partners: With how many of the next nodes each does such transfers; 0 for two by two.
        flows: Numbers of connections at once.
        sizes: Bytes of collective operations.
        operation_seconds: For one operation of one size, beyond which larger sizes are left out.
        repeats: Of operations, steps and halos, the least and the most.
        step_seconds: For a network's steps of one kind; one that would take longer is computed instead.
        models: What is trained.
        image: Height and width of its images.
        edge: Of the stencil's grid, each way (of a node's block when scaled weakly).
        together_seconds: The most for all that nodes do together, of one backend.
        thorough: Whether scaling is measured at every power of two, collectives too, and NCCL without GPUDirect.
    """

    name: str
    pings: int
    pairs_seconds: float
    stream_seconds: tuple[float, float]
    transfers: int
    transfer_seconds: float
    transfer_most: int
    partners: int
    flows: tuple[int, ...]
    sizes: tuple[int, ...]
    operation_seconds: float
    repeats: tuple[int, int]
    step_seconds: float
    models: tuple[TimedModel, ...]
    image: int
    edge: int
    together_seconds: float
    thorough: bool


QUICK = FabricPreset(
    name="quick",
    pings=30,
    pairs_seconds=8.0,
    stream_seconds=(0.17, 1.0),
    transfers=3,
    transfer_seconds=0.05,
    transfer_most=8 * MB,
    partners=0,
    flows=(4,),
    sizes=(KB, 16 * KB, 128 * KB, MB, 8 * MB),
    operation_seconds=0.15,
    repeats=(4, 8),
    step_seconds=0.7,
    models=(
        TimedModel("mlp", (128,)),
        TimedModel("resnet50", (2,)),
        TimedModel("vgg16", (2,)),
        TimedModel("transformer", (4,)),
    ),
    image=32,
    edge=48,
    together_seconds=150.0,
    thorough=False,
)
FULL = FabricPreset(
    name="full",
    pings=200,
    pairs_seconds=240.0,
    stream_seconds=(1.0, 3.0),
    transfers=15,
    transfer_seconds=0.5,
    transfer_most=64 * MB,
    partners=2,
    flows=(2, 4, 8),
    sizes=(*(KB * 4**i for i in range(10)), GB),
    operation_seconds=10.0,
    repeats=(10, 50),
    step_seconds=30.0,
    models=(
        TimedModel("mlp", (32, 128, 512)),
        TimedModel("resnet50", (8, 32, 64)),
        TimedModel("vgg16", (8, 32, 64)),
        TimedModel("transformer", (4, 16, 64)),
    ),
    image=224,
    edge=128,
    together_seconds=3600.0,
    thorough=True,
)
PRESETS: Mapping[str, FabricPreset] = {preset.name: preset for preset in (QUICK, FULL)}


def preset_of(tree: Mapping[str, Any]) -> FabricPreset:
    """A preset from its plain values, as `asdict` and JSON make them."""
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
    models = tuple(TimedModel(model["name"], tuple(model["batch_sizes"])) for model in tree["models"])
    return FabricPreset(**(plain | {"models": models}))


def pairs(nodes: int) -> list[tuple[int, int]]:
    """Who is measured with whom, each way on its own: all, or of many nodes some partners of each.

    The partners are so many places further on (1, 3, 9, 27, doubling back at the end): every node sends and receives as
    often, and an odd one is seen by several.
    """
    if nodes <= ALL_PAIRS:
        return [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    steps = [3**i % nodes for i in range(PARTNERS)]
    found = {(a, (a + step) % nodes) for a in range(nodes) for step in steps}
    return sorted(found | {(b, a) for a, b in found})


def partners(nodes: int, count: int) -> list[tuple[int, int]]:
    """Pairs for what takes longer: each node with the `count` next to it, or two by two."""
    if nodes < 2:
        return []
    if count >= nodes - 1:
        return pairs(nodes)
    if not count:
        return [(a, (a + 1) % nodes) for a in range(0, nodes, 2)]
    return [(a, (a + step) % nodes) for a in range(nodes) for step in range(1, count + 1)]


def stream_seconds(preset: FabricPreset, nodes: int) -> float:
    """How long each pair's stream lasts, warming up included."""
    least, most = preset.stream_seconds
    return min(most, max(least, preset.pairs_seconds / max(1, len(pairs(nodes)))))


def transfer_bytes(preset: FabricPreset, bytes_per_second: float) -> int:
    """How large a transfer is that takes about as long as it should, at a link's speed."""
    return int(min(preset.transfer_most, max(64 * KB, bytes_per_second * preset.transfer_seconds))) // 4 * 4


def worlds(preset: FabricPreset, nodes: int) -> list[int]:
    """Numbers of nodes at which scaling is measured: one and all, and powers of two between."""
    between = (2**i for i in range(1, nodes.bit_length()) if 2**i <= nodes)
    return sorted({1, nodes, *(between if preset.thorough else ())})


def repeats(preset: FabricPreset, once_seconds: float, budget_seconds: float) -> int:
    """How often something is done that took so long once; 0 if even the least would go beyond thrice the budget."""
    least, most = preset.repeats
    if once_seconds * least > 3 * budget_seconds:
        return 0
    return int(min(most, max(least, budget_seconds / max(once_seconds, 1e-9))))


def backends(nodes: Sequence[Mapping[str, Any]], preset: FabricPreset) -> list[tuple[str, Mapping[str, str]]]:
    """Backends of torch.distributed that all nodes have, with the environment of each."""
    found: list[tuple[str, Mapping[str, str]]] = []
    if all(node["gloo"] for node in nodes):
        found.append(("gloo", {}))
    sharing = Counter(node["host"] for node in nodes)
    # No two processes may use the same GPU.
    if all(node["nccl"] and len(node["gpus"]) >= sharing[node["host"]] for node in nodes):
        found.append(("nccl", {}))
        if preset.thorough:
            found.append(("nccl staged", STAGED))
    return found


def dims(nodes: int) -> tuple[int, int, int]:
    """How a grid is cut among nodes: three factors as alike as can be, the largest first."""
    cuts = [
        (a, b, nodes // (a * b))
        for a in range(1, nodes + 1)
        if nodes % a == 0
        for b in range(1, nodes // a + 1)
        if nodes // a % b == 0
    ]
    best = min(cuts, key=lambda cut: (max(cut) - min(cut), sum(cut)))
    x, y, z = sorted(best, reverse=True)
    return x, y, z


def neighbours(rank: int, cut: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """A node's neighbours in a grid that is cut so, as (axis, side, node), side -1 or 1; none beyond the edges."""
    at = (rank // (cut[1] * cut[2]), rank // cut[2] % cut[1], rank % cut[2])
    strides = (cut[1] * cut[2], cut[2], 1)
    return [
        (axis, side, rank + side * strides[axis])
        for axis in range(3)
        for side in (-1, 1)
        if 0 <= at[axis] + side < cut[axis]
    ]
