"""Encode and decode a subnet's buffer as the job's `training.exchange` says."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from idletrain.exchange.codec import SMALL_TENSOR, Codec, spans_of
from idletrain.exchange.messages import LeaseId
from idletrain.nn.ist.randomness import key
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.program import Program

ROUNDS_KEPT = 2  # later rows of an update are dropped: they belong to a network that nobody has any more
Direction = Literal["pull", "push"]
DIRECTIONS: tuple[Direction, ...] = ("pull", "push")


def codec(program: Program, subnet: Subnet, direction: Direction) -> Codec | None:
    """Return the codec of a subnet's buffer in a direction; None where it travels as float32."""
    kind = getattr(program.training.exchange, direction)
    if kind == "fp32":
        return None
    sizes = (
        (shape.numel(), len(shape) > 1 and shape.numel() >= SMALL_TENSOR and not tensor.buffer)
        for tensor, shape in zip(subnet.layout.tensors, map(torch.Size, subnet.shapes), strict=True)
    )
    return Codec(kind, spans_of(sizes), program.buffer_size(subnet, persistent=True), ranked=direction == "push")


def nbytes(program: Program, subnet: Subnet, direction: Direction) -> int:
    """Return how many bytes a subnet's buffer takes in a direction."""
    chosen = codec(program, subnet, direction)
    return chosen.nbytes if chosen else 4 * program.buffer_size(subnet, persistent=True)


def encode_pull(program: Program, subnet: Subnet, flat: Tensor) -> Tensor:
    """Encode a buffer for its way to a worker."""
    chosen = codec(program, subnet, "pull")
    return chosen.encode(flat) if chosen else flat


def decode_pull(program: Program, subnet: Subnet, content: Tensor) -> Tensor:
    """Decode a pulled payload into the float32 buffer to train from; every worker gets the same bits."""
    chosen = codec(program, subnet, "pull")
    return chosen.decode(content) if chosen else content


def encode_update(program: Program, subnet: Subnet, flat: Tensor, baseline: Tensor, lease: LeaseId) -> Tensor:
    """Encode an update as a change from `baseline`, the round's initial values; every worker gets the same bytes."""
    chosen = codec(program, subnet, "push")
    if chosen is None:
        return flat
    return chosen.encode(flat, baseline, key(program.training.seed, "push", lease.round, lease.subnet))
