"""Puts pushed parts together, checks them and decodes them into an update or a progress checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.exchange.codec import Codec, ReceivedMask
from idletrain.exchange.messages import (
    AcceptanceRule,
    PartialPayload,
    PushHeader,
    Reply,
    checksum,
    inspect,
    inspect_values,
)
from idletrain.exchange.parts import Parts, PayloadKey
from idletrain.job import ExchangeSettings
from idletrain.nn.ist.subnets import Subnet, views
from idletrain.nn.program import Program
from idletrain.rounds.durable.run_directory import Payload
from idletrain.worker import encoding


@dataclass(frozen=True)
class Baseline:
    """A subnet, and a function that returns a copy of the values that it began with, as a flat buffer."""

    subnet: Subnet
    began: Callable[[], Tensor]


@dataclass(frozen=True)
class DecodedPush:
    """A push, decoded into float32 values.

    Attributes:
        payload: The values; if there is a fault, the bytes as they arrived.
        fault: Why the push is refused, or None.
        norm_fraction: Fraction of the update's squared norm that the values hold.
        missing_rows: The partial update, if rows of it are missing; they may follow.
        where: The first tensor whose values are not finite, if that is the fault.
    """

    payload: Payload
    fault: Reply | None = None
    norm_fraction: float = 1.0
    missing_rows: PartialPayload | None = None
    where: str = ""


class Reassembly:
    """The pushes that are arriving.

    Args:
        program: The run's program.
        salvage: Whether updates of fewer steps than all are accepted, and rows of updates that never finish.
    """

    def __init__(self, program: Program, *, salvage: bool) -> None:
        self._program, self._salvage, self._parts = program, salvage, Parts()
        self._scattered: dict[tuple[int, int], PartialPayload] = {}
        self._gains: dict[tuple[int, int], NDArray[np.float64]] = {}

    def hold(self, header: PushHeader, start: int, frames: Sequence[memoryview], subnet: Subnet) -> bool:
        """Hold a part; return False if it cannot belong to this subnet."""
        size = self._size(subnet, update=header.update)
        return self._parts.hold(header.lease.attempt, _payload_key(header), start, frames, size, header.train_seconds)

    def note(self, header: PushHeader, content: memoryview, pieces: ReceivedMask, piece: int, subnet: Subnet) -> None:
        """Keep which pieces of an update, of `piece` bytes each, have arrived in any order, if they can be used yet."""
        codec = encoding.codec(self._program, subnet, "push") if header.update else None
        required_pieces = -(-codec.first_row // piece) if codec else 0
        if codec and codec.nbytes == len(content) and pieces[:required_pieces].all():
            partial = PartialPayload(content, codec.rows_within(pieces, piece), header.train_seconds)
            self._scattered[header.lease.attempt, header.steps] = partial

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._parts.drop(attempt)
        for cache in (self._scattered, self._gains):
            for key in [key for key in cache if key[0] == attempt]:
                del cache[key]

    def norm_fraction(self, attempt: int, steps: int, subnet: Subnet) -> float:
        """Return the fraction of an update's squared norm that has arrived; 0 if it can only be used whole."""
        codec = encoding.codec(self._program, subnet, "push") if self._salvage else None
        if not codec or not codec.rows:
            return 0.0
        received = self._received(attempt, steps, codec)
        return float(self._gains_of(attempt, steps, codec)[received].sum()) if received is not None else 0.0

    def is_enough(self, attempt: int, steps: int, subnet: Subnet) -> bool:
        """Return whether enough rows of an update have arrived for it to be accepted."""
        codec, exchange = encoding.codec(self._program, subnet, "push"), self._program.training.exchange
        if not exchange.loss or not codec or not codec.rows:
            return False
        received = self._received(attempt, steps, codec)
        return received is not None and _is_enough(
            codec, received, exchange, lambda: self._gains_of(attempt, steps, codec)
        )

    def acceptance_rule(self, header: PushHeader, size: int, subnet: Subnet) -> AcceptanceRule | Reply:
        """Return the rule by which a payload of `size` bytes, arriving in any order, is accepted; or why it is not."""
        codec, exchange = encoding.codec(self._program, subnet, "push"), self._program.training.exchange
        if size != self._size(subnet, update=header.update):
            return Reply.WRONG_SHAPE
        if not exchange.loss or not codec or not codec.rows or not header.update:
            return AcceptanceRule(size, 1.0)

        gains: list[NDArray[np.float64]] = []

        def is_acceptable(content: memoryview, pieces: ReceivedMask, piece_bytes: int) -> bool:
            if not gains:
                gains.append(_gains(codec, torch.frombuffer(content, dtype=torch.uint8)))
            return _is_enough(codec, codec.rows_within(pieces, piece_bytes), exchange, lambda: gains[0])

        return AcceptanceRule(codec.first_row, 1 - exchange.loss, is_acceptable)

    def arrived(self, attempt: int, steps: int, baseline: Baseline) -> PartialPayload:
        """Return the rows of an update that arrived, as parts in order or scattered pieces, whichever are more."""
        codec = encoding.codec(self._program, baseline.subnet, "push")
        assert codec
        content = bytearray().join(self._parts.payload(attempt, (steps, True)))
        received = codec.rows_before(len(content))
        scattered = self._scattered.get((attempt, steps))
        if scattered and scattered.received.sum() > received.sum():
            return scattered
        seconds = self.train_seconds(attempt, steps)
        return PartialPayload(memoryview(content.ljust(codec.nbytes, b"\0")), received, seconds)

    def train_seconds(self, attempt: int, steps: int) -> float:
        """Return the training time of an update's steps; parts of it have arrived."""
        scattered = self._scattered.get((attempt, steps))
        return scattered.train_seconds if scattered else self._parts.train_seconds(attempt, (steps, True))

    def salvaged(self, arrived: PartialPayload, baseline: Baseline) -> Payload:
        """Decode the rows that arrived of an update; missing rows change nothing."""
        codec = encoding.codec(self._program, baseline.subnet, "push")
        assert codec
        content = torch.frombuffer(arrived.content, dtype=torch.uint8)
        return _as_payload(codec.decode(content, baseline.began(), arrived.received), arrived.train_seconds)

    def read(self, header: PushHeader, frames: Sequence[memoryview], baseline: Baseline | None) -> DecodedPush:
        """Decode a push and check it; without frames, use the parts that have arrived."""
        attempt, steps = header.lease.attempt, header.steps
        whole = header.update and steps == self._program.local_steps(header.lease.round)
        codec = encoding.codec(self._program, baseline.subnet, "push") if baseline and header.update else None
        if not frames and codec and codec.rows and baseline and (whole or self._is_part(header)):
            return self._read_rows(header, codec, baseline)
        frames = frames or self._parts.payload(attempt, _payload_key(header))
        payload = Payload(frames, header.train_seconds, header.checksum)
        if baseline is None or not (whole or self._is_part(header)):
            return DecodedPush(payload, Reply.WRONG_SHAPE)
        if fault := inspect(header, frames, self._size(baseline.subnet, update=header.update)):
            return DecodedPush(payload, fault)
        if codec:
            values = codec.decode(_joined(frames), baseline.began())
            payload = _as_payload(values, header.train_seconds)
        return _checked(DecodedPush(payload), baseline.subnet)

    def _read_rows(self, header: PushHeader, codec: Codec, baseline: Baseline) -> DecodedPush:
        """Decode an update that arrived in parts and of which rows may be missing."""
        attempt, steps = header.lease.attempt, header.steps
        partial = replace(self.arrived(attempt, steps, baseline), train_seconds=header.train_seconds)
        payload = Payload([partial.content], header.train_seconds, header.checksum)
        whole = bool(partial.received.all())
        if not whole and not self.is_enough(attempt, steps, baseline.subnet):
            return DecodedPush(payload, Reply.WRONG_SHAPE)
        if whole and (fault := inspect(header, payload.frames, codec.nbytes)):
            return DecodedPush(payload, fault)
        norm_fraction = 1.0 if whole else float(self._gains_of(attempt, steps, codec)[partial.received].sum())
        return _checked(
            DecodedPush(self.salvaged(partial, baseline), None, norm_fraction, None if whole else partial),
            baseline.subnet,
        )

    def _size(self, subnet: Subnet, *, update: bool) -> int:
        """Return the bytes of a subnet's update or progress checkpoint as it travels."""
        if update:
            return encoding.nbytes(self._program, subnet, "push")
        return 4 * self._program.buffer_size(subnet, persistent=False)

    def _received(self, attempt: int, steps: int, codec: Codec) -> ReceivedMask | None:
        """Return which rows of an update have arrived; None before its uncoded beginning is complete."""
        size = sum(len(frame) for frame in self._parts.payload(attempt, (steps, True)))
        received = codec.rows_before(size)
        scattered = self._scattered.get((attempt, steps))
        if scattered and scattered.received.sum() > received.sum():
            return scattered.received
        return received if size >= codec.first_row else None

    def _gains_of(self, attempt: int, steps: int, codec: Codec) -> NDArray[np.float64]:
        """Return the share of each row `[rows]` in an update's squared norm; its uncoded beginning has arrived."""
        if (attempt, steps) not in self._gains:
            scattered = self._scattered.get((attempt, steps))
            content = scattered.content if scattered else bytearray().join(self._parts.payload(attempt, (steps, True)))
            self._gains[attempt, steps] = _gains(codec, torch.frombuffer(content, dtype=torch.uint8))
        return self._gains[attempt, steps]

    def _is_part(self, header: PushHeader) -> bool:
        """Return whether a push can be a progress checkpoint, or an update of fewer steps than all."""
        early = 0 < header.steps < self._program.local_steps(header.lease.round)
        return early and (not header.update or (self._salvage and self._program.training.exchange.push != "fp32"))


