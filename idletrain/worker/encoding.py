"""How a run's subnets travel, by the job's word."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from idletrain.exchange.codec import SMALL_TENSOR, Codec, spans_of
from idletrain.exchange.messages import LeaseId
from idletrain.nn.ist.randomness import key
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.program import Program

ROUNDS_KEPT = 2  # rows of an update that come later are lost: they would be of a network that nobody has any more
Direction = Literal["pull", "push"]
DIRECTIONS: tuple[Direction, ...] = ("pull", "push")


def codec(program: Program, subnet: Subnet, direction: Direction) -> Codec | None:
    """What codes a subnet's buffer; None where it travels as it is."""
    kind = getattr(program.training.exchange, direction)
    if kind == "fp32":
        return None
    sizes = (
        (shape.numel(), len(shape) > 1 and shape.numel() >= SMALL_TENSOR) for shape in map(torch.Size, subnet.shapes)
    )
    return Codec(kind, spans_of(sizes), program.buffer_size(subnet, persistent=True), ranked=direction == "push")


def nbytes(program: Program, subnet: Subnet, direction: Direction) -> int:
    """Bytes of a subnet's buffer on that way."""
    found = codec(program, subnet, direction)
    return found.nbytes if found else 4 * program.buffer_size(subnet, persistent=True)


def encode_pull(program: Program, subnet: Subnet, flat: Tensor) -> Tensor:
    """A buffer as it goes to a worker."""
    found = codec(program, subnet, "pull")
    return found.encode(flat) if found else flat


def decode_pull(program: Program, subnet: Subnet, content: Tensor) -> Tensor:
    """The buffer that a worker trains from: the same, whoever it is."""
    found = codec(program, subnet, "pull")
    return found.decode(content) if found else content


def encode_update(program: Program, subnet: Subnet, flat: Tensor, baseline: Tensor, lease: LeaseId) -> Tensor:
    """A whole update as it comes from a worker, by what it began with; the same, whoever trained it."""
    found = codec(program, subnet, "push")
    if found is None:
        return flat
    return found.encode(flat, baseline, key(program.training.seed, "push", lease.round, lease.subnet))
