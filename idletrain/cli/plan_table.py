"""Print how a job's network would be split over a fleet: `idletrain plan`."""

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
from idletrain.rounds import widths as round_widths
from idletrain.worker import encoding
from idletrain.worker.memory_limits import available_bytes

WORKER_BYTES = 250 << 20  # a worker process before its first subnet: Python, torch, Dask (262 MB measured)
SCALINGS = {
    "weights": "multiplied by 1/share",
    "roots": "multiplied by the root of 1/share: a fixed length is given to what they are summed with",
    "inputs": "inputs of {layers} multiplied by 1/share, as the weights have another use",
    "normalized": "as they are: a normalization right behind them undoes any factor",
    "unused": "as they are: no output depends on them",
    "unknown": "multiplied by 1/share, untested: the network's outputs with random weights are not finite",
}
GIGABIT_BYTES = 125e6  # bytes a second of the link assumed for the expected time, in both directions at once


@one_thread()
def plan_table(job: Job, prepared: Prepared, *, forecast: bool = False) -> RenderableType:
    """Return neuron groups, widths per worker, bytes per round, memory per worker and expected time per round.

    Args:
        job: The job; a worker has the RAM that it says, or an equal share of this machine's.
        prepared: Its network and data.
        forecast: True if the time of a round on the fleet was printed already; else it is guessed here.

    Raises:
        RunError: no worker of that size can train any subnet.
    """
    program, nodes = prepared.program, job.nodes.count
    shared = (available_bytes() - HEAD_RESERVE_BYTES) // nodes  # as a launch shares it
    memory = max(0, (job.nodes.memory or shared) - WORKER_BYTES)
    memory = min(memory, job.memory.budget or memory)
    out_of_core = OutOfCoreForecast(program)
    need, mode = out_of_core.need_bytes, program.out_of_core
    estimate = (
        round_widths.OutOfCoreEstimate(out_of_core.least_bytes, out_of_core.seconds, always=mode == "always")
        if mode != "never"
        else None
    )
    smallest = min(program.layout.sizes, default=1)
    capacities = [round_widths.Capacity(memory, 1.0)] * nodes
    shares = round_widths.shares(capacities, job.training.subnets, need, smallest, estimate)
    subnets = program.subnets(0, shares)
    subnet_shares = [share if program.layout.groups else 1.0 for share in shares]
    plans = {
        share: out_of_core.plan(share, memory) for share in subnet_shares if mode == "always" or need(share) > memory
    }
    step_times = [
        plans[share].seconds if share in plans else step_seconds(prepared, subnets[k], k)
        for k, share in enumerate(subnet_shares)
    ]
    seconds = [job.training.local_steps * step for step in step_times]
    peaks = [plans[share].peak_bytes if share in plans else need(share) for share in subnet_shares]
    memories = [
        f"{bytes_text(peak)} of {bytes_text(memory)}" + (" out of core" if share in plans else "")
        for share, peak in zip(subnet_shares, peaks, strict=True)
    ]
    down, up = (
        sum(encoding.nbytes(program, subnet, direction) for subnet in subnets) for direction in encoding.DIRECTIONS
    )
    lines = _round_lines(job, prepared, shares, (down, up))
    if not forecast:
        compute, exchange = -(-len(subnets) // nodes) * max(seconds), max(down, up) / GIGABIT_BYTES
        paced = f"{compute:.2f} s compute at this machine's pace, a core each"
        lines.append(f"expected {compute + exchange:.2f} s a round: {paced}; {exchange:.2f} s exchange at 1 Gbit/s")
    if plans:
        scratch = max(
            2 * 4 * len(program.slots) * subnets[k].parameters
            + scratch_bytes(plans[share].footprint(out_of_core.profile(share)))
            for k, share in enumerate(subnet_shares)
            if share in plans
        )
        lines.append(
            f"out of core: up to {bytes_text(scratch)} of each worker's scratch disk, assumed to move "
            f"{ASSUMED_LINK.write_bytes_per_second / 1e6:.0f} MB/s; a worker measures its own and plans by that"
        )
    drawings = [plan_text(out_of_core.profile(share), plan) for share, plan in plans.items()]
    rows = _subnets(job, prepared, shares, seconds, memories)
    return Group(Text("\n".join(lines)), _groups(prepared), *_sums(prepared), rows, *drawings)


def _round_lines(job: Job, prepared: Prepared, shares: Sequence[float], exchanged: tuple[int, int]) -> list[str]:
    """Return the lines on the network's size and on a round's bytes, down and up."""
    training, (down, up) = job.training, exchanged
    parameters = sum(tensor.numel() for tensor in prepared.network)
    covered = min(1.0, sum(shares)) if prepared.program.layout.groups else 1.0
    return [
        f"{job.name}: {parameters:,} parameters, {training.method}, {training.rounds} x {training.local_steps} steps",
        f"each round moves {bytes_text(down)} down and {bytes_text(up)} up and covers {covered:.0%} of the neurons",
    ]


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
            ", ".join(bytes_text(encoding.nbytes(program, subnet, direction)) for direction in encoding.DIRECTIONS),
            memories[k],
            f"{seconds[k]:.2f} s",
        )
    return table


def _sums(prepared: Prepared) -> Sequence[RenderableType]:
    """Return tables of how sums over cut neurons are scaled, and of the groups that stay whole."""
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
