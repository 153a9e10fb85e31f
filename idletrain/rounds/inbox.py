"""What comes from workers, until it is an update or a mark: parts, checks, codes made values again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.exchange.codec import ROW_BYTES, Codec
from idletrain.exchange.parts import Parts
from idletrain.exchange.wire import PushHeader, Reply, checksum, inspect, inspect_values
from idletrain.nn.network import Network
from idletrain.nn.program import Program
from idletrain.nn.subnets import Subnet
from idletrain.rounds import coding
from idletrain.rounds.journal import Payload


@dataclass(frozen=True)
class Begun:
    """A subnet as the open round began with it."""

    subnet: Subnet
    network: Network


class Inbox:
    """Pushes that are coming.

    Args:
        program: The run's.
        salvage: Whether updates of fewer steps than all are taken, and what has come of one.
    """

    def __init__(self, program: Program, *, salvage: bool) -> None:
        self._program, self._salvage, self._parts = program, salvage, Parts()
        self._gains: dict[tuple[int, int], NDArray[np.float64]] = {}

    def hold(
        self, attempt: int, steps: int, train_seconds: float, start: int, frames: Sequence[memoryview], subnet: Subnet
    ) -> bool:
        """Hold a part; False if it cannot be one of this subnet's."""
        most = 4 * self._program.buffer_size(subnet, travelling=False)
        return self._parts.hold(attempt, steps, start, frames, most, train_seconds)

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._parts.drop(attempt)
        self._gains = {key: gains for key, gains in self._gains.items() if key[0] != attempt}

    def covered(self, attempt: int, steps: int, subnet: Subnet) -> float:
        """Which share of an update's squared norm has come, if it is of use before it is whole; else 0."""
        codec = coding.codec(self._program, subnet, "push") if self._salvage else None
        frames = self._parts.payload(attempt, steps)
        size = sum(len(frame) for frame in frames)
        if not codec or not codec.rows or size < codec.first_row:
            return 0.0
        if (attempt, steps) not in self._gains:
            content = _joined(frames)
            exact = content[: 4 * (codec.size - codec.coded)].view(torch.float32)
            self._gains[attempt, steps] = codec.gains(content) * bool(exact.isfinite().all())
        return float(self._gains[attempt, steps][: _rows(codec, size)].sum())

    def came(self, attempt: int, steps: int) -> Payload:
        """What is here of a payload, from its beginning on."""
        return Payload(self._parts.payload(attempt, steps), self._parts.train_seconds(attempt, steps), 0)

    def salvaged(self, came: Payload, begun: Begun) -> Payload:
        """What has come of an update whose worker is gone, as values; what has not is no change."""
        codec = coding.codec(self._program, begun.subnet, "push")
        assert codec
        content = torch.zeros(codec.nbytes, dtype=torch.uint8)
        content[: came.size_bytes] = _joined(came.frames)
        got = np.arange(codec.rows) < _rows(codec, came.size_bytes)
        return _as_payload(codec.decode(content, begun.network.pull(begun.subnet), got), came.train_seconds)

    def read(
        self, header: PushHeader, frames: Sequence[memoryview], begun: Begun | None
    ) -> tuple[Payload, Reply | None]:
        """A push as values, of its parts if it has no frames, and why it cannot be taken, if so."""
        frames = frames or self._parts.payload(header.lease.attempt, header.steps)
        payload = Payload(frames, header.train_seconds, header.checksum)
        whole = header.update and header.steps == self._program.training.local_steps
        if begun is None or not (whole or self._is_part(header)):
            return payload, Reply.WRONG_SHAPE
        codec = coding.codec(self._program, begun.subnet, "push") if header.update else None
        size = 4 * self._program.buffer_size(begun.subnet, travelling=header.update)
        if fault := inspect(header, frames, codec.nbytes if codec else size):
            return payload, fault
        if codec:  # of a round that is over by now the network is another: then nobody takes what comes of it
            values = codec.decode(_joined(frames), begun.network.pull(begun.subnet))
            payload = _as_payload(values, header.train_seconds)
        return payload, inspect_values(payload.frames)

    def _is_part(self, header: PushHeader) -> bool:
        """Whether it can be a mark, or an update of fewer steps than all."""
        early = 0 < header.steps < self._program.training.local_steps
        return early and (not header.update or (self._salvage and self._program.training.exchange.push != "fp32"))


def _rows(codec: Codec, size: int) -> int:
    """How many rows are whole in so many bytes from the beginning."""
    return max(0, size - codec.first_row) // ROW_BYTES


def _joined(frames: Sequence[memoryview]) -> Tensor:
    return torch.frombuffer(bytearray().join(frames) or bytearray(1), dtype=torch.uint8)


def _as_payload(values: Tensor, train_seconds: float) -> Payload:
    frames = [values.numpy().data.cast("B")]
    return Payload(frames, train_seconds, checksum(frames))
