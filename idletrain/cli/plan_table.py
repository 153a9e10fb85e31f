"""Print how a job's network would be split over a fleet: `idletrain plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from idletrain.autotune.step_time import step_seconds
from idletrain.cli.plan_network import default_tables, network_lines, network_tables, quiet_table
from idletrain.job import Job
from idletrain.nn.ist.groups import Layout, split_share
from idletrain.nn.ist.partition import widths
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.memory import HEAD_RESERVE_BYTES, WORKER_BYTES
from idletrain.nn.outofcore.executing.requirements import ASSUMED_LINK, OutOfCoreForecast
from idletrain.nn.outofcore.executing.trainer import scratch_bytes
from idletrain.nn.outofcore.planning.drawing import bytes_text, plan_text
from idletrain.nn.outofcore.planning.plan import MemoryPlan
from idletrain.nn.prepare import Prepared
from idletrain.nn.threads import one_thread
from idletrain.phases import TrainingPhase
from idletrain.rounds import widths as round_widths
from idletrain.worker import encoding
from idletrain.worker.memory_limits import available_bytes

MOST_HELD = 0.7  # of the parameters, above which a subnet saves little memory and traffic
GIGABIT_BYTES = 125e6  # bytes a second of the link assumed for the expected time, in both directions at once


@one_thread()
def plan_table(job: Job, prepared: Prepared, *, forecast: bool = False) -> RenderableType:
    """Return neuron groups, and widths, bytes, memory per worker and expected time of a round; or of each phase's.

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
    planned = [_plan_phase(job, prepared, phase, out_of_core, memory) for phase in program.training.every_phase]
    plans = {share: plan for phase in planned for share, plan in phase.plans.items()}
    lines = network_lines(job, prepared)
    if not program.training.listed_phases:
        lines += _round_lines(job, prepared, planned[0])
        lines += [] if forecast else [_time_line(*planned[0].round_seconds(nodes))]
    if plans:
        parameters = [(s, subnet.parameters) for p in planned for s, subnet in zip(p.held, p.subnets, strict=True)]
        lines.append(_scratch_line(prepared, out_of_core, plans, parameters))
    drawings = [plan_text(out_of_core.profile(share), plan) for share, plan in plans.items()]
    phased = bool(program.training.listed_phases)
    rows = _phases(job, planned, memory) if phased else _subnets(job, prepared, planned[0], memory)
    return Group(Text("\n".join(lines)), *network_tables(prepared), rows, *default_tables(job, prepared), *drawings)


