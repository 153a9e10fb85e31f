"""The words between worker and store: who writes what, and why a push was not taken."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


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


DONE_REPLIES = (Reply.ACCEPTED, Reply.DUPLICATE)
"""Answers after which a worker is done: a duplicate means that an earlier send got through."""
LATE_ROWS_REPLIES = (Reply.DUPLICATE, Reply.STALE_ROUND)
"""Answers after which a part of the payload may have been taken, and the rest be welcome later."""


@dataclass(frozen=True, slots=True)
class LeaseId:
    """Who may write what: one try at one subnet of one round."""

    run: str
    epoch: int
    round: int
    subnet: int
    attempt: int


@dataclass(frozen=True, slots=True)
class LockstepGroup:
    """Attempts that take their steps together.

    Attributes:
        number: How many gangs the run has had, this one counted.
        step: The step that all of them go on from.
        members: The workers' addresses, by subnet.
    """

    number: int
    step: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PushHeader:
    """What a pushed buffer is.

    Attributes:
        steps: Local steps that it holds, counted from the round's start.
        train_seconds: Time that this attempt spent in them so far.
        checksum: XXH3-64 of the payload.
        update: Whether it is what travels from round to round, as the job says that updates travel; else it is a
            mark, with all optimizer state, as it is.
        loss: Mean training loss of the last few steps; None if there were none.
    """

    lease: LeaseId
    steps: int
    train_seconds: float
    checksum: int
    update: bool = True
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a push.

    Attributes:
        missing: Rows that did not come and may follow later (`Codec`), a bit each.
    """

    reply: Reply
    missing: bytes = b""


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """What of a payload is enough.

    Attributes:
        needed: Bytes from its beginning without which nothing is.
        least: Which share of all bytes is enough at least.
        enough: Whether, of the payload as it is, these pieces of so many bytes each are enough; None: if they are as
            many as that.
    """

    required_bytes: int
    min_fraction: float
    is_acceptable: Callable[[memoryview, NDArray[np.bool_], int], bool] | None = None


@dataclass(frozen=True, slots=True)
class PartialPayload:
    """What has come of an update as whole numbers.

    Attributes:
        content: Its bytes in their places, zeros where none came.
        got: Which of its rows are there (`Codec`).
        train_seconds: Time in its steps.
    """

    content: memoryview
    received: NDArray[np.bool_]
    train_seconds: float


def as_message(record: LeaseId | PushHeader) -> dict[str, Any]:
    """Plain values for the wire."""
    return asdict(record)


def checksum(frames: Iterable[memoryview | bytes]) -> int:
    """XXH3-64 over frames as one payload: 10 GB/s here, where crc32 makes 4 (it guards against accidents only)."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def inspect(header: PushHeader, frames: Sequence[memoryview | bytes], expected_bytes: int) -> Reply | None:
    """Why a payload cannot be taken, or None if it can: its size and its checksum."""
    if sum(len(frame) for frame in frames) != expected_bytes:
        return Reply.WRONG_SHAPE
    if checksum(frames) != header.checksum:
        return Reply.CORRUPT
    return None


def inspect_values(frames: Sequence[memoryview | bytes]) -> Reply | None:
    """Why float32 values cannot be taken: they are not all finite."""
    for frame in frames:
        values = np.frombuffer(frame, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            # One pass at memory speed; only if squares overflow are the values themselves looked at.
            finite = np.isfinite(np.dot(values, values)) or np.isfinite(values).all()
        if not finite:
            return Reply.NOT_FINITE
    return None
