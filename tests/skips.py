"""What a machine lacks for the whole test suite, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def skipped_for(places: Iterable[Any]) -> str:
    """Return one line on skipped tests, given as (file, line, reason) each; empty for none."""
    counts = Counter(str(reason).removeprefix("Skipped: ") for _, _, reason in places)
    reasons = "; ".join(f"{count} as {reason}" for reason, count in counts.most_common())
    return f"did not run here: {reasons} (`make tools peers` installs what can be installed)" if reasons else ""
