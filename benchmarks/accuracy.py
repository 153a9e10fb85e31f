"""Does `ist` reach the accuracy of data parallel at equal epochs over the data?

`ist` with 4 subnets and J = 50 against `local-sgd` with J = 1 on 4 replicas (data parallel), on Fashion-MNIST, an
MLP 784-1024-1024-10 with BatchNorm, plain SGD with a cosine schedule, batch 128 a subnet; each method at the learning
rate that does best for it with seed 0, then the mean of three seeds. It runs the code that workers run (Program,
Network, LocalSteps) without Dask; BatchNorm's statistics are estimated afterwards as a run does.

An epoch can be counted in two ways, and both are measured. `shared`: the subnets share each pass over the data, as
data parallel's replicas do, so that every neuron sees a quarter of it. `each`: every subnet passes over all of the
data, as in the IST authors' code; all subnets' passes together cost less arithmetic than data parallel's one.

    python -m benchmarks.accuracy [--tiny] [--json FILE]

Target: at most 0.5 points below data parallel.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.report import Figure, arguments, at_most, report
from idletrain.job import Job, parse_job
from idletrain.nn.evaluate import assembled, estimate_statistics, score
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings

SUBNETS = 4
POINTS = 100.0
Contender = tuple[str, int, str]  # method, local steps, how epochs are counted


@dataclass(frozen=True)
class Plan:
    """How much is trained: epochs over the data, shared by all subnets as data parallel counts them."""

    epochs: float = 12.8
    data: str = "fashion-mnist"
    samples: int = 60_000
    widths: tuple[int, ...] = (784, 1024, 1024, 10)
    batch_size: int = 128
    learning_rates: tuple[float, ...] = (0.2, 0.4)
    seeds: tuple[int, ...] = (0, 1, 2)
    contenders: tuple[Contender, ...] = (("ist", 50, "each"), ("ist", 50, "shared"), ("local-sgd", 1, "shared"))


TINY = Plan(
    epochs=2,
    data="digits",
    samples=1437,
    widths=(64, 32, 32, 10),
    batch_size=32,
    learning_rates=(0.1,),
    seeds=(0, 1),
    contenders=(("ist", 5, "shared"), ("local-sgd", 1, "shared")),
)


def job_of(plan: Plan, contender: Contender, lr: float, seed: int) -> Job:
    """The job of one training."""
    method, local_steps, epochs = contender
    steps = plan.epochs * plan.samples / plan.batch_size / (1 if epochs == "each" else SUBNETS)
    return parse_job(
        {
            "name": "accuracy",
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": list(plan.widths)}},
            "data": {"name": plan.data},
            "training": {
                "method": method,
                "subnets": SUBNETS,
                "local_steps": local_steps,
                "rounds": max(1, math.floor(steps / local_steps)),
                "batch_size": plan.batch_size,
                "optimizer": {"lr": lr, "schedule": "cosine"},
                "seed": seed,
            },
        }
    )


def simulate(job: Job) -> float:
    """Train a job in this process, its subnets one after the other; returns the test accuracy.

    For plain SGD, which has no state to travel.
    """
    prepared = from_settings(job.model, job.data, job.training)
    program, training = prepared.program, job.training
    network = Network.of(program, prepared.network)
    samples = program.source.open()
    order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
    for round_ in range(training.rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, (1 / training.subnets,) * training.subnets)):
            flat = network.pull(subnet)
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(training.local_steps):
                work.step(samples, order, step)
            updates.append((subnet, flat, training.local_steps))
        network.commit(updates)
    return network_accuracy(prepared, network, training.seed)


def network_accuracy(prepared: Prepared, network: Network, seed: int) -> float:
    """On the test data, with BatchNorm's statistics estimated as a run does."""
    module = assembled(prepared.module, network.values)
    estimate_statistics(module, prepared.program.source.open(), seed)
    assert prepared.test is not None
    accuracy = score(module, prepared.test.open(), prepared.program.loss).accuracy
    assert accuracy is not None
    return accuracy


def run_one(plan: Plan, contender: Contender, lr: float, seed: int) -> dict[str, Any]:
    """One training on one thread, in a process of its own."""
    torch.set_num_threads(1)
    started = time.monotonic()
    accuracy = simulate(job_of(plan, contender, lr, seed))
    seconds = time.monotonic() - started
    print(f"{contender} lr={lr} seed={seed}: {accuracy:.4f} in {seconds:.0f} s", flush=True)
    return {"contender": contender, "lr": lr, "seed": seed, "accuracy": accuracy, "seconds": seconds}


def run_all(plan: Plan) -> list[dict[str, Any]]:
    """The sweep with the first seed, then the other seeds at each contender's best learning rate."""
    workers = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        sweep = [
            pool.submit(run_one, plan, contender, lr, plan.seeds[0])
            for contender in reversed(plan.contenders)
            for lr in plan.learning_rates
        ]
        runs = [future.result() for future in sweep]
        rest = [
            pool.submit(run_one, plan, contender, best_lr(runs, contender), seed)
            for contender in reversed(plan.contenders)
            for seed in plan.seeds[1:]
        ]
        return runs + [future.result() for future in rest]


def best_lr(runs: Sequence[dict[str, Any]], contender: Contender) -> float:
    """The learning rate whose first seed did best."""
    mine = [run for run in runs if run["contender"] == contender]
    best: float = max(mine, key=lambda run: run["accuracy"])["lr"]
    return best


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    options = arguments(__doc__, argv)
    plan = TINY if options.tiny else Plan()
    runs = run_all(plan)
    figures: list[Figure] = []
    means: dict[Contender, float] = {}
    for contender in plan.contenders:
        method, local_steps, epochs = contender
        lr = best_lr(runs[: len(plan.contenders) * len(plan.learning_rates)], contender)
        accuracies = [run["accuracy"] * POINTS for run in runs if (run["contender"], run["lr"]) == (contender, lr)]
        means[contender] = statistics.mean(accuracies)
        name = f"{method}, J = {local_steps}, {epochs} epochs, lr {lr:g}: accuracy"
        figures.append(Figure(name, means[contender], "%", samples=accuracies))
    *ours, data_parallel = plan.contenders
    for contender in ours:
        behind = means[data_parallel] - means[contender]
        figures.append(at_most(f"{contender[0]}, {contender[2]} epochs: behind data parallel", behind, "points", 0.5))
    return report("accuracy", options, figures, epochs=plan.epochs, runs=runs)


if __name__ == "__main__":
    main()
