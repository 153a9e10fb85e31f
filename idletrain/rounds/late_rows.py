"""Rows that were missing from accepted updates; their workers send them later, in the next compute phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idletrain.exchange.codec import ROW_BYTES
from idletrain.exchange.messages import LeaseId, PartialPayload
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.program import Program
from idletrain.worker import encoding
from idletrain.worker.encoding import ROUNDS_KEPT


@dataclass(frozen=True)
class IncompleteUpdate:
    """An accepted update of which rows are missing."""

    subnet: Subnet
    partial: PartialPayload


class LateRows:
    """The incomplete updates of the last rounds.

    Args:
        program: The run's program.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._incomplete: dict[LeaseId, IncompleteUpdate] = {}

    def add(self, lease: LeaseId, subnet: Subnet, partial: PartialPayload) -> None:
        """Remember an update that was accepted without some of its rows."""
        self._incomplete = {k: v for k, v in self._incomplete.items() if k.round >= lease.round - ROUNDS_KEPT}
        self._incomplete[lease] = IncompleteUpdate(subnet, partial)

    def missing(self, lease: LeaseId) -> bytes:
        """Return which rows of an update are missing, a bit each, the lowest first; empty if none are."""
        incomplete = self._incomplete.get(lease)
        return np.packbits(~incomplete.partial.received, bitorder="little").tobytes() if incomplete else b""

    def pop(self, lease: LeaseId) -> IncompleteUpdate | None:
        """Return an incomplete update and forget it: its rows have arrived."""
        return self._incomplete.pop(lease, None)

    def change(self, incomplete: IncompleteUpdate, rows: memoryview) -> Tensor | None:
        """Decode the missing rows and return by how much they change the subnet's values `[P]`.

        Return None if `rows`, the rows one after the other, does not hold exactly the missing ones.
        """
        if len(rows) != ROW_BYTES * int((~incomplete.partial.received).sum()):
            return None
        codec = encoding.codec(self._program, incomplete.subnet, "push")
        assert codec
        before = torch.frombuffer(incomplete.partial.content, dtype=torch.uint8)
        after = before.clone()
        placed = after[codec.first_row :].view(-1, ROW_BYTES)
        placed[torch.from_numpy(~incomplete.partial.received)] = torch.frombuffer(rows, dtype=torch.uint8).view(
            -1, ROW_BYTES
        )
        change = codec.decode(after) - codec.decode(before, None, incomplete.partial.received)
        return change[: incomplete.subnet.parameters]
