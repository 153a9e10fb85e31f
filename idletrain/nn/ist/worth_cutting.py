"""Say which neuron groups are worth a cut into a run's subnets."""

from __future__ import annotations

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.ist.discovery import NeuronKind
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.narrow_blocks import block_of
from idletrain.nn.ist.partition import widths
from idletrain.nn.ist.schemes import holders_within
from idletrain.phases import TrainingPhase

# Units of a recurrent state in each subnet. An LSTM of 64 units on digits, cut in two, has an accuracy of 0.96 with 32
# of them in each subnet; cut in four, 0.87 with 16; by local SGD 0.98.
LEAST_RECURRENT = 32


def unsuitable(training: TrainingSettings, depth: Layout | None, candidate: NeuronKind) -> str:
    """Return the reason why a group is not worth a cut into the subnets of all phases, or "".

    Args:
        training: The job's settings.
        depth: The layout by depth, where subnets lack some blocks, too; else None.
        candidate: The group.
    """
    within = None
    if depth is not None:
        try:
            within = block_of(depth, (name for name, _ in candidate.labels))
        except ValueError:
            return "it reaches beyond one block, and only what is within a block or outside of all is cut"
    parts = [(_parts(phase, within), phase.copies) for phase in training.every_phase]
    return next(filter(None, (_too_narrow(candidate, *each) for each in parts)), "")


def _parts(phase: TrainingPhase, within: int | None) -> int:
    """Return among how many subnets a group is divided, `within` a block or in none."""
    return phase.subnets if within is None else holders_within(phase.subnets, phase.copies)


def _too_narrow(candidate: NeuronKind, subnets: int, copies: int) -> str:
    left = candidate.size * copies // subnets
    if not left:
        several = f", even with each in {copies}" if copies > 1 else ""
        return f"it has fewer neurons ({candidate.size}) than there are subnets ({subnets}){several}"
    if candidate.stream:
        # A network of ResNet-18's shape, 32 channels wide, on Fashion-MNIST, four subnets, 400 steps: 0.80 with its
        # streams cut, 0.87 with them whole; trained whole 0.89. All layers meet in a stream.
        return "it is a residual stream, which every subnet needs whole"
    if candidate.recurrent and left < LEAST_RECURRENT:
        return (
            f"it is a recurrent state, of which each of {subnets} subnets would have {left} of {candidate.size} units, "
            f"fewer than {LEAST_RECURRENT}"
        )
    return ""


def check_widths(layout: Layout, phase: TrainingPhase) -> None:
    """Check that every subnet of a phase has neurons of every group, of those within a block where it has the block.

    Raises:
        JobError: there are more subnets than neurons.
    """
    for group in layout.groups[1 if layout.skippable else 0 :]:
        parts = _parts(phase, group.within)
        try:
            widths(group.size, (min(1.0, phase.copies / parts),) * parts, phase.copies)
        except ValueError:
            raise JobError(
                f"training.subnets: {phase.subnets} is more than the {group.size} neurons of group {group.name}; "
                f"use at most {group.size * phase.copies} or exclude the group"
            ) from None
