"""How far a subnet's part of a stream was read, as text that goes from worker to worker by way of the head.

It holds what the dataset's own `state_dict` returns, which has to be plain values: the text is JSON, and nothing that
another machine sent is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

MAX_CHARACTERS = 1 << 16  # of ASCII; a state of Hugging Face's streaming has about 500, and as many for each source


@dataclass(frozen=True)
class StreamPosition:
    """The place in a stream behind a batch of one subnet.

    Attributes:
        shard: The subnet's number.
        shards: The number of subnets.
        size: Items of a batch.
        number: The number of the batch that comes next, from the start of the run.
        epoch: The pass over the stream.
        items: Items of all subnets that were read of this pass.
        state: What the dataset's `state_dict` returned.
    """

    shard: int
    shards: int
    size: int
    number: int
    epoch: int
    items: int
    state: Any

    def encoded(self) -> str:
        """Return the position as text.

        Raises:
            ValueError: the dataset's state does not come back from JSON as it was, or is too large.
        """
        try:
            text = json.dumps(asdict(self), allow_nan=False)
            same = json.loads(text)["state"] == self.state
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"its state is not made of plain values ({error})") from None
        if not same:
            raise ValueError("its state is not made of dicts by strings, lists, strings, numbers, booleans and None")
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"its state takes {len(text):,} characters and may take {MAX_CHARACTERS:,}")
        return text


def decoded(text: str) -> StreamPosition | None:
    """Return the position in a text, or None if it holds none."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return None
    names = [field.name for field in fields(StreamPosition)]
    if not isinstance(held, dict) or held.keys() != set(names):
        return None
    if any(type(held[name]) is not int or held[name] < 0 for name in names if name != "state"):
        return None
    return StreamPosition(**held)
