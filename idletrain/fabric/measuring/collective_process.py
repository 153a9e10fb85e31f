"""Run one node's part of the collective measurements in a process of its own:
`python -m idletrain.fabric.measuring.collective_process`.

torch.distributed has one default process group a process, and a hanging peer hangs its callers, so none of this runs
in a worker. The process reads its orders as a line of JSON and ends when its input does; rank 0 prints the results.
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
    """Orders for a process that measures.

    Attributes:
        backend: Its name in torch.distributed.
        label: Its name in the results.
        host: IP address on which rank 0 listens.
        port: Port on which rank 0 listens.
        rank: This node's number.
        nodes: Number of nodes.
        sharing: How many of the nodes are on this machine.
        local_rank: This node's number among those.
        preset: How much is measured.
        bytes_per_second: Measured speed of the links between the nodes.
        limit_seconds: Time limit of the whole process.
    """

    backend: str
    label: str
    host: str
    port: int
    rank: int
    nodes: int
    sharing: int
    local_rank: int
    preset: presets.FabricPreset
    bytes_per_second: float
    limit_seconds: float


def measure_process(orders: ProcessOrders, send: Callable[[dict[str, Any]], None]) -> None:
    """Measure everything that nodes do together, at every number of nodes, the smallest first.

    Args:
        orders: What to measure.
        send: Called after each number of nodes with all results so far, as lists of records, and before each part with
            a phrase for it as `doing`.
    """
    preset = orders.preset
    all_nodes, *smaller = list(_timed_groups(orders, preset))
    results: dict[str, list[Any]] = {"collectives": [], "training": [], "stencil": [], "missing": []}
    groups = sorted((all_nodes, *smaller), key=lambda ranks: ranks.nodes)
    for group in groups:
        all_nodes.barrier()  # nodes outside the group wait here
        if group.includes_this_node:
            thorough = preset.thorough or group is all_nodes
            _measure(orders, group, results, lambda part: send({"doing": part}), thorough=thorough)
            send({k: [item if isinstance(item, str) else asdict(item) for item in v] for k, v in results.items()})
    all_nodes.barrier()


def _measure(
    orders: ProcessOrders,
    ranks: TimedGroup,
    results: dict[str, list[Any]],
    begin: Callable[[str], None],
    *,
    thorough: bool,
) -> None:
    """Add one group's measurements to the results; all of its nodes decide alike on what to leave out."""
    operations: list[CollectiveSample] = []
    if ranks.nodes > 1 and thorough:
        begin(f"collectives on {ranks.where}")
        operations, missing = collectives.measure_collectives(
            ranks, orders.label, orders.sharing, orders.bytes_per_second
        )
        results["collectives"] += operations
        results["missing"] += missing
    expected = _expected(operations, ranks.nodes, orders.bytes_per_second)
    for wanted in ranks.preset.models:
        begin(f"training {wanted.name} on {ranks.where}")
        alone = [sample for sample in results["training"] if sample.nodes == 1]
        done, missing = training.measure_training(ranks, orders.label, wanted, orders.sharing, expected, alone)
        results["training"] += done
        results["missing"] += missing
    begin(f"the stencil on {ranks.where}")
    results["stencil"] += stencil.measure_stencil(ranks, orders.label)


def _expected(operations: Sequence[CollectiveSample], nodes: int, bytes_per_second: float) -> Any:
    """Return a function from bytes to expected seconds of an all-reduce: by the fit, but no less than by the links'
    speed, as a fit through small sizes may say little of large ones.
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
    """Yield all nodes, then ever fewer of the first ones, down to one; every process must create all groups."""
    device = torch.device("cuda", orders.local_rank % torch.cuda.device_count()) if orders.backend == "nccl" else None
    if device:
        torch.cuda.set_device(device)
    for count in reversed(presets.worlds(preset, orders.nodes)):
        limit = timedelta(seconds=orders.limit_seconds)  # subgroups do not inherit the default group's
        group = distributed.new_group(list(range(count)), timeout=limit) if count > 1 else None
        yield TimedGroup(group, count, orders.rank, device or torch.device("cpu"), preset)


def run_process(arguments: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Join the process group, measure, and leave it."""
    orders = ProcessOrders(**{**arguments, "preset": presets.preset_of(arguments["preset"])})
    limit = timedelta(seconds=orders.limit_seconds)
    with contextlib.ExitStack() as stack:
        fd = None
        if orders.rank == 0:  # torch's own socket would listen on every interface
            family = socket.AF_INET6 if ":" in orders.host else socket.AF_INET
            listening = stack.enter_context(socket.create_server((orders.host, orders.port), family=family))
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
    arguments = json.loads(sys.stdin.readline())
    when_parent_ends(lambda: os._exit(1))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output, which is for results alone

    def print_results(results: dict[str, Any]) -> None:
        """Print one line of JSON; only rank 0 does."""
        if arguments["rank"] == 0:
            print(json.dumps(results), file=output, flush=True)

    run_process(arguments, print_results)
    os._exit(0)  # a backend's threads may outlive its process group
