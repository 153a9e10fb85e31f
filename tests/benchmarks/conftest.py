"""Benchmarks whose processes are forks: what they start is theirs, only how it is imported is the tests'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm
from idletrain_testbed import Testbed

from benchmarks import machines


@pytest.fixture(autouse=True)
def warm_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the programs of a benchmark's machines as forks of the tests' warm parent, in their namespaces."""
    execute, execute_on = machines.Loopback.popen, Testbed.popen

    def start(argv: Sequence[str], namespace: Path | None, how: dict[str, Any]) -> Any:
        return warm.start_on_node(argv, namespace, how["env"], Path(how["cwd"]), how["stderr"].fileno())

    def popen(self: machines.Loopback, node: str, argv: Sequence[str], **how: Any) -> Any:
        return start(argv, None, how) or execute(self, node, argv, **how)

    def popen_on(self: Testbed, node: str, argv: Sequence[str], **how: Any) -> Any:
        return start(argv, self.instance.namespace_path(node), how) or execute_on(self, node, argv, **how)

    monkeypatch.setattr(machines.Loopback, "popen", popen)
    monkeypatch.setattr(Testbed, "popen", popen_on)
