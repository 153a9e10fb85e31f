"""Compare independent subnets whose last rounds train the whole network with those that never do.

Four of the families of `benchmarks.accuracy`, each trained by local SGD on four workers and by ist as four subnets, of
whose rounds no part, a tenth, a fifth or two fifths, the last ones, train whole networks (`training.finish_whole`).
Every subnet takes as many steps in all. Reported are the loss on held-out data, as a mean of three seeds, and the
seconds of one core that all subnets take together.

    python -m benchmarks.finishing [--tiny] [--only FAMILY ...] [--json FILE]

`idletrain.autotune` tries a fifth beside none.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch

from benchmarks import in_process
from benchmarks.accuracy import FAMILIES, TINY, Family
from benchmarks.report import Figure, at_most, parser, report
from idletrain.job_file import parse_job
from idletrain.nn.evaluate import score
from idletrain.nn.prepare import from_settings

NAMES = ("mlp with BatchNorm", "autoencoder", "regression", "diabetes")
SHARES = (0.0, 0.1, 0.2, 0.4)
WAYS: dict[str, dict[str, Any]] = {
    "local SGD": {"method": "local-sgd"},
    **{f"ist, {share:.0%} whole" if share else "ist": {"method": "ist", "finish_whole": share} for share in SHARES},
}
SUBNETS, SEEDS = 4, (0, 1, 2)
CHOSEN = "ist, 20% whole"


def run_one(name: str, family: Family, way: str, seed: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    settings = {key: getattr(family, key) for key in ("loss", "batch_size", "local_steps", "rounds")}
    settings |= {"seed": seed, "subnets": SUBNETS, "optimizer": {"name": "sgd", **family.rows[0].optimizer}}
    tree = {"name": "t", "model": family.model, "data": family.data, "training": {**settings, **WAYS[way]}}
    job = parse_job(tree)
    prepared = from_settings(job.model, job.data, job.training)
    assert not prepared.fallback
    assert prepared.test is not None
    started = time.process_time()
    module = in_process.train(prepared, family.rounds, family.local_steps)
    seconds = time.process_time() - started
    end = score(module, prepared.test.open(), prepared.program.loss)
    print(f"{name}, {way}, seed {seed}: {end} in {seconds:.0f} s", flush=True)
    return {"family": name, "way": way, "seed": seed, "seconds": seconds, "loss": end.loss, "accuracy": end.accuracy}


def figures_of(name: str, runs: list[dict[str, Any]]) -> list[Figure]:
    """Return a family's figures."""
    figures = []
    mean: dict[str, float] = {}
    for way in WAYS:
        own = [run for run in runs if (run["family"], run["way"]) == (name, way)]
        losses, seconds = ([run[key] for run in own] for key in ("loss", "seconds"))
        mean[way] = statistics.mean(losses)
        figures.append(Figure(f"{name}, {way}: loss", mean[way], "", samples=losses))
        figures.append(Figure(f"{name}, {way}: time of one core", statistics.median(seconds), "s", samples=seconds))
    figures.append(at_most(f"{name}: loss of {CHOSEN} / ist", mean[CHOSEN] / mean["ist"], "", 1.0))
    return figures


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=NAMES, metavar="FAMILY", help=", ".join(NAMES))
    options = command.parse_args(argv)
    families = TINY if options.tiny else {name: FAMILIES[name] for name in options.only or NAMES}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        futures = [
            pool.submit(run_one, name, family, way, seed)
            for name, family in families.items()
            for way in WAYS
            for seed in (SEEDS[:1] if options.tiny else SEEDS)
        ]
        runs = [future.result() for future in futures]
    figures = [figure for name in families for figure in figures_of(name, runs)]
    return report("finishing", options, figures, runs=runs)


if __name__ == "__main__":
    main()
