"""Read settings as a user writes them: durations and sizes (`15s`, `2GiB`); round sizes of memory that vary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MOST_BYTES, MOST_SECONDS = 2**63 - 1, 1000 * 365 * 86400.0  # what files and clocks can count
STEADY_BITS = 4  # 16 steps of memory from one power of two to the next
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(value: Any) -> Any:
    """Parse `"15s"`, `"10m"` or a number as seconds.

    Raises:
        ValueError: the text is not a number with one of the units ms, s, m, h, d, or means more than 1000 years.
    """
    return _quantity(value, r"(ms|[smhd]?)", _SECONDS, MOST_SECONDS, "duration such as 15s, 10m or 4h")


def parse_bytes(value: Any) -> Any:
    """Parse `"2GiB"`, `"500MB"` or a number as bytes.

    Raises:
        ValueError: the text is not a number with a unit of bytes, or means more than 8 EiB.
    """
    size = value.upper() if isinstance(value, str) else value
    return int(_quantity(size, r"([KMG]?I?B?)", _BYTES, MOST_BYTES, "size such as 512MiB or 2GB"))


def _quantity(value: Any, unit: str, units: Mapping[str, float], most: float, kind: str) -> float:
    """Parse a number with a unit."""
    text = value if isinstance(value, str) else repr(value) if isinstance(value, int | float) and value < most else ""
    match = re.fullmatch(rf"\s*([0-9.]{{1,40}})\s*{unit}\s*", text[:100])
    if isinstance(value, bool) or match is None or match[2] not in units or len(text) > 100:
        raise ValueError(f"should be a {kind}")
    try:
        number = float(match[1]) * units[match[2]]
    except ValueError:  # two points
        raise ValueError(f"should be a {kind}") from None
    if number > most:
        raise ValueError(f"is too much; it should be a {kind}")
    return number


def steady(memory_bytes: int) -> int:
    """Round memory down, because measurements vary, so that a replacement worker, and the same job's next run, get the
    same widths.
    """
    step = 1 << max(0, memory_bytes.bit_length() - 1 - STEADY_BITS)
    return memory_bytes * 15 // 16 // step * step
