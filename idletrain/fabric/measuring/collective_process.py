"""One node's part in what all nodes do together, as a process of its own:
`python -m idletrain.fabric.measuring.collective_process`.

torch.distributed keeps to one process group a process, and a peer that hangs takes its callers along: none of that may
happen to a worker. Reads its orders as a line of JSON, and ends when its input does. The first node prints the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from idletrain.cluster.shutdown import when_parent_ends
from idletrain.fabric.analysis import ddp_cost, statistics
from idletrain.fabric.analysis.samples import CollectiveSample
from idletrain.fabric.measuring import collectives, presets, stencil, training
from idletrain.fabric.measuring.timed_group import TimedGroup


@dataclass(frozen=True, kw_only=True)
class ProcessOrders:
    """What a process is to do.

    Attributes:
        backend: As torch.distributed calls it.
        label: As results call it.
        host: Where the first node listens.
        port: Likewise.
        rank: This node's number.
        nodes: How many there are.
        sharing: How many of them are on this machine.
        place: This one's number among those.
        preset: How much is measured.
        bytes_per_second: Of the links between the nodes, as far as is known.
        limit_seconds: For all of it.
    """

    backend: str
    label: str
    host: str
    port: int
    rank: int
    nodes: int
    sharing: int
    place: int
    preset: presets.FabricPreset
    bytes_per_second: float
    limit_seconds: float


def measure_process(orders: ProcessOrders, send: Callable[[dict[str, Any]], None]) -> None:
    """Everything that this backend's nodes do together; `tell` gets all of it so far, as lists of records."""
    preset = orders.preset
    everybody, *smaller = list(_timed_groups(orders, preset))
    found: dict[str, list[Any]] = {"collectives": [], "training": [], "stencil": [], "missing": []}
    companies = sorted((everybody, *smaller), key=lambda ranks: ranks.nodes)
    for company in companies:
        everybody.meet()  # those who are not in it wait here
        if company.has_me:
            _measure(orders, company, found, thorough=preset.thorough or company is everybody)
            send({k: [one if isinstance(one, str) else asdict(one) for one in v] for k, v in found.items()})
    everybody.meet()


def _measure(orders: ProcessOrders, ranks: TimedGroup, results: dict[str, list[Any]], *, thorough: bool) -> None:
    """What one company does; all of its nodes come to the same."""
    operations: list[CollectiveSample] = []
    if ranks.nodes > 1 and thorough:
        operations, missing = collectives.measure_collectives(
            ranks, orders.label, orders.sharing, orders.bytes_per_second
        )
        results["collectives"] += operations
        results["missing"] += missing
    expected = _expected(operations, ranks.nodes, orders.bytes_per_second)
    for wanted in ranks.preset.models:
        alone = [one for one in results["training"] if one.nodes == 1]
        done, missing = training.measure_training(ranks, orders.label, wanted, orders.sharing, expected, alone)
        results["training"] += done
        results["missing"] += missing
    results["stencil"] += stencil.measure_stencil(ranks, orders.label)


def _expected(operations: Sequence[CollectiveSample], nodes: int, bytes_per_second: float) -> Any:
    """How long an all-reduce of so many bytes takes: by the fit, but no less than by the links: a fit of small ones may
    know little of large ones.
    """
    sizes = [(c.moved_bytes, c.seconds) for c in operations if c.operation == "all-reduce"]
    line = statistics.fitted(sizes)

    def seconds(moved_bytes: int) -> float:
        if nodes < 2:
            return 0.0
        by_links = ddp_cost.all_reduce_seconds(moved_bytes, nodes, bytes_per_second)
        return max(by_links, line.alpha + line.beta * moved_bytes) if line else by_links

    return seconds


def _timed_groups(orders: ProcessOrders, preset: presets.FabricPreset) -> Iterator[TimedGroup]:
    """Everybody, then the first so many nodes, down to one; every process must make all of their groups."""
    device = torch.device("cuda", orders.place % torch.cuda.device_count()) if orders.backend == "nccl" else None
    if device:
        torch.cuda.set_device(device)
    for count in reversed(presets.worlds(preset, orders.nodes)):
        limit = timedelta(seconds=orders.limit_seconds)  # that of the whole is not theirs
        group = distributed.new_group(list(range(count)), timeout=limit) if count > 1 else None
        yield TimedGroup(group, count, orders.rank, device or torch.device("cpu"), preset)


def run_process(arguments: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Meet the others, measure, and part."""
    orders = ProcessOrders(**{**arguments, "preset": presets.preset_of(arguments["preset"])})
    limit = timedelta(seconds=orders.limit_seconds)
    with contextlib.ExitStack() as bound:
        fd = None
        if orders.rank == 0:  # by itself torch would listen on every interface
            family = socket.AF_INET6 if ":" in orders.host else socket.AF_INET
            listening = bound.enter_context(socket.create_server((orders.host, orders.port), family=family))
            fd = os.dup(listening.fileno())  # which the store closes
        store = TCPStore(orders.host, orders.port, orders.nodes, orders.rank == 0, limit, master_listen_fd=fd)
    distributed.init_process_group(
        orders.backend, store=store, rank=orders.rank, world_size=orders.nodes, timeout=limit
    )
    try:
        measure_process(orders, send)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    words = json.loads(sys.stdin.readline())
    when_parent_ends(lambda: os._exit(1))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run_process(words, lambda found: print(json.dumps(found), file=answers, flush=True) if words["rank"] == 0 else None)
    os._exit(0)  # a backend's threads may outlast its group
