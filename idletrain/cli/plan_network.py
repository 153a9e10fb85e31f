"""Say how a network is split, for `idletrain plan`: its neuron groups or blocks, its sums over them, its buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table

from idletrain.job import Job
from idletrain.nn.ist.modules import tensor_of
from idletrain.nn.ist.schemes import block_sizes, holders_of, survival
from idletrain.nn.outofcore.planning.drawing import bytes_text
from idletrain.nn.prepare import Prepared

SCALINGS = {
    "weights": "multiplied by 1/share",
    "roots": "multiplied by the root of 1/share: a fixed length is given to what they are summed with",
    "input_roots": "inputs of {layers} multiplied by the root of 1/share: each output's weights have a fixed length",
    "inputs": "inputs of {layers} multiplied by 1/share, as the weights have another use",
    "normalized": "as they are: a normalization right behind them undoes any factor",
    "unused": "as they are: no output depends on them",
    "unknown": "multiplied by 1/share, untested: the network's outputs with random weights are not finite",
}
# Why settings of subnets have their defaults; the measurements are in docs/concepts/recipes.md.
DEFAULTS = {
    ("training", "copies"): "a neuron is in one subnet, which takes the least memory and traffic",
    ("training", "finish_whole"): "no round trains whole networks, which take the most memory",
    ("model", "split"): "it learned best of the three in every network that was measured",
    ("optimizer", "lr"): "right for any number of subnets: each layer has a factor by its share of the neurons",
    ("optimizer", "state"): "a subnet goes on with the momentum of its neurons",
}
BUFFERS = {
    "estimate": "estimated on the assembled network",
    "mean": "mean of the subnets' values",
    "sum": "sum of the subnets' changes",
}


def network_lines(job: Job, prepared: Prepared) -> list[str]:
    """Return the lines on the network and the run."""
    training = prepared.program.training
    micro, phase = prepared.program.micro_batch, training.phase(0)
    parameters = sum(parameter.numel() for parameter in prepared.program.module.parameters())
    frozen = sum(math.prod(tensor.shape) for tensor in prepared.program.layout.frozen)
    several = len(training.listed_phases)
    steps = f"rounds in {several} phases" if several else f"x {phase.local_steps} steps"
    return [
        *prepared.notes,
        *([prepared.fallback] if prepared.fallback else []),
        f"{job.name}: {parameters:,} parameters, {training.method}, {training.rounds} {steps}",
        *([f"{frozen:,} of them do not train: {bytes_text(4 * frozen)} go to each worker once"] if frozen else []),
        *([f"a step takes {training.batch_size} samples, {micro} at a time"] if micro else []),
        *(_rolling_lines(job) if job.preemption.policy == "rolling" else _learning_lines(prepared)),
    ]


def _rolling_lines(job: Job) -> list[str]:
    """Return what is known beforehand of a run without rounds."""
    training = job.training
    taken = training.rounds * training.local_steps
    steps = math.ceil(taken * training.subnets * (1 + training.slack))
    return [
        f"no worker waits for another: {training.subnets} subnets are open at once",
        f"a neuron takes {taken:,} of the run's {steps:,} steps: expect a higher loss than that of local-sgd",
        "after as many passes over the data",
    ]


def _learning_lines(prepared: Prepared) -> list[str]:
    """Return what is known beforehand of a run whose neurons are not in every subnet: it learns less in a pass."""
    phases = prepared.program.training.every_phase
    steps = sum(phase.rounds * phase.local_steps * phase.subnets for phase in phases)
    of_neuron = sum(phase.rounds * phase.local_steps * phase.copies for phase in phases)
    if not prepared.program.layout.groups or of_neuron >= steps:
        return []
    taken = f"a neuron takes {of_neuron:,} of the run's {steps:,} steps"
    ends_whole = phases[-1].copies == phases[-1].subnets
    closer = "" if ends_whole else "; whole networks at the end (training.finish_whole: 0.2) come closer"
    return [
        f"{taken}: after as many passes over the data, expect a higher loss than that of local-sgd,",
        f"which holds and moves more{closer}",
    ]


def network_tables(prepared: Prepared) -> list[RenderableType]:
    """Return tables of what is split and what stays whole, of the sums over neurons, and of buffers."""
    blocks = [_blocks(prepared)] if prepared.program.layout.skippable else []
    return [*blocks, *_groups(prepared), *_sums(prepared), *_buffers(prepared)]


def default_tables(job: Job, prepared: Prepared) -> list[RenderableType]:
    """Return a table of the learning rate and of settings that have their default, with the reasons."""
    table = quiet_table("defaults")
    for column in ("setting", "value", "reason"):
        table.add_column(column)
    sections = {"training": job.training, "model": job.model, "optimizer": job.training.optimizer}
    apart = job.training.phases or job.preemption.policy == "rolling"  # each phase has its own, rolling neither
    without = {"copies", "finish_whole"} if apart else set()
    for (section, field), reason in DEFAULTS.items():
        value = getattr(sections[section], field)
        default = type(sections[section]).model_fields[field].default
        if field == "lr" or (value == default and field not in without):
            path = f"{'training.' if section == 'optimizer' else ''}{section}.{field}"
            table.add_row(path, str(value), reason)
    return [table] if prepared.program.training.method == "ist" else []


def quiet_table(title: str) -> Table:
    """Return an empty table, a line below what is above it, and without a frame, so that more fit into 80 columns."""
    return Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)


def _sums(prepared: Prepared) -> Sequence[RenderableType]:
    """Return tables of how sums over cut neurons are scaled, and of the groups that stay whole."""
    layout = prepared.program.layout
    scaled, whole = (
        quiet_table("sums over cut neurons"),
        quiet_table("kept whole"),
    )
    for table, columns in ((scaled, ("weights", "in a subnet")), (whole, ("group", "reason"))):
        for column in columns:
            table.add_column(column)
    for contraction in layout.contractions:
        scaled.add_row(contraction.tensor, SCALINGS[contraction.scaling].format(layers=", ".join(contraction.layers)))
    for name, reason in layout.kept_whole:
        whole.add_row(name, reason)
    return [table for table in (scaled, whole) if table.row_count]


def _buffers(prepared: Prepared) -> Sequence[RenderableType]:
    """Return a table of the buffers that training changes, or none if it changes only those of torch's own norms."""
    table = quiet_table("buffers that training changes")
    for column in ("buffer", "values", "from round to round"):
        table.add_column(column)
    for name, kind in prepared.program.buffers.items():
        table.add_row(name, f"{tensor_of(prepared.module, name).numel():,}", BUFFERS[kind])
    return [table] if table.row_count else []


