"""Tests mirror the package: every module has a test file of its name, or is listed here with where it is tested.

And a public name means one thing: see below.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "idletrain"
SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts)  # which `idletrain init` copies
ELSEWHERE = {
    "__main__.py": "cli/test_main.py",
    "contradictions.py": "test_job_file.py",
    "job.py": "test_job_file.py",
    "machine_settings.py": "test_job_file.py",
    "optimizer_settings.py": "test_job_file.py",
    "resume.py": "test_run.py",
    "cli/arguments.py": "cli/test_main.py",
    "cli/cloud_records.py": "cli/test_cloud.py",
    "cli/cloud_runs.py": "cli/test_cloud.py",
    "cli/plan_network.py": "cli/test_plan_table.py",
    "cli/package_wheel.py": "first_hour/test_wheel.py",
    "cli/spot.py": "chaos",
    "cli/sweep_table.py": "cli/test_sweep.py",
    "cli/train.py": "cli/test_main.py",
    "cli/watch.py": "cli/test_main.py",
    "cloud/aws/clients.py": "cloud/aws/test_account.py",
    "cloud/aws/provider.py": "cli/test_cloud.py",
    "cloud/aws/schedules/service.py": "cli/test_schedule.py",
    "cloud/machines.py": "cloud/aws/test_requests.py",
    "cloud/market.py": "cloud/aws/test_pricing.py",
    "cloud/sandbox/provider.py": "cli/test_cloud.py",
    "nn/faults.py": "nn/test_prepare.py",
    "nn/sources.py": "nn/test_prepare.py",
    "nn/ist/contractions.py": "nn/ist/test_scaling.py",
    "nn/ist/elementwise.py": "nn/ist/test_tracing.py",
    "nn/ist/moves.py": "nn/ist/test_tracing.py",
    "nn/ist/operators.py": "nn/ist/test_tracing.py",
    "nn/ist/sums.py": "nn/ist/test_tracing.py",
    "nn/ist/scaling_trial.py": "nn/ist/test_scaling.py",
    "nn/outofcore/executing/learn.py": "nn/outofcore/executing/test_requirements.py",  # and test_trainer.py
    "nn/outofcore/executing/transfers.py": "nn/outofcore/executing/test_disk.py",
    "nn/outofcore/planning/segments.py": "nn/outofcore/planning/test_simulate.py",
    "nn/data/sparse_formats.py": "nn/data/test_extreme.py",
    "nn/data/values.py": "nn/data/test_given.py",  # and test_datasets.py
    "nn/wide/sparse_autograd.py": "nn/wide/test_layers.py",
    "exchange/datagram/link_rate.py": "exchange/datagram/test_window.py",
    "exchange/datagram/packet_sender.py": "exchange/datagram/test_protocol.py",
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
    "cluster/fork_server.py": "cluster/test_forked_processes.py",
    "cluster/warm_parent.py": "cluster/test_forked_processes.py",
    "fabric/measuring/tasks.py": "fabric/measuring/test_measure.py",  # and test_rank.py
    "fabric/measuring/nodes.py": "fabric/measuring/test_measure.py",
    "fabric/measuring/training.py": "fabric/measuring/test_collective_process.py",
    "providers/local.py": "chaos",
    "providers/protocol.py": "providers/test_table.py",
    "providers/scheduler.py": "test_run.py",
    "rounds/durable/history.py": "rounds/durable/test_recovery.py",
    "worker/transfers.py": "chaos",
    "worker/process.py": "chaos",  # a process that is warned and killed
    "rounds/membership.py": "chaos",
    "rounds/protocol.py": "rounds/test_state.py",
    "rounds/backend.py": "chaos",
    "rounds/commits.py": "chaos",
    "rounds/coordinator.py": "chaos",
    "rounds/opening.py": "chaos",
    "rounds/run_records.py": "chaos",
    "rounds/run_context.py": "chaos",
    "rounds/downloads.py": "chaos",
    "rounds/leases.py": "chaos",
    "rounds/uploads.py": "chaos",
    "observe/run_totals.py": "observe/test_summary.py",
    "observe/record_fields.py": "observe/test_records.py",
    "rounds/sizing.py": "chaos",
    "rounds/worker_events.py": "rounds/test_state.py",  # and those of verdicts and lost leases
}


def test_every_module_has_its_test_file_and_every_test_file_its_module() -> None:
    modules = {str(p.relative_to(PACKAGE)) for p in SOURCES} - ELSEWHERE.keys()
    modules = {m for m in modules if not m.endswith("__init__.py")}
    places = [TESTS, *(TESTS / p.parent.relative_to(PACKAGE) for p in PACKAGE.rglob("*/__init__.py"))]
    tested = {
        str((p.parent / p.name.removeprefix("test_")).relative_to(TESTS)) for d in places for p in d.glob("test_*.py")
    }
    assert tested - {"layout.py"} == modules
    assert all((TESTS / place).exists() for place in ELSEWHERE.values())


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


def defined_twice(kind: type | tuple[type, ...]) -> dict[str, list[str]]:
    """The public names that several modules define, each with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules():
        for node in tree.body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                places[node.name].append(module)
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_public_class_is_defined_once() -> None:
    assert defined_twice(ast.ClassDef) == {}


def test_a_function_that_two_modules_define_is_called_by_its_module_s_name() -> None:
    """Such as `updates.read` and `snapshots.read`; `main` is where a program starts."""
    shared = {
        (module, name)
        for name, places in defined_twice((ast.FunctionDef, ast.AsyncFunctionDef)).items()
        for module in places
        if name != "main"
    }
    bare = [
        f"{module}: from {node.module} import {alias.name}"
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in shared
    ]
    assert shared
    assert bare == []
