"""Compare the cost of training beyond a GPU's memory, by swaps to pinned host memory, with every single technique.

Steps of a network in core and by plans for 30 % and 50 % of the in-core peak, as `benchmarks.outofcore` measures them:
techniques take turns, and every step's gradients are compared with those in core. It needs a GPU, and host memory
for what is swapped.

    python -m benchmarks.outofcore_gpu [--tiny] [--json FILE]

Target (KARMA, arXiv 2008.11421): the best swap-style technique takes at least 1.52 times as long as the plan.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.networks import UNet, resnet, vgg16, wide_resnet
from benchmarks.outofcore import Network, compare
from benchmarks.outofcore_figures import NAMED, SWAPPING, add_ratios, best_over_plan, mean_ratio, table_of
from benchmarks.report import Figure, at_least, at_most, report, with_preset
from idletrain.nn.models import mlp, transformer
from idletrain.nn.outofcore.executing.pinned import PinnedSwap
from idletrain.nn.outofcore.planning.plan import least_bytes

ARENA_BYTES = 12 << 30  # of pinned memory, for what a step swaps


@dataclass(frozen=True)
class Sizes:
    """Networks (module, inputs, tokens: 0 for floats), budgets as parts of the in-core peak, and repetitions."""

    networks: dict[str, tuple[Any, tuple[int, ...], int]]
    budgets: tuple[float, ...] = (0.3, 0.5)
    repetitions: int = 3
    arena_bytes: int = ARENA_BYTES


FULL = Sizes(
    {  # in their papers' widths; batches whose activations take some GiB
        "VGG-16": (lambda: vgg16(64), (1024, 3, 32, 32), 0),
        "ResNet-50": (lambda: resnet((3, 4, 6, 3), 64), (192, 3, 32, 32), 0),
        "WRN-28-10": (lambda: wide_resnet(28, 10), (128, 3, 32, 32), 0),
        "U-Net": (lambda: UNet(64, 4), (192, 3, 32, 32), 0),
        "GPT": (lambda: transformer(512, 512, 768, 12, 3072, 12), (12, 512), 512),
    }
)
TINY = Sizes({"MLP": (lambda: mlp([512] + [1024] * 4 + [10]), (4096, 512), 0)}, (0.8,), 1, 1 << 30)


def figures_of(rows: list[dict[str, Any]]) -> list[Figure]:
    """Sum the rows up."""
    add_ratios(rows)
    figures = []
    for part in sorted({row["part"] for row in rows}):
        own = [row for row in rows if row["part"] == part]
        swap, single = (
            [ratio for row in own if (ratio := best_over_plan(row, names)) is not None] for names in (SWAPPING, NAMED)
        )
        in_core = [row["plan_over_in_core"] for row in own]
        budget = f"{part:.0%} of the memory"
        if swap:
            figures.append(at_least(f"best swap-style / plan, {budget}", mean_ratio(swap), "", 1.52, swap))
        if single:
            figures.append(Figure(f"best single technique / plan, {budget}", mean_ratio(single), "x", samples=single))
        figures.append(Figure(f"plan / in core, {budget}", mean_ratio(in_core), "x", samples=in_core))
    errors = [statistics.median(row["seconds"]["plan"]) / row["predicted_seconds"] - 1 for row in rows]
    memory = [max(row["step_bytes"]) / row["predicted_bytes"] - 1 for row in rows]
    over = [step > row["budget"] for row in rows for step in row["step_bytes"]]
    return [
        *figures,
        Figure(
            "step time against its prediction, median error", statistics.median(map(abs, errors)), "", "", None, errors
        ),
        Figure("peak memory over its prediction, worst", max(memory), "", "", None, memory),
        at_most("steps by a plan that took more than the budget", float(sum(over)), f"of {len(over)}", 0.0),
        at_most("steps by a plan with other bits than in core", float(sum(not r["same_bits"] for r in rows)), "", 0.0),
    ]


def measure(sizes: Sizes) -> list[dict[str, Any]]:
    """Compare all networks at the budgets that a plan fits, or else at the least that one fits."""
    rows = []
    swap = PinnedSwap(torch.device("cuda", 0), sizes.arena_bytes)
    for name, of in track(sizes.networks.items(), "networks", console=Console(stderr=True)):
        network = Network(*of, device="cuda")
        least = math.ceil(100 * least_bytes(network.profile, stream=False) / network.in_core_bytes) / 100
        for part in [part for part in sizes.budgets if part >= least] or [least]:
            row = compare(network, int(network.in_core_bytes * part), swap, sizes.repetitions)
            rows.append(
                {"network": name, "mb_per_second": row["link"][0] / 1e6, "part": part, "least_part": least, **row}
            )
            print(name, part, row["letters"], {k: round(min(v), 3) for k, v in row["seconds"].items()}, flush=True)
        del network
        torch.cuda.empty_cache()
    swap.close()
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, sizes = with_preset(__doc__, argv, FULL, TINY)
    if not torch.cuda.is_available():
        sys.exit("outofcore_gpu: there is no CUDA device; run it on a machine with one")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits, as torch's notes on it say
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = measure(sizes)
    figures = figures_of(rows)
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    return report("outofcore_gpu", options, figures, tables=[table_of(rows)], rows=rows, **about)


if __name__ == "__main__":
    main()
