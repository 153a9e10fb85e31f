"""Tests mirror the package: every module has a test file of its name, or is listed here with where it is tested."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "idletrain"
ELSEWHERE = {
    "__main__.py": "test_cli.py",
    "cli_spot.py": "chaos",
    "head.py": "chaos",  # a machine that leads a run, with those that train
    "exchange/datagram/session.py": "exchange/test_store.py",
    "exchange/datagram/ways.py": "exchange/test_store.py",
    "exchange/rounding.py": "exchange/test_codec.py",
    "fabric/cluster.py": "test_cli_fabric.py",
    "fabric/collectives.py": "fabric/test_rank.py",
    "fabric/company.py": "fabric/test_rank.py",
    "fabric/post.py": "fabric/test_measure.py",
    "fabric/steps.py": "observe/test_preview.py",
    "fabric/tasks.py": "fabric/test_measure.py",  # and test_rank.py
    "fabric/team.py": "fabric/test_measure.py",
    "fabric/training.py": "fabric/test_rank.py",
    "fleet/parent.py": "fleet/test_scheduler.py",
    "fleet/worker.py": "chaos",  # a process that is warned and killed
    "rounds/crew.py": "chaos",
    "rounds/events.py": "rounds/test_state.py",
    "rounds/runner.py": "chaos",
}


def test_every_module_has_its_test_file_and_every_test_file_its_module() -> None:
    modules = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py")} - ELSEWHERE.keys()
    modules = {m for m in modules if not m.endswith("__init__.py")}
    places = [TESTS, *(TESTS / p.parent.relative_to(PACKAGE) for p in PACKAGE.rglob("*/__init__.py"))]
    tested = {
        str((p.parent / p.name.removeprefix("test_")).relative_to(TESTS)) for d in places for p in d.glob("test_*.py")
    }
    assert tested - {"layout.py"} == modules
    assert all((TESTS / place).exists() for place in ELSEWHERE.values())
