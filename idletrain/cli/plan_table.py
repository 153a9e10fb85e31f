"""`idletrain plan`: how a job's network would be split over a fleet, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from idletrain.autotune.step_time import one_thread, step_seconds
from idletrain.job import Job
from idletrain.nn.ist.partition import widths
from idletrain.nn.memory import HEAD_RESERVE_BYTES
from idletrain.nn.outofcore.executing.requirements import ASSUMED_LINK, OutOfCoreForecast
from idletrain.nn.outofcore.executing.trainer import scratch_bytes
from idletrain.nn.outofcore.planning.drawing import bytes_text, plan_text
from idletrain.nn.prepare import Prepared
from idletrain.rounds import widths as plan
from idletrain.worker import encoding
from idletrain.worker.memory_limits import available_bytes

WORKER_BYTES = 250 << 20  # of a worker process before its first subnet: Python, torch, Dask (262 MB measured)
SCALINGS = {
    "weights": "multiplied by 1/share",
    "roots": "multiplied by the root of 1/share: a fixed length is given to what they are summed with",
    "inputs": "inputs of {layers} multiplied by 1/share, as the weights have another use",
    "normalized": "as they are: a normalization right behind them undoes any factor",
    "unused": "as they are: no output depends on them",
    "unknown": "multiplied by 1/share, untested: the network's outputs with random weights are not finite",
}
GIGABIT_BYTES = 125e6  # the link assumed for the expected time: an ordinary node's, both ways at once


@one_thread()
def plan_table(job: Job, prepared: Prepared, *, forecast: bool = False) -> RenderableType:
    """Groups, widths per worker, bytes per round, memory per worker and expected time per round.

    Args:
        job: The job; a worker has the RAM that it says, or its share of this machine's.
        prepared: Its program.
        foreseen: Whether the time of a round on the fleet has been told; else it is guessed.

    Raises:
        RunError: no worker of that size can train any subnet.
    """
    program, training = prepared.program, job.training
    shared = (available_bytes() - HEAD_RESERVE_BYTES) // job.nodes.count  # as a launch shares it out
    memory = max(0, (job.nodes.memory or shared) - WORKER_BYTES)
    memory = min(memory, job.memory.budget or memory)
    foresight = OutOfCoreForecast(program)
    need, how = foresight.need_bytes, program.out_of_core
    beyond = (
        plan.OutOfCoreEstimate(foresight.least_bytes, foresight.seconds, always=how == "always")
        if how != "never"
        else None
    )
    smallest = min(program.layout.sizes, default=1)
    shares = plan.shares([plan.Capacity(memory, 1.0)] * job.nodes.count, training.subnets, need, smallest, beyond)
    subnets = program.subnets(0, shares)
    wide = [share if program.layout.groups else 1.0 for share in shares]
    planned = {w: foresight.plan(w, memory) for w in wide if how == "always" or need(w) > memory}
    each = [planned[w].seconds if w in planned else step_seconds(prepared, subnets[k], k) for k, w in enumerate(wide)]
    seconds = [training.local_steps * step for step in each]
    takes = [planned[w].peak_bytes if w in planned else need(w) for w in wide]
    memories = [
        f"{bytes_text(took)} of {bytes_text(memory)}" + (" out of core" if w in planned else "")
        for w, took in zip(wide, takes, strict=True)
    ]
    down, up = (sum(encoding.nbytes(program, subnet, way) for subnet in subnets) for way in encoding.DIRECTIONS)
    turns = -(-len(subnets) // job.nodes.count)
    compute = turns * max(seconds)
    whole = sum(tensor.numel() for tensor in prepared.network)
    covered = min(1.0, sum(shares)) if program.layout.groups else 1.0
    exchange = max(down, up) / GIGABIT_BYTES
    lines = [
        f"{job.name}: {whole:,} parameters, {training.method}, {training.rounds} x {training.local_steps} steps",
        f"each round moves {bytes_text(down)} down and {bytes_text(up)} up and covers {covered:.0%} of the neurons",
    ]
    if not forecast:
        paced = f"{compute:.2f} s compute at this machine's pace, a core each"
        lines.append(f"expected {compute + exchange:.2f} s a round: {paced}; {exchange:.2f} s exchange at 1 Gbit/s")
    if planned:
        most = max(
            2 * 4 * len(program.slots) * subnets[k].parameters
            + scratch_bytes(planned[w].footprint(foresight.profile(w)))
            for k, w in enumerate(wide)
            if w in planned
        )
        lines.append(
            f"out of core: up to {bytes_text(most)} of each worker's scratch disk, assumed to move "
            f"{ASSUMED_LINK.write_bytes_per_second / 1e6:.0f} MB/s; a worker measures its own and plans by that"
        )
    pictures = [plan_text(foresight.profile(w), made) for w, made in planned.items()]
    rows = _subnets(job, prepared, shares, seconds, memories)
    return Group(Text("\n".join(lines)), _groups(prepared), *_sums(prepared), rows, *pictures)


def _subnets(
    job: Job, prepared: Prepared, shares: tuple[float, ...], seconds: Sequence[float], memories: Sequence[str]
) -> Table:
    table = Table(title="subnets", title_justify="left")
    for column in ("subnet", "worker", "share", "widths", "parameters", "bytes down, up", "memory", "compute"):
        table.add_column(column, justify="right")
    program = prepared.program
    neurons = [widths(size, shares) for size in program.layout.sizes]
    for k, subnet in enumerate(program.subnets(0, shares)):
        table.add_row(
            str(k),
            str(k % job.nodes.count),
            f"{shares[k] if neurons else 1:.1%}",
            " ".join(str(of_group[k]) for of_group in neurons) or "all",
            f"{subnet.parameters:,}",
            ", ".join(bytes_text(encoding.nbytes(program, subnet, way)) for way in encoding.DIRECTIONS),
            memories[k],
            f"{seconds[k]:.2f} s",
        )
    return table


def _sums(prepared: Prepared) -> Sequence[RenderableType]:
    """How a subnet makes its sums over cut neurons as large as the network's, and which groups stay whole."""
    layout = prepared.program.layout
    scaled, whole = (
        Table(title="sums over cut neurons", title_justify="left"),
        Table(title="kept whole", title_justify="left"),
    )
    for table, columns in ((scaled, ("weights", "in a subnet")), (whole, ("group", "reason"))):
        for column in columns:
            table.add_column(column)
    for contraction in layout.contractions:
        scaled.add_row(contraction.tensor, SCALINGS[contraction.scaling].format(layers=", ".join(contraction.layers)))
    for name, reason in layout.kept_whole:
        whole.add_row(name, reason)
    return [table for table in (scaled, whole) if table.row_count]


def _groups(prepared: Prepared) -> RenderableType:
    table = Table(title="neuron groups", title_justify="left")
    for column in ("group", "neurons", "tensors"):
        table.add_column(column)
    offset = 0
    for group in prepared.program.layout.groups:
        ids = range(offset, offset + group.size)
        names = [
            tensor.name
            for tensor in prepared.program.layout.tensors
            if any(
                neurons is not None and ((neurons >= ids.start) & (neurons < ids.stop)).any()
                for neurons in tensor.neurons
            )
        ]
        table.add_row(group.name, f"{group.size:,}", ", ".join(names))
        offset += group.size
    return table
