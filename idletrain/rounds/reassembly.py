"""What comes from workers, until it is an update or a mark: parts, checks, codes made values again."""

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
from idletrain.nn.network import Network
from idletrain.nn.program import Program
from idletrain.rounds.durable.run_directory import Payload
from idletrain.worker import encoding


@dataclass(frozen=True)
class Baseline:
    """A subnet as a round began with it."""

    subnet: Subnet
    network: Network


@dataclass(frozen=True)
class DecodedPush:
    """A push as values.

    Attributes:
        payload: They, or what came if it cannot be taken.
        fault: Why it cannot.
        covered: Which share of the change's squared norm they hold.
        lacking: What came, where some rows did not; they may follow.
        where: The first tensor whose values are not finite, if that is the fault.
    """

    payload: Payload
    fault: Reply | None = None
    norm_fraction: float = 1.0
    missing_rows: PartialPayload | None = None
    where: str = ""


class Reassembly:
    """Pushes that are coming.

    Args:
        program: The run's.
        salvage: Whether updates of fewer steps than all are taken, and what has come of one.
    """

    def __init__(self, program: Program, *, salvage: bool) -> None:
        self._program, self._salvage, self._parts = program, salvage, Parts()
        self._scattered: dict[tuple[int, int], PartialPayload] = {}
        self._gains: dict[tuple[int, int], NDArray[np.float64]] = {}

    def hold(self, header: PushHeader, start: int, frames: Sequence[memoryview], subnet: Subnet) -> bool:
        """Hold a part; False if it cannot be one of this subnet's."""
        most = self._size(subnet, update=header.update)
        return self._parts.hold(header.lease.attempt, _what(header), start, frames, most, header.train_seconds)

    def note(self, header: PushHeader, content: memoryview, pieces: ReceivedMask, piece: int, subnet: Subnet) -> None:
        """Keep which pieces of so many bytes have come of an update, in any order, if they are of use yet."""
        codec = encoding.codec(self._program, subnet, "push") if header.update else None
        needed = -(-codec.first_row // piece) if codec else 0
        if codec and codec.nbytes == len(content) and pieces[:needed].all():
            arrival = PartialPayload(content, codec.rows_within(pieces, piece), header.train_seconds)
            self._scattered[header.lease.attempt, header.steps] = arrival

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._parts.drop(attempt)
        for kept in (self._scattered, self._gains):
            for key in [key for key in kept if key[0] == attempt]:
                del kept[key]

    def norm_fraction(self, attempt: int, steps: int, subnet: Subnet) -> float:
        """Which share of an update's squared norm has come, if it is of use before it is whole; else 0."""
        codec = encoding.codec(self._program, subnet, "push") if self._salvage else None
        if not codec or not codec.rows:
            return 0.0
        got = self._got(attempt, steps, codec)
        return float(self._gains_of(attempt, steps, codec)[got].sum()) if got is not None else 0.0

    def is_enough(self, attempt: int, steps: int, subnet: Subnet) -> bool:
        """Whether no more of an update needs to come now."""
        codec, exchange = encoding.codec(self._program, subnet, "push"), self._program.training.exchange
        if not exchange.loss or not codec or not codec.rows:
            return False
        got = self._got(attempt, steps, codec)
        return got is not None and _is_enough(codec, got, exchange, lambda: self._gains_of(attempt, steps, codec))

    def acceptance_rule(self, header: PushHeader, size: int, subnet: Subnet) -> AcceptanceRule | Reply:
        """What of a payload of so many bytes is enough."""
        codec, exchange = encoding.codec(self._program, subnet, "push"), self._program.training.exchange
        if size != self._size(subnet, update=header.update):
            return Reply.WRONG_SHAPE
        if not exchange.loss or not codec or not codec.rows or not header.update:
            return AcceptanceRule(size, 1.0)

        known: list[NDArray[np.float64]] = []

        def enough(content: memoryview, pieces: ReceivedMask, piece_bytes: int) -> bool:
            if not known:
                known.append(_gains(codec, torch.frombuffer(content, dtype=torch.uint8)))
            return _is_enough(codec, codec.rows_within(pieces, piece_bytes), exchange, lambda: known[0])

        return AcceptanceRule(codec.first_row, 1 - exchange.loss, enough)

    def arrived(self, attempt: int, steps: int, baseline: Baseline) -> PartialPayload:
        """What is here of an update, of its bytes in their places: in parts or scattered, whichever is more."""
        codec = encoding.codec(self._program, baseline.subnet, "push")
        assert codec
        content = bytearray().join(self._parts.payload(attempt, (steps, True)))
        got = codec.rows_before(len(content))
        found = self._scattered.get((attempt, steps))
        if found and found.received.sum() > got.sum():
            return found
        seconds = self.train_seconds(attempt, steps)
        return PartialPayload(memoryview(content.ljust(codec.nbytes, b"\0")), got, seconds)

    def train_seconds(self, attempt: int, steps: int) -> float:
        """Time in the steps of an update that has begun to come."""
        found = self._scattered.get((attempt, steps))
        return found.train_seconds if found else self._parts.train_seconds(attempt, (steps, True))

    def salvaged(self, arrived: PartialPayload, baseline: Baseline) -> Payload:
        """What has come of an update whose worker is gone, as values; what has not is no change."""
        codec = encoding.codec(self._program, baseline.subnet, "push")
        assert codec
        content = torch.frombuffer(arrived.content, dtype=torch.uint8)
        return _as_payload(
            codec.decode(content, baseline.network.pull(baseline.subnet), arrived.received), arrived.train_seconds
        )

    def read(self, header: PushHeader, frames: Sequence[memoryview], baseline: Baseline | None) -> DecodedPush:
        """A push as values; without frames, of what has come before."""
        attempt, steps = header.lease.attempt, header.steps
        whole = header.update and steps == self._program.training.local_steps
        codec = encoding.codec(self._program, baseline.subnet, "push") if baseline and header.update else None
        if not frames and codec and codec.rows and baseline and (whole or self._is_part(header)):
            return self._read_rows(header, codec, baseline)
        frames = frames or self._parts.payload(attempt, _what(header))
        payload = Payload(frames, header.train_seconds, header.checksum)
        if baseline is None or not (whole or self._is_part(header)):
            return DecodedPush(payload, Reply.WRONG_SHAPE)
        if fault := inspect(header, frames, self._size(baseline.subnet, update=header.update)):
            return DecodedPush(payload, fault)
        if codec:
            values = codec.decode(_joined(frames), baseline.network.pull(baseline.subnet))
            payload = _as_payload(values, header.train_seconds)
        return _checked(DecodedPush(payload), baseline.subnet)

    def _read_rows(self, header: PushHeader, codec: Codec, baseline: Baseline) -> DecodedPush:
        """An update that came in parts, of which some rows may be missing."""
        attempt, steps = header.lease.attempt, header.steps
        came = replace(self.arrived(attempt, steps, baseline), train_seconds=header.train_seconds)
        payload = Payload([came.content], header.train_seconds, header.checksum)
        whole = bool(came.received.all())
        if not whole and not self.is_enough(attempt, steps, baseline.subnet):
            return DecodedPush(payload, Reply.WRONG_SHAPE)
        if whole and (fault := inspect(header, payload.frames, codec.nbytes)):
            return DecodedPush(payload, fault)
        covered = 1.0 if whole else float(self._gains_of(attempt, steps, codec)[came.received].sum())
        return _checked(
            DecodedPush(self.salvaged(came, baseline), None, covered, None if whole else came), baseline.subnet
        )

    def _size(self, subnet: Subnet, *, update: bool) -> int:
        """Bytes of a subnet's update or mark."""
        if update:
            return encoding.nbytes(self._program, subnet, "push")
        return 4 * self._program.buffer_size(subnet, persistent=False)

    def _got(self, attempt: int, steps: int, codec: Codec) -> ReceivedMask | None:
        """Which rows of an update are here; None before its head is."""
        size = sum(len(frame) for frame in self._parts.payload(attempt, (steps, True)))
        got = codec.rows_before(size)
        found = self._scattered.get((attempt, steps))
        if found and found.received.sum() > got.sum():
            return found.received
        return got if size >= codec.first_row else None

    def _gains_of(self, attempt: int, steps: int, codec: Codec) -> NDArray[np.float64]:
        """What each row of an update brings: its head is here, in parts or scattered."""
        if (attempt, steps) not in self._gains:
            found = self._scattered.get((attempt, steps))
            content = found.content if found else bytearray().join(self._parts.payload(attempt, (steps, True)))
            self._gains[attempt, steps] = _gains(codec, torch.frombuffer(content, dtype=torch.uint8))
        return self._gains[attempt, steps]

    def _is_part(self, header: PushHeader) -> bool:
        """Whether it can be a mark, or an update of fewer steps than all."""
        early = 0 < header.steps < self._program.training.local_steps
        return early and (not header.update or (self._salvage and self._program.training.exchange.push != "fp32"))


def _checked(push: DecodedPush, subnet: Subnet) -> DecodedPush:
    """The same with its fault, if its values are not all finite."""
    fault = inspect_values(push.payload.frames)
    if fault is None:
        return push
    values = torch.frombuffer(bytearray().join(push.payload.frames), dtype=torch.float32)[: subnet.parameters]
    names = (tensor.name for tensor in subnet.layout.tensors)
    odd = (name for name, part in zip(names, views(values, subnet.shapes), strict=True) if not part.isfinite().all())
    return replace(push, fault=fault, where=next(odd, "the optimizer's state"))


def _what(header: PushHeader) -> PayloadKey:
    return header.steps, header.update


def _is_enough(
    codec: Codec, received: ReceivedMask, exchange: ExchangeSettings, gains: Callable[[], NDArray[np.float64]]
) -> bool:
    """Whether no more rows are lacking than the job allows, and no more of the squared norm."""
    return bool((~received).sum() <= exchange.loss * codec.rows and gains()[~received].sum() <= exchange.norm_loss)


def _gains(codec: Codec, content: Tensor) -> NDArray[np.float64]:
    """What each row brings; nothing if what is exact is not finite."""
    exact = content[: 4 * (codec.size - codec.coded)].view(torch.float32)
    return codec.gains(content) * bool(exact.isfinite().all())


def persistent_part(checkpoint: Payload, size: int) -> Payload:
    """What of a mark goes from round to round: its first so many bytes."""
    if checkpoint.size_bytes <= size:
        return checkpoint
    frames = [memoryview(bytearray().join(checkpoint.frames))[:size]]
    return Payload(frames, checkpoint.train_seconds, checksum(frames))


def _joined(frames: Sequence[memoryview]) -> Tensor:
    return torch.frombuffer(bytearray().join(frames) or bytearray(1), dtype=torch.uint8)


def _as_payload(values: Tensor, train_seconds: float) -> Payload:
    frames = [values.numpy().data.cast("B")]
    return Payload(frames, train_seconds, checksum(frames))
