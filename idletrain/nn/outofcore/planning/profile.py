"""What a planner knows of a network: its units in forward order, and the link to where tensors are swapped. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

MODES = "KSRQ"  # keep, swap, recompute from a kept input, recompute from a swapped input


class Held(NamedTuple):
    """A tensor that the network itself holds while a unit runs; `owner` is the unit whose input it is, or -1."""

    owner: int
    size: int


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of the network that is kept, swapped or recomputed as a whole.

    Attributes:
        name: As the user knows it.
        forward_seconds: Of compute, as are the next two.
        backward_seconds: Without recomputing.
        recompute_seconds: The forward pass up to the last tensor that is saved.
        input_bytes: The tensor that enters.
        output_bytes: The tensor that leaves, which is the next unit's input.
        inner_bytes: Saved for the backward pass beside input and output.
        tensors: How many tensors it saves that are large enough to be swapped, its input among them.
        saves_input: Whether its operations save the input.
        saves_output: Whether they save the output.
        forward_bytes: Most that a forward pass which saves nothing needs beside the input.
        saving_bytes: Most that a forward pass which saves needs beside the input, what it saves included.
        held: What the network holds meanwhile: earlier outputs that are used again, what modules around it were given.
        waiting_bytes: Gradients of such outputs that wait while it runs backward, or is recomputed.
        backward_bytes: Most that the backward pass needs beside these, what was saved and the output's gradient.
        parameter_bytes: Its parameters' values; as much again for their gradients.
        state_bytes: The optimizer's state of its parameters.
        follows: Whether its input is the output of the unit before and of nothing else, so that both can be one.
        modes: What may be done with it, of `KSRQ`.
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
    """How fast tensors leave and come back, both ways at once, and what each takes of the computing thread's time."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    seconds_per_tensor: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A network as measured.

    Attributes:
        units: In forward order.
        link: To the disk or to the host's memory.
        resident_bytes: What is in memory at all times beside the units' parameters and their optimizer state.
        batch_size: Samples of a step.
        across_batch: Why a batch cannot be cut into micro-batches, or "" if it can.
    """

    units: tuple[Unit, ...]
    link: SwapLink
    resident_bytes: int = 0
    batch_size: int = 1
    across_batch: str = ""

    @property
    def compute_seconds(self) -> float:
        """A step with nothing swapped or recomputed."""
        return sum(unit.forward_seconds + unit.backward_seconds for unit in self.units)


def micro_batch(profile: Profile, count: int) -> Profile:
    """The profile of one of `count` equal micro-batches; parameters stay what they are."""

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
