"""A node's own files and sums; that it drains, leaves and is replaced is tested with real machines in tests/chaos."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from idletrain.cloud import worker_node
from idletrain.cluster.identity import Identity


def test_certificates_lie_in_files_that_nobody_else_reads(tmp_path: Path) -> None:
    options = worker_node.write_identity(Identity("ca", "cert", "key"), tmp_path / "identity")
    assert options[::2] == ("--tls-ca-file", "--tls-cert", "--tls-key")
    assert [Path(path).read_text() for path in options[1::2]] == ["ca", "cert", "key"]
    assert stat.S_IMODE((tmp_path / "identity").stat().st_mode) == 0o700
    assert {stat.S_IMODE(Path(path).stat().st_mode) for path in options[1::2]} == {0o600}


@pytest.mark.parametrize(("memory", "most", "expected"), [(10, 1, 1), (10, 2, 2), (3, 4, 1), (1, 4, 1)])
def test_slots_are_what_is_wanted_and_fits(memory: int, most: int, expected: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_node.psutil, "cpu_count", lambda: 2)
    assert worker_node.slots_in(memory << 30, 2 << 30, most) == expected
