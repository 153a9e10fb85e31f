"""A reader of bytes from outside, as a function of bytes that ends in a clean error or in none."""

from __future__ import annotations

import functools
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idletrain.errors import IdletrainError

LONGEST_ERROR = 1000  # characters of a fault: it is a sentence, not the input
NOW = 1.8e9  # Unix seconds of every campaign


@dataclass(frozen=True)
class Reader:
    """A reader of bytes, and some bytes.

    Attributes:
        read: The reader; it may write into the working directory.
        runs: How many a campaign makes: about a minute of a core.
        sound: Bytes that it takes.
        modules: The modules of idletrain that parse them.
        odd: Bytes that it may refuse; those that broke it once are among them.
        errors: What it raises for bytes that it refuses, beside the errors of idletrain.
    """

    read: Callable[[bytes], object]
    runs: int
    sound: tuple[bytes, ...]
    modules: tuple[str, ...]
    odd: tuple[bytes, ...] = ()
    errors: tuple[type[Exception], ...] = ()

    def accepts(self, content: bytes) -> bool:
        """Read; an error that is meant is as good as an answer, if each fault that it names is short."""
        faults = ""
        try:
            self.read(content)
        except IdletrainError as error:
            faults = str(error)
        except self.errors:
            return False
        assert max(map(len, faults.splitlines()), default=0) < LONGEST_ERROR
        return not faults


def file_of(content: bytes, name: str) -> Path:
    """Write bytes to a file of the working directory."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def fields_in(content: bytes) -> dict[str, Any]:
    """Return the object in a JSON text; an empty one if there is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def mutations(seed: bytes, count: int) -> list[bytes]:
    """The same odd bytes every time: bits turned, parts cut, doubled, moved and replaced by numbers that are large."""
    dice = random.Random(0)
    value = []
    odd = (b"\0", b"\xff", b"9" * 30, b"-1", b"null", b"[]", b"{}", b'"x"', b"1e400", b"NaN", b"\n", b"\xc2\xb2", b"")
    for _ in range(count):
        content = bytearray(seed)
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(content) + 1)
            end = min(len(content), start + dice.choice((0, 1, 1, 4, 30)))
            content[start:end] = dice.choice((*odd, content[start:end] * 2, bytes([dice.randrange(256)])))
        value.append(bytes(content))
    return value


@functools.cache
def quiet() -> None:
    """Silence warnings about what is repaired or dropped."""
    logging.disable(logging.WARNING)
