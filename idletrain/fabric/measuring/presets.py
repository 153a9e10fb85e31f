"""Presets of measurement: pairs of nodes, repetitions, sizes and time limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALL_PAIRS = 32  # nodes up to which all pairs are measured; of more, a sample of the pairs
PARTNERS = 4  # of each node in such a sample
KB, MB, GB = 1000, 1000**2, 1000**3
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
# The start of a stream is not counted: TCP's slow start, and the burst that a token bucket lets through.
WARM_SECONDS = 0.1
# Environment that turns NCCL's GPUDirect off: data is staged through the host's memory.
STAGED = {"NCCL_NET_GDR_LEVEL": "LOC", "NCCL_P2P_DISABLE": "1"}


@dataclass(frozen=True)
class TimedModel:
    """A network whose training steps are timed: its name in `models`, and the batch sizes of each node."""

    name: str
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FabricPreset:
    """Amount of measurement.

    Attributes:
        pings: Round trips of each pair.
        pairs_seconds: Time for the streams of all pairs together; it sets each stream's length within
            `stream_seconds`.
        stream_seconds: Shortest and longest stream.
        transfers: Transfers of each kind over Dask and the exchange.
        transfer_seconds: Aimed length of one transfer.
        transfer_most: Largest transfer in bytes.
        partners: With how many of the next nodes each node does such transfers; 0 for disjoint pairs.
        flows: Numbers of connections at once.
        sizes: Bytes of collective operations.
        operation_seconds: Time for one operation of one size; larger sizes than one that exceeds it are left out.
        repeats: Fewest and most repetitions of operations, steps and halo exchanges.
        step_seconds: Time for a network's steps of one kind; the cost of one that would take longer is computed.
        models: Networks to train.
        image: Height and width of their images in pixels.
        edge: Cells along each edge of the stencil's grid (of a node's block in weak scaling).
        together_seconds: Time limit of everything that nodes do together over one backend.
        thorough: Whether scaling and collectives are measured at every power of two, and NCCL without GPUDirect.
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
    """Rebuild a preset from its plain values, as `asdict` and JSON make them."""
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
    models = tuple(TimedModel(model["name"], tuple(model["batch_sizes"])) for model in tree["models"])
    return FabricPreset(**(plain | {"models": models}))


def pairs(nodes: int) -> list[tuple[int, int]]:
    """Return (source, target) pairs to measure: all, or with many nodes some partners of each node.

    The partners are 1, 3, 9 and 27 nodes further on (modulo the number of nodes): every node sends and receives
    equally often, and several nodes notice a slow one.
    """
    if nodes <= ALL_PAIRS:
        return [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    steps = [3**i % nodes for i in range(PARTNERS)]
    forward = {(a, (a + step) % nodes) for a in range(nodes) for step in steps}
    return sorted(forward | {(b, a) for a, b in forward})


def partners(nodes: int, count: int) -> list[tuple[int, int]]:
    """Return pairs for longer measurements: each node with the next `count`, or disjoint pairs if that is 0."""
    if nodes < 2:
        return []
    if count >= nodes - 1:
        return pairs(nodes)
    if not count:
        return [(a, (a + 1) % nodes) for a in range(0, nodes, 2)]
    return [(a, (a + step) % nodes) for a in range(nodes) for step in range(1, count + 1)]


def stream_seconds(preset: FabricPreset, nodes: int) -> float:
    """Return the length of each pair's stream, warm-up included."""
    shortest, longest = preset.stream_seconds
    return min(longest, max(shortest, preset.pairs_seconds / max(1, len(pairs(nodes)))))


def transfer_bytes(preset: FabricPreset, bytes_per_second: float) -> int:
    """Return the size of a transfer that takes about the preset's time at a link's speed; a multiple of 4."""
    return int(min(preset.transfer_most, max(64 * KB, bytes_per_second * preset.transfer_seconds))) // 4 * 4


def worlds(preset: FabricPreset, nodes: int) -> list[int]:
    """Return the numbers of nodes at which scaling is measured: one, all, and if thorough powers of two between."""
    between = (2**i for i in range(1, nodes.bit_length()) if 2**i <= nodes)
    return sorted({1, nodes, *(between if preset.thorough else ())})


def repeats(preset: FabricPreset, once_seconds: float, budget_seconds: float) -> int:
    """Return how often to repeat work that took `once_seconds`; 0 if the fewest exceed three times the budget."""
    fewest, most = preset.repeats
    if once_seconds * fewest > 3 * budget_seconds:
        return 0
    return int(min(most, max(fewest, budget_seconds / max(once_seconds, 1e-9))))


def backends(nodes: Sequence[Mapping[str, Any]], preset: FabricPreset) -> list[tuple[str, Mapping[str, str]]]:
    """Return the backends of torch.distributed that all nodes have, each with its environment variables."""
    common: list[tuple[str, Mapping[str, str]]] = []
    if all(node["gloo"] for node in nodes):
        common.append(("gloo", {}))
    sharing = Counter(node["host"] for node in nodes)
    # No two processes may use the same GPU.
    if all(node["nccl"] and len(node["gpus"]) >= sharing[node["host"]] for node in nodes):
        common.append(("nccl", {}))
        if preset.thorough:
            common.append(("nccl staged", STAGED))
    return common


def dims(nodes: int) -> tuple[int, int, int]:
    """Return how to cut a 3-D grid among nodes: three factors, as equal as possible, the largest first."""
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
    """Return a node's neighbours in a grid cut by `dims` as (axis, side -1 or 1, node); none beyond the edges."""
    at = (rank // (cut[1] * cut[2]), rank // cut[2] % cut[1], rank % cut[2])
    strides = (cut[1] * cut[2], cut[2], 1)
    return [
        (axis, side, rank + side * strides[axis])
        for axis in range(3)
        for side in (-1, 1)
        if 0 <= at[axis] + side < cut[axis]
    ]
