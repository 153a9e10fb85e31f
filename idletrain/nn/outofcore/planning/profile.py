"""The profile that a planner works from: a network's units in forward order, and the swap link. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

MODES = "KSRQ"  # keep, swap, recompute from a kept input, recompute from a swapped input


class Held(NamedTuple):
    """A tensor that the network's own code holds while a unit runs; `owner` is the unit whose input it is, or -1."""

    owner: int
    size: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the network that is kept, swapped or recomputed as a whole.

    Attributes:
        name: Its module's name, as the user knows it.
        forward_seconds: Compute time of the forward pass.
        backward_seconds: Compute time of the backward pass, without recomputing.
        recompute_seconds: Compute time of the forward pass up to the last tensor that is saved.
        input_bytes: Size of the input tensor.
        output_bytes: Size of the output tensor, which is the next unit's input.
        inner_bytes: Size of the tensors saved for the backward pass beside input and output.
        tensors: Number of saved tensors that are large enough to be swapped, the input among them.
        saves_input: Whether its operations save the input.
        saves_output: Whether its operations save the output.
        forward_bytes: Peak of a forward pass that saves nothing, without the input.
        saving_bytes: Peak of a forward pass that saves, without the input, saved tensors included.
        held: Tensors that the network's code holds meanwhile: earlier outputs that are used again, and arguments of
            enclosing modules.
        waiting_bytes: Gradients of such outputs that wait while it runs backward, or is recomputed.
        backward_bytes: Peak of the backward pass, without waiting gradients, saved tensors and the output's gradient.
        parameter_bytes: Size of its parameters; their gradients take as much again.
        state_bytes: Size of its parameters' optimizer state.
        follows: Whether its only input is the output of the unit before, so that both can be joined.
        modes: The modes that it allows, of `KSRQ`.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    input_bytes: int
    output_bytes: int
    inner_bytes: int
    tensors: int = 1
    saves_input: bool = True
    saves_output: bool = False
    forward_bytes: int = 0
    saving_bytes: int = 0
    held: tuple[Held, ...] = ()
    waiting_bytes: int = 0
    backward_bytes: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    follows: bool = True
    modes: str = MODES


class SwapLink(NamedTuple):
    """Speed of swapping, each way with both ways in use, and the computing thread's seconds per tensor."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    seconds_per_tensor: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured network.

    Attributes:
        units: Its units in forward order.
        link: The link to the disk or to the host's memory.
        resident_bytes: Bytes in memory at all times beside the units' parameters and their optimizer state.
        batch_size: Samples per step.
        across_batch: The reason why a batch cannot be cut into micro-batches, or "" if it can.
    """

    units: tuple[Unit, ...]
    link: SwapLink
    resident_bytes: int = 0
    batch_size: int = 1
    across_batch: str = ""

    @property
    def compute_seconds(self) -> float:
        """Compute time of a step with nothing swapped or recomputed."""
        return sum(unit.forward_seconds + unit.backward_seconds for unit in self.units)


def micro_batch(profile: Profile, count: int) -> Profile:
    """Return the profile of one of `count` equal micro-batches; parameter sizes are unchanged."""

    def part(size: int) -> int:
        return -(-size // count)

    units = tuple(
        replace(
            unit,
            forward_seconds=unit.forward_seconds / count,
            backward_seconds=unit.backward_seconds / count,
            recompute_seconds=unit.recompute_seconds / count,
            input_bytes=part(unit.input_bytes),
            output_bytes=part(unit.output_bytes),
            inner_bytes=part(unit.inner_bytes),
            forward_bytes=part(unit.forward_bytes),
            saving_bytes=part(unit.saving_bytes),
            held=tuple(held._replace(size=part(held.size)) for held in unit.held),
            waiting_bytes=part(unit.waiting_bytes),
            backward_bytes=part(unit.backward_bytes),
        )
        for unit in profile.units
    )
    return replace(profile, units=units)
