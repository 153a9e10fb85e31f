"""Measure what codes, and updates that break off, cost in accuracy.

`ist` with 4 and with 8 subnets on Fashion-MNIST, 12.8 passes over all of the data for every subnet, with
parameters as float32 both ways or coded, three seeds each. Then, with 4 subnets, half of all updates break off at a
fifth of their bytes: they are dropped, or the part that arrived is used, the largest changes first. It runs the code
of workers and head, without Dask.

    python -m benchmarks.coded_accuracy [--tiny] [--json FILE]

Targets: five times fewer bytes than float32 both ways within 0.1 points of its accuracy; of what dropping costs, 60 %
won back at a fifth of the bytes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.cores import call_all
from benchmarks.report import Figure, at_least, at_most, report, with_preset
from idletrain.exchange.messages import LeaseId
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.evaluate import assembled, score
from idletrain.nn.ist.randomness import generator
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.nn.program import Program
from idletrain.nn.statistics import estimate_statistics
from idletrain.worker import encoding

PLAIN = ("fp32", "fp32")
CODE_PAIRS = (("int8", "int4"), ("int8", "int8"), ("bf16", "int8"), ("int4", "int4"))  # pull, push
BROKEN, ARRIVED_FRACTION = 0.5, 0.2
LOSS_CASES = ("whole", "dropped", "salvaged")


POINTS = 100.0


@dataclass(frozen=True)
class Training:
    """The amount of training: epochs over the data, shared by all subnets as data parallel counts them."""

    epochs: float = 12.8
    data: str = "fashion-mnist"
    samples: int = 60_000
    widths: tuple[int, ...] = (784, 1024, 1024, 10)
    batch_size: int = 128
    local_steps: int = 50


SMALL_TRAINING = Training(
    epochs=2,
    data="digits",
    samples=1437,
    widths=(64, 32, 32, 10),
    batch_size=32,
    local_steps=5,
)


def job_of(training: Training, lr: float, seed: int, subnets: int) -> Job:
    """Return the job of one training; every subnet passes over all of the data."""
    steps = training.epochs * training.samples / training.batch_size
    return parse_job(
        {
            "name": "coded",
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": list(training.widths)}},
            "data": {"name": training.data},
            "training": {
                "method": "ist",
                "subnets": subnets,
                "local_steps": training.local_steps,
                "rounds": max(1, math.floor(steps / training.local_steps)),
                "batch_size": training.batch_size,
                "optimizer": {"name": "sgd", "lr": lr, "schedule": "cosine"},
                "seed": seed,
            },
        }
    )


@dataclass(frozen=True)
class Run:
    """One training."""

    subnets: int
    codes: tuple[str, str]
    seed: int
    case: str = "whole"


@dataclass(frozen=True)
class Preset:
    """The training, by numbers of subnets and seeds."""

    training: Training = Training()
    subnets: tuple[int, ...] = (4, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    lr: float = 0.2


TINY = Preset(replace(SMALL_TRAINING, widths=(64, 256, 256, 10)), (4,), (0, 1), 0.1)


def job(preset: Preset, run: Run) -> Job:
    """Return the job of one training."""
    base = job_of(preset.training, preset.lr, run.seed, run.subnets)
    pull, push = run.codes
    exchange = base.training.exchange.model_copy(update={"pull": pull, "push": push})
    training = base.training.model_copy(update={"exchange": exchange})
    return base.model_copy(update={"training": training})


@dataclass(frozen=True)
class Baseline:
    """A lease's initial values, as the head has them and as the worker decoded them."""

    lease: LeaseId
    at_head: torch.Tensor
    at_worker: torch.Tensor


def arrived(program: Program, subnet: Subnet, flat: torch.Tensor, baseline: Baseline, run: Run) -> torch.Tensor | None:
    """Return an update as the head decodes it; None if it is dropped."""
    lease = baseline.lease
    content = encoding.encode_update(program, subnet, flat, baseline.at_worker, lease)
    codec = encoding.codec(program, subnet, "push")
    if codec is None:
        return flat
    broken = run.case != "whole" and generator(run.seed, "broken", lease.round, lease.subnet).random() < BROKEN
    if broken and run.case == "dropped":
        return None
    arrived_rows = codec.rows_before(int(ARRIVED_FRACTION * codec.nbytes)) if broken else None
    return codec.decode(content, baseline.at_head, arrived_rows)