def _checked(push: DecodedPush, subnet: Subnet) -> DecodedPush:
    """Return the push, with a fault if its values are not all finite."""
    fault = inspect_values(push.payload.frames)
    if fault is None:
        return push
    values = torch.frombuffer(bytearray().join(push.payload.frames), dtype=torch.float32)[: subnet.parameters]
    names = (tensor.name for tensor in subnet.layout.tensors)
    not_finite = (
        name for name, part in zip(names, views(values, subnet.shapes), strict=True) if not part.isfinite().all()
    )
    return replace(push, fault=fault, where=next(not_finite, "the optimizer's state"))


def _payload_key(header: PushHeader) -> PayloadKey:
    return header.steps, header.update


def _is_enough(
    codec: Codec, received: ReceivedMask, exchange: ExchangeSettings, gains: Callable[[], NDArray[np.float64]]
) -> bool:
    """Return whether no more rows, and no more of the squared norm, are missing than the job allows."""
    return bool((~received).sum() <= exchange.loss * codec.rows and gains()[~received].sum() <= exchange.norm_loss)


def _gains(codec: Codec, content: Tensor) -> NDArray[np.float64]:
    """Return the share of each row `[rows]` in the squared norm; zeros if the uncoded values are not finite."""
    exact = content[: 4 * (codec.size - codec.coded)].view(torch.float32)
    return codec.gains(content) * bool(exact.isfinite().all())


def persistent_part(checkpoint: Payload, size: int) -> Payload:
    """Return the part of a checkpoint that goes from round to round: its first `size` bytes."""
    if checkpoint.size_bytes <= size:
        return checkpoint
    frames = [memoryview(bytearray().join(checkpoint.frames))[:size]]
    return Payload(frames, checkpoint.train_seconds, checksum(frames))


def _joined(frames: Sequence[memoryview]) -> Tensor:
    return torch.frombuffer(bytearray().join(frames) or bytearray(1), dtype=torch.uint8)


def _as_payload(values: Tensor, train_seconds: float) -> Payload:
    frames = [values.numpy().data.cast("B")]
    return Payload(frames, train_seconds, checksum(frames))
