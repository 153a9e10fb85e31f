"""What updates that were taken lack: rows that their workers send later, in the next compute phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idletrain.exchange.codec import ROW_BYTES
from idletrain.exchange.messages import Arrival, LeaseId
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.program import Program
from idletrain.worker import encoding
from idletrain.worker.encoding import ROUNDS_KEPT


@dataclass(frozen=True)
class Lacking:
    """One such update."""

    subnet: Subnet
    arrival: Arrival


class Owed:
    """Updates of the last rounds of which rows are missing.

    Args:
        program: The run's.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lacking: dict[LeaseId, Lacking] = {}

    def add(self, lease: LeaseId, subnet: Subnet, arrival: Arrival) -> None:
        """An update was taken without some of its rows."""
        self._lacking = {k: v for k, v in self._lacking.items() if k.round >= lease.round - ROUNDS_KEPT}
        self._lacking[lease] = Lacking(subnet, arrival)

    def missing(self, lease: LeaseId) -> bytes:
        """Which rows of an update are missing, a bit each; nothing if none are."""
        owed = self._lacking.get(lease)
        return np.packbits(~owed.arrival.got, bitorder="little").tobytes() if owed else b""

    def take(self, lease: LeaseId) -> Lacking | None:
        """What an update lacks, which is owed no more: its rows are here."""
        return self._lacking.pop(lease, None)

    def change(self, owed: Lacking, rows: memoryview) -> Tensor | None:
        """What the missing rows, one behind the other, change about the subnet's values `[P]`; None if they are not as
        many.
        """
        if len(rows) != ROW_BYTES * int((~owed.arrival.got).sum()):
            return None
        codec = encoding.codec(self._program, owed.subnet, "push")
        assert codec
        before = torch.frombuffer(owed.arrival.content, dtype=torch.uint8)
        after = before.clone()
        placed = after[codec.first_row :].view(-1, ROW_BYTES)
        placed[torch.from_numpy(~owed.arrival.got)] = torch.frombuffer(rows, dtype=torch.uint8).view(-1, ROW_BYTES)
        change = codec.decode(after) - codec.decode(before, None, owed.arrival.got)
        return change[: owed.subnet.parameters]
