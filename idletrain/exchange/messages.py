"""Messages between worker and store: leases, push headers, and the store's replies."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from idletrain.errors import RefusedError


class Reply(enum.StrEnum):
    """The store's answer to a worker."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE_EPOCH = "stale-epoch"
    STALE_ROUND = "stale-round"
    NOT_LEASED = "not-leased"
    CORRUPT = "corrupt"
    WRONG_SHAPE = "wrong-shape"
    NOT_FINITE = "not-finite"
    ENOUGH = "enough"
    HUNG = "hung"


Activity = Literal["load", "move", "wait", "train"]
"""What an attempt does: load the program and its data, move data, wait for its worker's turn, or take steps."""
DONE_REPLIES = (Reply.ACCEPTED, Reply.DUPLICATE)
"""Replies after which a worker is done: a duplicate means that an earlier send got through."""
LATE_ROWS_REPLIES = (Reply.DUPLICATE, Reply.STALE_ROUND)
"""Replies after which a part of the payload may have been accepted, and its missing rows may follow."""


@dataclass(frozen=True, slots=True)
class LeaseId:
    """One attempt at one subnet of one round, which alone may write it; a head epoch is a head session's number."""

    run: str
    epoch: int
    round: int
    subnet: int
    attempt: int


@dataclass(frozen=True, slots=True)
class LockstepGroup:
    """Attempts that train in lockstep: they take every step together.

    Attributes:
        number: How many groups the run has had, including this one.
        step: The step that all members continue from.
        members: The workers' addresses, by subnet.
    """

    number: int
    step: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Describes a pushed payload.

    Attributes:
        lease: The attempt that trained it.
        steps: Local steps that it holds, counted from the round's start.
        train_seconds: Time that this attempt spent in them so far.
        checksum: XXH3-64 of the payload.
        update: True for an update, encoded as the job's exchange settings say; False for a progress checkpoint: plain
            float32 values with all optimizer state.
        loss: Mean training loss of the last few steps; None if there were none.
        position: How far its part of a stream was read (see `nn.data.stream_position`); "" if that does not travel.
    """

    lease: LeaseId
    steps: int
    train_seconds: float
    checksum: int
    update: bool = True
    loss: float | None = None
    position: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The store's answer to a push.

    Attributes:
        reply: Accepted, or why not.
        missing: Rows of the payload (`Codec.rows`) that did not arrive and may follow later, a bit each.
    """

    reply: Reply
    missing: bytes = b""


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """The conditions on which a partial payload is accepted.

    Attributes:
        required_bytes: Bytes, from the first on, that must arrive.
        min_fraction: Smallest fraction of all bytes that may be accepted.
        is_acceptable: Decides, once those two are met, by the payload's bytes (zeros where none arrived), which pieces
            arrived, and the bytes of a piece; None to accept.
    """

    required_bytes: int
    min_fraction: float
    is_acceptable: Callable[[memoryview, NDArray[np.bool_], int], bool] | None = None


@dataclass(frozen=True, slots=True)
class PartialPayload:
    """The part that has arrived of an update encoded as whole numbers.

    Attributes:
        content: Its bytes in their places, zeros where none arrived.
        received: Which of its rows (`Codec.rows`) arrived.
        train_seconds: Time spent in its steps.
    """

    content: memoryview
    received: NDArray[np.bool_]
    train_seconds: float


_PUSH_HEADER = TypeAdapter(PushHeader)


def push_header(message: Mapping[str, Any]) -> PushHeader:
    """Read what `as_message` made of a header.

    Raises:
        RefusedError: it is something else.
    """
    try:
        return _PUSH_HEADER.validate_python(message)
    except ValueError:
        raise RefusedError("a push does not say what it holds; are worker and head of one version?") from None


def as_message(record: LeaseId | PushHeader) -> dict[str, Any]:
    """Return a record as a dict of plain values, for the wire."""
    return asdict(record)


def checksum(frames: Iterable[memoryview | bytes]) -> int:
    """Return the XXH3-64 of frames as one payload: 10 GB/s measured, crc32 4 (it guards against accidents only)."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def inspect(header: PushHeader, frames: Sequence[memoryview | bytes], expected_bytes: int) -> Reply | None:
    """Check a payload's size and checksum; return why it cannot be accepted, or None if it can."""
    if sum(len(frame) for frame in frames) != expected_bytes:
        return Reply.WRONG_SHAPE
    if checksum(frames) != header.checksum:
        return Reply.CORRUPT
    return None


def inspect_values(frames: Sequence[memoryview | bytes]) -> Reply | None:
    """Return NOT_FINITE if any float32 value is infinite or NaN, else None."""
    for frame in frames:
        values = np.frombuffer(frame, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            # One pass at memory speed; values are checked one by one only if their squares overflow.
            finite = np.isfinite(np.dot(values, values)) or np.isfinite(values).all()
        if not finite:
            return Reply.NOT_FINITE
    return None
