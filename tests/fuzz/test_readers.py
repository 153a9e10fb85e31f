"""Odd bytes end in a sentence or in nothing, whoever reads them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import readers

MUTATIONS = 12  # for each seed; `make fuzz` makes millions
SLOW_SECONDS = 20.0


@pytest.mark.filterwarnings("ignore")  # NumPy and zipfile warn about damaged bytes before they refuse them
@pytest.mark.parametrize("name", readers.READERS)
def test_odd_bytes_end_in_a_clean_error_or_in_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PLACE", tmp_path)
    reader = readers.READERS[name]
    for seed in reader.seeds:
        for content in (seed, *readers.mutations(seed, MUTATIONS)):
            began = time.monotonic()
            readers.accepted(reader.read, content)
            assert time.monotonic() - began < SLOW_SECONDS
