"""Tests mirror the package: every module has a test file of its name, or is listed here with where it is tested."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "idletrain"
ELSEWHERE = {
    "__main__.py": "cli/test_main.py",
    "cli/arguments.py": "cli/test_main.py",
    "cli/spot.py": "chaos",
    "cli/train.py": "cli/test_main.py",
    "cli/watch.py": "cli/test_main.py",
    "cli/worker.py": "cli/test_main.py",
    "cloud/aws/provider.py": "cli/test_cloud.py",
    "cloud/sandbox/provider.py": "cli/test_cloud.py",
    "cloud/head_node.py": "chaos",  # a machine that leads a run, with those that train
    "nn/ist/contractions.py": "nn/ist/test_scaling.py",
    "nn/ist/scaling_trial.py": "nn/ist/test_scaling.py",
    "nn/outofcore/executing/transfers.py": "nn/outofcore/executing/test_disk.py",
    "nn/outofcore/planning/segments.py": "nn/outofcore/planning/test_simulate.py",
    "nn/wide/sparse_autograd.py": "nn/wide/test_layers.py",
    "exchange/datagram/transfer.py": "exchange/datagram/test_protocol.py",
    "exchange/datagram/session.py": "exchange/test_store.py",
    "exchange/ddp_transport.py": "exchange/test_ddp.py",
    "exchange/datagram_server.py": "exchange/test_store.py",
    "exchange/quantize_kernels.py": "exchange/test_codec.py",
    "fabric/measuring/cluster.py": "cli/test_fabric.py",
    "fabric/measuring/collectives.py": "fabric/measuring/test_collective_process.py",
    "fabric/measuring/timed_group.py": "fabric/measuring/test_collective_process.py",
    "fabric/measuring/probe_server.py": "fabric/measuring/test_measure.py",
    "autotune/step_tasks.py": "autotune/test_probe.py",
    "autotune/step_time.py": "cli/test_plan_table.py",
    "fabric/measuring/tasks.py": "fabric/measuring/test_measure.py",  # and test_rank.py
    "fabric/measuring/nodes.py": "fabric/measuring/test_measure.py",
    "fabric/measuring/training.py": "fabric/measuring/test_collective_process.py",
    "providers/local.py": "chaos",
    "providers/protocol.py": "providers/test_table.py",
    "providers/scheduler.py": "test_run.py",
    "worker/attempt.py": "chaos",  # and worker/test_out_of_core.py
    "worker/transfers.py": "chaos",
    "worker/process.py": "chaos",  # a process that is warned and killed
    "rounds/membership.py": "chaos",
    "rounds/protocol.py": "rounds/test_state.py",
    "rounds/coordinator.py": "chaos",
    "rounds/run_context.py": "chaos",
    "rounds/downloads.py": "chaos",
    "rounds/evaluation.py": "chaos",
    "rounds/leases.py": "chaos",
    "rounds/uploads.py": "chaos",
    "rounds/sizing.py": "chaos",
    "rounds/assignment.py": "rounds/test_state.py",
    "rounds/lockstep_rules.py": "rounds/test_state.py",
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
