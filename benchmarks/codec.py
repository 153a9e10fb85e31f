"""Measure how fast codes are made and read, their bytes, and how much of a change arrives.

16 M values as rounds make them: pulls as they are, rounded to the nearest; updates as a change (a heavy-tailed mixture)
rounded by chance, the largest parts first, and decoded into the values that the head adds it to. One thread, medians of
interleaved repetitions.

    python -m benchmarks.codec [--tiny] [--json FILE]

Target: encode and decode together at 1 GB/s of float32 or more; an update as int4 and a pull as int8 together five
times below float32 both ways; int4 carries 95 % of the squared norm in 13 % of the bytes.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.report import Figure, at_least, at_most, report, with_preset
from idletrain.exchange.codec import Codec

CODES = (("pull", "bf16"), ("pull", "int8"), ("push", "bf16"), ("push", "int8"), ("push", "int4"))
VALUES, TINY_VALUES, REPETITIONS = 1 << 24, 1 << 16, 7


def change_of(values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values at a round's start and after its training."""
    random = torch.Generator().manual_seed(0)
    initial = 0.05 * torch.randn(values, generator=random)
    spread = torch.rand(values // 64, 1, generator=random).pow(3)  # rows that learn much, and many that learn little
    return initial, initial + (1e-3 * spread * torch.randn(values // 64, 64, generator=random)).view(-1)


def measure(values: int) -> dict[str, dict[str, Any]]:
    """Measure by direction and kind: seconds to encode and decode, bytes, share of the squared norm that arrives."""
    initial, trained = change_of(values)
    results: dict[str, dict[str, Any]] = {
        f"{direction}, {kind}": {"encode": [], "decode": []} for direction, kind in CODES
    }
    for _ in range(REPETITIONS + 1):
        for (direction, kind), result in zip(CODES, results.values(), strict=True):
            codec = Codec(kind, ((0, values),), values, ranked=direction == "push")
            base, chance = (initial, 1) if direction == "push" else (None, None)
            onto = initial.clone() if direction == "push" else None  # the head gathers it from its network
            started = time.thread_time()
            content = codec.encode(trained, base, chance)
            encoded = time.thread_time()
            back = codec.decode(content, onto)
            result["decode"].append(time.thread_time() - encoded)
            result["encode"].append(encoded - started)
            sent = trained if base is None else trained - base
            result["bytes"] = codec.nbytes / (4 * values)
            result["norm"] = 1 - float((back - trained).square().sum() / sent.square().sum())
    for result in results.values():
        result["encode"], result["decode"] = result["encode"][1:], result["decode"][1:]  # the first warms up
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, values = with_preset(__doc__, argv, VALUES, TINY_VALUES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = measure(values)
    torch.set_num_threads(threads)
    figures = []
    for name, result in results.items():
        rates = [4e-9 * values / (e + d) for e, d in zip(result["encode"], result["decode"], strict=True)]
        figures.append(at_least(f"{name}: encode and decode", statistics.median(rates), "GB/s", 1.0, rates))
        for operation in ("encode", "decode"):
            each = [4e-9 * values / seconds for seconds in result[operation]]
            figures.append(Figure(f"{name}: {operation}", statistics.median(each), "GB/s", samples=each))
        share, norm = f"{name}: bytes of float32's", f"{name}: squared norm that arrives"
        if name == "push, int4":
            figures += [at_most(share, result["bytes"], "", 0.13), at_least(norm, result["norm"], "", 0.95)]
        else:
            figures += [Figure(share, result["bytes"], ""), Figure(norm, result["norm"], "")]
    both = 2 / (results["push, int4"]["bytes"] + results["pull, int8"]["bytes"])
    figures.append(at_least("float32 both ways / int4 up and int8 down", both, "", 5.0))
    return report("codec", options, figures)


if __name__ == "__main__":
    main()
