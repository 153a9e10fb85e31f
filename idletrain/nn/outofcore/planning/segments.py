"""Group a plan's units into segments, with the bytes and seconds that each segment takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from idletrain.nn.outofcore.planning.profile import Unit


class Segment(NamedTuple):
    """Units that run as one.

    Attributes:
        first: Its first unit.
        last: Its last unit.
        mode: Its mode letter.
        swapped: Whether its stored tensors are written out.
        stored_bytes: Saved tensors that the forward pass adds to memory.
        read_bytes: Tensors that must be back before the backward pass, also an input that another segment stored.
        freed_bytes: Saved tensors that are free after the backward pass.
        forward_bytes: What the forward pass needs beside all live tensors.
        backward_bytes: What the backward pass needs beside all live tensors.
        forward_seconds: Compute time of the forward pass.
        recompute_seconds: Compute time of recomputing.
        backward_seconds: Compute time of the backward pass.
        parameter_bytes: Size of its parameters.
        state_bytes: Size of their optimizer state.
        swapped_tensors: Number of tensors that it writes out.
    """

    first: int
    last: int
    mode: str
    swapped: bool
    stored_bytes: int
    read_bytes: int
    freed_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    parameter_bytes: int
    state_bytes: int
    swapped_tensors: int


def build_segments(
    units: Sequence[Unit], unit_modes: Sequence[str], streamed: bool, known: dict[object, Segment]
) -> list[Segment]:
    """Build the segments of a plan.

    Args:
        units: The network's units.
        unit_modes: A mode letter for each.
        streamed: Whether parameters and their gradients are streamed and so not counted.
        known: Segments of other plans for the same units; reused and added to.
    """
    firsts = [i for i, letter in enumerate(unit_modes) if letter != "m"]
    ends = [*firsts[1:], len(unit_modes)]
    segments: list[Segment] = []
    before, swapped = "", False
    for first, end in zip(firsts, ends, strict=True):
        mode = unit_modes[first]
        # The first unit that saves a tensor stores it: a ReLU's output is also the next unit's input.
        stored = bool(before) and before in "KS" and units[first - 1].saves_output
        after = end < len(unit_modes) and (unit_modes[end] in "RQ" or units[end].saves_input)
        held = max(_held_bytes(units, unit_modes, unit) for unit in units[first:end])
        key = (first, end, mode, stored, stored and swapped, after, held)
        if key not in known:
            build = _saving if mode in "KS" else _recomputing
            segment = build(units, first, end - 1, mode, stored, stored and swapped, streamed, after)
            known[key] = segment._replace(forward_bytes=segment.forward_bytes + held)
        segments.append(known[key])
        before, swapped = mode, mode in "SQ"
    return segments


def _held_bytes(units: Sequence[Unit], unit_modes: Sequence[str], unit: Unit) -> int:
    """Sum what the network's code holds while a unit runs and that no saved tensor keeps in memory anyway."""
    return sum(
        h.size for h in unit.held if h.owner < 0 or unit_modes[h.owner] in "SQm" or not units[h.owner].saves_input
    )


def _saving(
    units: Sequence[Unit], first: int, last: int, mode: str, stored: bool, by_swap: bool, streamed: bool, after: bool
) -> Segment:
    """Build a segment of one unit whose saved tensors are kept or swapped.

    Args:
        units: The network's units.
        first: The unit.
        last: The same unit.
        mode: `K` or `S`.
        stored: Whether the segment before stores the input.
        by_swap: Whether it swaps the input, too.
        streamed: Whether gradients are streamed and so not counted.
        after: Whether the next segment needs the output for its backward pass.
    """
    unit = units[first]
    own_input = unit.input_bytes if unit.saves_input and not stored else 0
    size = own_input + unit.inner_bytes + (unit.output_bytes if unit.saves_output else 0)
    read = size if mode == "S" else 0
    if mode == "S" and unit.saves_output and after:
        read -= unit.output_bytes  # the next segment's backward pass has read it
    if by_swap and unit.saves_input:
        read += unit.input_bytes
    held = unit.input_bytes if not stored or by_swap else 0  # by the caller, while the unit runs
    gradient = unit.parameter_bytes if not streamed else 0
    return Segment(
        first=first,
        last=last,
        mode=mode,
        swapped=mode == "S",
        stored_bytes=size,
        read_bytes=read,
        freed_bytes=size,
        forward_bytes=held + unit.saving_bytes,
        backward_bytes=unit.output_bytes + unit.backward_bytes + unit.waiting_bytes + gradient,
        forward_seconds=unit.forward_seconds,
        recompute_seconds=0.0,
        backward_seconds=unit.backward_seconds,
        parameter_bytes=unit.parameter_bytes,
        state_bytes=unit.state_bytes,
        swapped_tensors=unit.tensors - (stored and unit.saves_input) if mode == "S" else 0,
    )


def _recomputing(
    units: Sequence[Unit], first: int, last: int, mode: str, stored: bool, by_swap: bool, streamed: bool, _after: bool
) -> Segment:
    """Build a segment whose units are recomputed from its input, which is kept (`R`) or swapped (`Q`).

    The arguments are those of `_saving`.
    """
    members = units[first : last + 1]
    entering = members[0].input_bytes
    size = 0 if stored else entering
    swapped = mode == "Q"
    read = entering if by_swap or (not stored and swapped) else 0
    live = peak = gradients = 0
    saved_bytes = []
    for u, unit in enumerate(members):
        saved = unit.inner_bytes + (unit.output_bytes if unit.saves_output else 0)
        if u and unit.saves_input and not members[u - 1].saves_output:
            saved += unit.input_bytes
        peak = max(peak, live + (unit.input_bytes if u else 0) + unit.saving_bytes)
        saved_bytes.append(saved)
        live += saved
    peak += members[-1].output_bytes  # the gradient waits meanwhile
    for unit, saved in zip(reversed(members), reversed(saved_bytes), strict=True):
        gradients += 0 if streamed else unit.parameter_bytes
        peak = max(peak, live + unit.output_bytes + unit.backward_bytes + gradients)
        live -= saved
    peak += max(unit.waiting_bytes for unit in members)
    between = max(unit.forward_bytes + (unit.input_bytes if u else 0) for u, unit in enumerate(members))
    return Segment(
        first=first,
        last=last,
        mode=mode,
        swapped=swapped,
        stored_bytes=size,
        read_bytes=read,
        freed_bytes=size,
        forward_bytes=entering * (not stored or by_swap) + between,
        backward_bytes=peak,
        forward_seconds=sum(unit.forward_seconds for unit in members),
        recompute_seconds=sum(unit.recompute_seconds for unit in members),
        backward_seconds=sum(unit.backward_seconds for unit in members),
        parameter_bytes=sum(unit.parameter_bytes for unit in members),
        state_bytes=sum(unit.state_bytes for unit in members),
        swapped_tensors=int(swapped and not stored),
    )