def _blocks(prepared: Prepared) -> RenderableType:
    """Return a table of the residual blocks that subnets have some of."""
    table = quiet_table("blocks")
    for column in ("block", "parameters", "in a subnet"):
        table.add_column(column)
    layout, phases = prepared.program.layout, prepared.program.training.every_phase
    shares = (survival(holders_of(layout, phase.subnets, phase.copies), phase.subnets) for phase in phases)
    factors = ", then ".join(dict.fromkeys(f"{1 / share:.3g}" for share in shares))
    for block, parameters in zip(layout.skippable, block_sizes(layout), strict=True):
        change = f"its change multiplied by {factors}" if block.additive else "as it is: its sum is normalized"
        table.add_row(block.name, f"{parameters:,}", change)
    return table


def _groups(prepared: Prepared) -> Sequence[RenderableType]:
    """Return a table of the neuron groups with the tensors that they cut, or none if blocks alone are divided."""
    layout = prepared.program.layout
    offset = len(layout.skippable)
    table = quiet_table("neuron groups")
    for column in ("group", "neurons", "tensors"):
        table.add_column(column)
    for group in layout.groups[1 if layout.skippable else 0 :]:
        ids = range(offset, offset + group.size)
        names = [
            tensor.name
            for tensor in layout.tensors
            if any(
                neurons is not None and ((neurons >= ids.start) & (neurons < ids.stop)).any()
                for neurons in tensor.neurons
            )
        ]
        table.add_row(group.name, f"{group.size:,}", ", ".join(names))
        offset += group.size
    return [table] if table.row_count else []