@dataclass(frozen=True)
class _PhasePlan:
    """The memory, bytes and time that a round of a phase takes.

    Attributes:
        phase: The phase.
        shares: Each subnet's share of every neuron group.
        held: The same, or 1 where there is no group.
        subnets: The subnets of its first round.
        plans: The plan of each share that is trained out of core.
        peaks: Each subnet's memory in bytes.
        seconds: Each subnet's seconds of compute.
        moved: Bytes that the round moves down and up.
    """

    phase: TrainingPhase
    shares: tuple[float, ...]
    held: tuple[float, ...]
    subnets: Sequence[Subnet]
    plans: Mapping[float, MemoryPlan]
    peaks: Sequence[int]
    seconds: Sequence[float]
    moved: tuple[int, int]

    def round_seconds(self, nodes: int) -> tuple[float, float]:
        """Return the seconds of compute and of exchange that the round takes on so many nodes."""
        return -(-len(self.subnets) // nodes) * max(self.seconds), max(self.moved) / GIGABIT_BYTES


def _plan_phase(
    job: Job, prepared: Prepared, phase: TrainingPhase, out_of_core: OutOfCoreForecast, memory: int
) -> _PhasePlan:
    """Plan a round of a phase on equal workers with `memory` bytes each.

    Raises:
        RunError: no worker of that size can train its subnets.
    """
    program = prepared.program
    shares = _shares(job, prepared, phase, out_of_core, memory)
    subnets = program.subnets(phase.first_round, program.specs(shares, phase.copies))
    held = tuple(share if program.layout.groups else 1.0 for share in shares)
    need, always = out_of_core.need_bytes, program.out_of_core == "always"
    plans = {share: out_of_core.plan(share, memory) for share in held if always or need(share) > memory}
    step_times = [
        plans[share].seconds if share in plans else step_seconds(prepared, subnets[k], k, phase.first_round)
        for k, share in enumerate(held)
    ]
    peaks = [plans[share].peak_bytes if share in plans else need(share) for share in held]
    down, up = (
        sum(encoding.nbytes(program, subnet, direction) for subnet in subnets) for direction in encoding.DIRECTIONS
    )
    seconds = [phase.local_steps * step for step in step_times]
    return _PhasePlan(phase, shares, held, subnets, plans, peaks, seconds, (down, up))


def _shares(
    job: Job, prepared: Prepared, phase: TrainingPhase, out_of_core: OutOfCoreForecast, memory: int
) -> tuple[float, ...]:
    """Return each subnet's share of every neuron group, for equal workers with `memory` bytes each."""
    program, need = prepared.program, out_of_core.need_bytes
    policy = job.preemption.policy
    workers = phase.subnets if policy == "rolling" else job.nodes.count
    capacities = [round_widths.Capacity(memory, 1.0)] * workers
    if program.layout.skippable:
        return round_widths.equal_shares(capacities, phase.subnets, need, phase.copies)
    mode, costs = program.out_of_core, None
    if mode != "never":
        costs = round_widths.OutOfCoreCosts(out_of_core.least_bytes, out_of_core.seconds, always=mode == "always")
    smallest = min(program.layout.sizes, default=1)
    if program.training.listed_phases:
        return round_widths.shares_of_phase(capacities, phase, need, smallest, costs, program.training.phases_field)
    networks = round_widths.networks_held(policy, program.training.slack, phase.copies)
    return round_widths.shares(capacities, phase.subnets, need, smallest, costs, networks)


def _phases(job: Job, planned: Sequence[_PhasePlan], memory: int) -> Table:
    """Return a table of the phases: memory of a node, bytes of a round, and expected time.

    Times are those of `_time_line`.
    """
    title = f"phases; a worker has {bytes_text(memory)} for a subnet"
    table, overlap = quiet_table(title), any(each.phase.copies > 1 for each in planned)
    copies = ["copies"] if overlap else []
    for column in ("#", "rounds", "steps", "subnets", *copies, "share", "memory", "down", "up", "round", "all"):
        table.add_column(column, justify="right")
    for each in planned:
        phase, seconds = each.phase, sum(each.round_seconds(job.nodes.count))
        largest = each.peaks.index(max(each.peaks))
        table.add_row(
            *map(str, (phase.number, phase.rounds, phase.local_steps, phase.subnets)),
            *([str(phase.copies)] if overlap else []),
            f"{max(each.held):.0%}",
            bytes_text(each.peaks[largest]) + (" out of core" if each.held[largest] in each.plans else ""),
            *map(bytes_text, each.moved),
            f"{seconds:.2f} s",
            f"{phase.rounds * seconds:.0f} s",
        )
    return table


def _time_line(compute_seconds: float, exchange_seconds: float) -> str:
    """Return the line on the time of a round."""
    compute = f"{compute_seconds:.2f} s compute at this machine's pace, a core each"
    total = compute_seconds + exchange_seconds
    return f"expected {total:.2f} s a round: {compute}; {exchange_seconds:.2f} s exchange at 1 Gbit/s"


def _scratch_line(
    prepared: Prepared,
    out_of_core: OutOfCoreForecast,
    plans: Mapping[float, MemoryPlan],
    subnets: Sequence[tuple[float, int]],
) -> str:
    """Return the line on the scratch disk that training out of core takes.

    Args:
        prepared: The network.
        out_of_core: Forecasts training it out of core.
        plans: The plan of each share that is trained so.
        subnets: Each subnet's share and its number of parameters.
    """
    scratch = max(
        2 * 4 * len(prepared.program.slots) * parameters
        + scratch_bytes(plans[share].footprint(out_of_core.profile(share)))
        for share, parameters in subnets
        if share in plans
    )
    return (
        f"out of core: up to {bytes_text(scratch)} of each worker's scratch disk, assumed to move "
        f"{ASSUMED_LINK.write_bytes_per_second / 1e6:.0f} MB/s; a worker measures its own and plans by that"
    )


def _round_lines(job: Job, prepared: Prepared, planned: _PhasePlan) -> list[str]:
    """Return the lines on a round of a job without phases: its bytes, down and up, and what a subnet holds."""
    layout, copies, (down, up) = prepared.program.layout, planned.phase.copies, planned.moved
    covered = min(1.0, sum(planned.shares) / copies) if layout.groups else 1.0
    parts = "blocks" if layout.skippable else "neurons"
    largest = max(subnet.parameters for subnet in planned.subnets)
    held = largest / sum(math.prod(tensor.shape) for tensor in layout.tensors)
    moved = f"{bytes_text(down)} down and {bytes_text(up)} up"
    if job.preemption.policy == "rolling":
        first = f"the open subnets hold {covered:.0%} of the {parts}; together they move {moved}"
    else:
        first = f"each round moves {moved} and covers {covered:.0%} of the {parts}"
        first += ", as workers have memory for no more" if covered < 1 else ""
    return [
        first,
        f"a subnet holds up to {held:.0%} of the parameters{_advice(layout, copies, held)}",
    ]


def _advice(layout: Layout, copies: int, held: float) -> str:
    """Return what would split better, if a subnet holds more than `MOST_HELD` of the parameters, else nothing."""
    if held <= MOST_HELD or not layout.groups:
        return ""
    least = 1 - MOST_HELD
    if (split := split_share(layout)) > least:
        return f"; at most {MOST_HELD:.0%} with training.subnets: {math.ceil(copies * split / (split - least))}"
    _, largest = max((math.prod(tensor.shape), tensor.name) for tensor in layout.tensors if tensor.shared)
    return f"; most of them are in {largest}, which stays whole: split it by model.groups, or use method: local-sgd"


def _subnets(job: Job, prepared: Prepared, planned: _PhasePlan, memory: int) -> Table:
    table = quiet_table(f"subnets; a worker has {bytes_text(memory)} for each")
    shared = len(planned.subnets) > job.nodes.count
    for column in ("subnet", *(["worker"] if shared else []), "share", "parameters", "down", "up", "memory", "time"):
        table.add_column(column, justify="right")
    table.add_column("widths")
    program, shares = prepared.program, planned.shares
    neurons: Sequence[Sequence[int]] = [widths(size, shares, planned.phase.copies) for size in program.layout.sizes]
    if program.layout.skippable:
        neurons = [[sum(factor > 0 for _, factor in subnet.branches) for subnet in planned.subnets]]
    for k, subnet in enumerate(planned.subnets):
        table.add_row(
            str(k),
            *([str(k % job.nodes.count)] if shared else []),
            f"{shares[k] if neurons else 1:.1%}",
            f"{subnet.parameters:,}",
            *(bytes_text(encoding.nbytes(program, subnet, direction)) for direction in encoding.DIRECTIONS),
            bytes_text(planned.peaks[k]) + (" out of core" if planned.held[k] in planned.plans else ""),
            f"{planned.seconds[k]:.2f} s",
            " ".join(str(of_group[k]) for of_group in neurons) or "all",
        )
    return table
