"""Run every benchmark, one after the other, each in a process of its own, and write `benchmarks/results/NAME.json`.

python -m benchmarks [--tiny] [NAME ...]

Not among them: time_to_accuracy and trace_goodput, which take hours and a recorded trace, and add to their files;
link_use, bad_links, lossy_rounds, wide_exchange, fabric, forecast and autotune, which need root; modules,
which installs many packages; outofcore_gpu, which needs a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.stale import RESULTS

NAMES = (
    "round_overhead",
    "exchange",
    "local_steps",
    "memory",
    "memory_over_rounds",
    "outofcore",
    "churn",
    "efficiency",
    "accuracy",
    "offers",
    "spot_latency",
    "codec",
    "coded_accuracy",
    "defaults",
    "kernels",
    "label_cost",
    "learning_rates",
    "linear_trees",
    "wide_labels",
    "wide_scale",
    "where_time_goes",
    "scale",
    "page",
    "fine_tuning",
    "finishing",
    "precision",
    "quality",
    "rolling",
    "slow_worker",
    "splits",
    "simulated_fleet",
)


def main(argv: list[str] | None = None) -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none")
    parser.add_argument("--tiny", action="store_true", help="a few seconds each; the figures then mean nothing")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    RESULTS.mkdir(exist_ok=True)
    for name in arguments.names or NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--tiny"] if arguments.tiny else ["--json", str(RESULTS / f"{name}.json")]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
