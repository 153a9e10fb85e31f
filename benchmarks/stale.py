"""Name the results that are older than the code they measure.

python -m benchmarks.stale

A result keeps a digest of every folder and file that its benchmark measures (`report` writes it). It is stale where one
of them differs from the code as it is. Comments, docstrings and blank lines do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

_LEARNING = (
    "nn/ist", "nn/local_steps.py", "nn/network.py", "nn/optim", "nn/outer.py", "nn/rate_factors.py",
    "nn/statistics.py",
)  # fmt: skip
_ROUNDS = ("exchange", "rounds", "worker")
_LINKS = ("exchange",)
_WIDE = ("nn/optim", "nn/wide")
# What each benchmark measures, below idletrain/; its own file is always among it.
MEASURES: Mapping[str, tuple[str, ...]] = {
    "accuracy": _LEARNING,
    "autotune": ("autotune",),
    "bad_links": _LINKS,
    "churn": _ROUNDS,
    "codec": ("exchange/codec.py", "exchange/quantize_kernels.py"),
    "coded_accuracy": (*_LEARNING, "exchange/codec.py"),
    "defaults": (*_LEARNING, "nn/alone.py"),
    "efficiency": ("cluster", "observe", *_ROUNDS),
    "exchange": _LINKS,
    "fabric": ("fabric",),
    "fine_tuning": _LEARNING,
    "finishing": _LEARNING,
    "forecast": ("autotune", *_ROUNDS),
    "kernels": _WIDE,
    "label_cost": _WIDE,
    "learning_rates": _LEARNING,
    "linear_trees": _WIDE,
    "link_use": _ROUNDS,
    "local_steps": _LEARNING,
    "lossy_rounds": _ROUNDS,
    "memory": ("nn/buffers.py", "nn/memory.py", *_ROUNDS),
    "memory_over_rounds": _ROUNDS,
    "modules": (*_LEARNING, "nn/cuts.py", "nn/prepare.py"),
    "offers": ("cli/offers.py", "cloud/aws/pricing.py", "cloud/instance_types.py"),
    "outofcore": ("nn/compiler.py", "nn/outofcore"),
    "outofcore_gpu": ("nn/outofcore",),
    "page": ("cluster/dask_scheduler.py", "observe"),
    "precision": (*_LEARNING, "nn/compiler.py", "nn/precision.py"),
    "quality": _LEARNING,
    "rolling": (*_LEARNING, "nn/alone.py", "nn/rolling.py"),
    "round_overhead": _ROUNDS,
    "scale": _ROUNDS,
    "simulated_fleet": ("rounds/state.py", "simulation"),
    "slow_worker": _ROUNDS,
    "splits": (*_LEARNING, "nn/alone.py"),
    "spot_latency": ("cloud", "cluster"),
    "storm": ("cloud", "cluster", *_ROUNDS),
    "time_to_accuracy": (*_LEARNING, *_ROUNDS),
    "trace_goodput": _ROUNDS,
    "where_time_goes": _ROUNDS,
    "wide_exchange": (*_WIDE, *_ROUNDS),
    "wide_labels": _WIDE,
    "wide_scale": (*_WIDE, *_ROUNDS),
}
OWN_FILE = {"modules": "benchmarks/modules", "storm": "tests/chaos/storm.py"}  # others are in benchmarks/NAME.py


def digests(benchmark: str, root: Path = ROOT) -> dict[str, str]:
    """Return a digest of all that a benchmark measures, by its path below the root; "" for what is not there."""
    name = benchmark.partition(",")[0]
    paths = [OWN_FILE.get(name, f"benchmarks/{name}.py"), *(f"idletrain/{path}" for path in sorted(MEASURES[name]))]
    return {path: _digest(root / path) for path in paths}


def _digest(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    parts = [
        f"{file.relative_to(path)}\n{_code(file.read_text(), file.suffix)}"
        for file in files
        if file.is_file() and file.parent.name != "__pycache__"
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


@functools.cache
def _code(text: str, suffix: str) -> str:
    """Return a file's text; of Python without docstrings, comments and blank lines."""
    if suffix != ".py":
        return text
    written = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    comments = dict(
        token.start for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    )
    lines = [
        line[: comments.get(number)].rstrip()
        for number, line in enumerate(text.splitlines(), 1)
        if number not in written
    ]
    return "\n".join(line for line in lines if line)


def changed(result: Mapping[str, Any]) -> list[str]:
    """Return the paths below the root that a result measures and that are different by now."""
    then: Mapping[str, str] = result.get("code", {})
    return [path for path, digest in digests(result["benchmark"]).items() if then.get(path) != digest]


def main() -> int:
    """Print the stale results and return 1 if there is one."""
    table = Table("result", "of", "changed since", title="results that are older than the code")
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if paths := changed(result):
            table.add_row(path.name, result["date"][:10], ", ".join(paths))
    Console().print(table if table.rows else "Every result is of the code as it is.")
    return 1 if table.rows else 0


if __name__ == "__main__":
    sys.exit(main())
