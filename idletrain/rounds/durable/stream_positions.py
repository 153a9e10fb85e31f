"""How far each subnet's part of a stream was read: in memory, and in a file of the run directory from commit to commit.

A position says by itself which batch it leads to, and what it holds is checked by the worker that gets it: one that is
old or missing costs the time to read the stream up to there, and no bit.
"""

from __future__ import annotations

import json
from pathlib import Path

from idletrain.nn.data.stream_position import MAX_CHARACTERS
from idletrain.storage import write_whole

FILE = "streams.json"
KEPT = 4  # of a subnet: while an attempt waits for its turn, another at the same subnet may send newer ones


class StreamPositions:
    """The latest positions of every subnet.

    Args:
        run_dir: The run directory, whose file is read; one that is damaged or missing holds none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._held: dict[int, dict[int, str]] = {}
        try:
            written = json.loads(self._path.read_bytes())
            for subnet, steps, position in written:
                self.keep(int(subnet), int(steps), position)
        except (OSError, ValueError, TypeError, RecursionError, OverflowError):  # a number such as 1e400
            self._held = {}

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, subnet: int, steps: int, position: str) -> None:
        """Hold a position, unless it is empty or longer than a position can be.

        Args:
            subnet: The subnet.
            steps: Its steps from the start of the run, which have read all that comes before the position.
            position: The position as text.
        """
        if not isinstance(position, str) or not 0 < len(position) <= MAX_CHARACTERS:
            return
        held = self._held.setdefault(subnet, {})
        held[steps] = position
        for oldest in sorted(held)[:-KEPT]:
            del held[oldest]

    def at(self, subnet: int, steps: int) -> str:
        """Return the latest position of at most so many steps, or ""."""
        held = self._held.get(subnet, {})
        return held[max(known)] if (known := [at for at in held if at <= steps]) else ""

    def write(self) -> None:
        """Write the latest position of every subnet.

        Raises:
            OSError: there is no room.
        """
        latest = [(subnet, max(held), held[max(held)]) for subnet, held in self._held.items()]
        write_whole(self._path, json.dumps(latest).encode())