def simulate(settings: Job, run: Run) -> float:
    """Train in this process, subnets one after the other; the test accuracy."""
    prepared = from_settings(settings.model, settings.data, settings.training)
    program, training = prepared.program, settings.training
    network, samples = Network.of(program, prepared.network), program.source.open()
    order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
    for round_ in range(training.rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, by_neurons((1 / training.subnets,) * training.subnets))):
            at_head = network.pull(subnet)
            at_worker = encoding.decode_pull(program, subnet, encoding.encode_pull(program, subnet, at_head))
            flat = at_worker.clone()
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(training.local_steps):
                work.step(samples, order, step)
            lease = LeaseId("bench", 1, round_, k, 1)
            values = arrived(program, subnet, flat, Baseline(lease, at_head, at_worker), run)
            if values is not None:
                updates.append((subnet, values, training.local_steps))
        network.commit(updates)
    return network_accuracy(prepared, network, training.seed)


def network_accuracy(prepared: Prepared, network: Network, seed: int) -> float:
    """Return the accuracy on test data, with BatchNorm's statistics estimated as a run does."""
    module = assembled(prepared.module, network.values)
    estimate_statistics(module, prepared.program.source.open(), seed)
    assert prepared.test is not None
    accuracy = score(module, prepared.test.open(), prepared.program.loss).accuracy
    assert accuracy is not None
    return accuracy


def run_one(preset: Preset, run: Run) -> dict[str, Any]:
    """Run one training on one thread, in a process of its own."""
    torch.set_num_threads(1)
    started = time.monotonic()
    accuracy = simulate(job(preset, run), run)
    print(f"{run}: {accuracy:.4f} in {time.monotonic() - started:.0f} s", flush=True)
    return {
        "subnets": run.subnets,
        "codes": run.codes,
        "seed": run.seed,
        "case": run.case,
        "accuracy": accuracy,
        "bytes": bytes_of(preset, run),
    }


def bytes_of(preset: Preset, run: Run) -> int:
    """Return the bytes of a round, pull and push."""
    settings = job(preset, run)
    program = from_settings(settings.model, settings.data, settings.training).program
    subnets = program.subnets(0, by_neurons((1 / run.subnets,) * run.subnets))
    return sum(encoding.nbytes(program, subnet, direction) for subnet in subnets for direction in encoding.DIRECTIONS)


def all_runs(preset: Preset) -> list[Run]:
    """Return every training to run."""
    coded = [Run(n, codes, seed) for n in preset.subnets for codes in (PLAIN, *CODE_PAIRS) for seed in preset.seeds]
    few, codes = preset.subnets[0], CODE_PAIRS[1]
    return coded + [Run(few, codes, seed, case) for case in LOSS_CASES[1:] for seed in preset.seeds]


def mean(runs: Sequence[dict[str, Any]], subnets: int, codes: tuple[str, str], case: str = "whole") -> Figure:
    """Return the mean accuracy over seeds."""
    accuracies = [
        r["accuracy"] * POINTS for r in runs if (r["subnets"], tuple(r["codes"]), r["case"]) == (subnets, codes, case)
    ]
    name = f"{subnets} subnets, pull {codes[0]}, push {codes[1]}" + ("" if case == "whole" else f", half {case}")
    return Figure(f"{name}: accuracy", statistics.mean(accuracies), "%", samples=accuracies)


def figures_of(preset: Preset, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return accuracies, the cost of codes, and how much of it salvage wins back."""
    figures: list[Figure] = []
    for n in preset.subnets:
        plain = mean(runs, n, PLAIN)
        figures.append(plain)
        for codes in CODE_PAIRS:
            coded = mean(runs, n, codes)
            fewer = _bytes(runs, n, PLAIN) / _bytes(runs, n, codes)
            label = f"{n} subnets, pull {codes[0]}, push {codes[1]}"
            if codes == CODE_PAIRS[0]:
                figures.append(at_least(f"{label}: times fewer bytes", fewer, "", 5.0))
            else:
                figures.append(Figure(f"{label}: times fewer bytes", fewer, ""))
            figures += [coded, at_most(f"{label}: behind float32", plain.value - coded.value, "points", 0.1)]
    whole, dropped, salvaged = (mean(runs, preset.subnets[0], CODE_PAIRS[1], case) for case in LOSS_CASES)
    cost = whole.value - dropped.value
    won = (salvaged.value - dropped.value) / cost if cost > 0 else float(salvaged.value >= whole.value)
    label = "won back of what dropping half costs, at a fifth of the bytes"
    return [*figures, dropped, salvaged, at_least(label, won, "", 0.6)]


def _bytes(runs: Sequence[dict[str, Any]], subnets: int, codes: tuple[str, str]) -> float:
    return float(next(r["bytes"] for r in runs if (r["subnets"], tuple(r["codes"])) == (subnets, codes)))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    runs = call_all(run_one, ((preset, run) for run in all_runs(preset)), tiny=options.tiny)
    return report("coded_accuracy", options, figures_of(preset, runs), runs=runs)


if __name__ == "__main__":
    main()
