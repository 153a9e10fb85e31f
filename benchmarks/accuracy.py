"""Compare the final accuracy of networks trained as independent subnets with that of networks trained whole.

Six families, each trained whole (one subnet) and as several subnets that take as many steps each: a plain MLP and
one with BatchNorm on Fashion-MNIST, a pre-LN transformer on text, a convolutional autoencoder on digits, and two
regressions. Reported of each are loss on held-out data and, of classes, accuracy, expected calibration error and the
temperature that logits should be divided by. It runs the code that workers run (Program, Network, LocalSteps) without
Dask; BatchNorm's statistics are estimated afterwards as a run does. Three seeds.

    python -m benchmarks.accuracy [--tiny] [--only FAMILY ...] [--json FILE]

Text is that of Debian's package dict-gcide; its family is left out where the package is not installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import text
from benchmarks.cores import call_all
from benchmarks.report import Figure, at_least, at_most, parser, report
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.evaluate import Score, assembled, score
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.nn.statistics import estimate_statistics

POINTS = 100.0
TEMPERATURES = (0.8, 1.3)  # within which a network's confidence needs no correction
CONTEXT, WINDOWS, HELD_OUT = 64, 30_000, 1_000  # of text, in bytes: 1.9 MB to train on
ROWS = 3_000  # of the synthetic regression; a third as many are held out
Pair = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class Row:
    """One way to train a family.

    Attributes:
        subnets: 1 is the network trained whole.
        bounds: Figures of the end that should be reached: at least this accuracy in percent, at most that loss.
    """

    subnets: int
    optimizer: Mapping[str, Any]
    bounds: Mapping[str, float]

    @property
    def name(self) -> str:
        """Return the name in figures."""
        how = "whole" if self.subnets == 1 else f"{self.subnets} subnets"
        return f"{how}, {self.optimizer.get('name', 'sgd')} {self.optimizer['lr']:g}" + (
            f" momentum {self.optimizer['momentum']:g}" if "momentum" in self.optimizer else ""
        )


@dataclass(frozen=True)
class Family:
    """A model, its data and how it is trained."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    loss: str
    batch_size: int
    local_steps: int
    rounds: int
    rows: Sequence[Row]


def _mlp(norm: str | None) -> dict[str, Any]:
    return {"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 1024, 1024, 10], "norm": norm}}


FASHION = {"name": "fashion-mnist"}
MOMENTUM = {"lr": 0.05, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 1e-3}
FAMILIES = {
    "mlp": Family(
        _mlp(None), FASHION, "cross_entropy", 128, 50, 60,
        [
            Row(1, {"lr": 0.2}, {}),
            Row(4, {"lr": 0.2}, {"accuracy": 85.58, "loss": 0.397}),
            Row(4, MOMENTUM, {"accuracy": 86.60, "loss": 0.372}),
        ],
    ),
    "mlp with BatchNorm": Family(
        _mlp("batch"), FASHION, "cross_entropy", 128, 50, 60,
        [
            Row(1, {"lr": 0.4}, {}),
            Row(4, {"lr": 0.4}, {"accuracy": 88.73, "loss": 0.319}),
            Row(8, {"lr": 0.4}, {"accuracy": 88.11, "loss": 0.345}),
        ],
    ),
    "pre-LN transformer": Family(
        {
            "factory": "idletrain.nn.models:transformer",
            "args": {"vocabulary": 128, "context": CONTEXT, "width": 128, "heads": 8, "hidden": 512, "blocks": 3},
        },
        {"factory": "benchmarks.accuracy:bytes_of_text"}, "cross_entropy", 32, 50, 20,
        [Row(1, ADAMW, {}), Row(4, ADAMW, {"loss / whole": 1.141}), Row(8, ADAMW, {"loss / whole": 1.207})],
    ),
    "autoencoder": Family(
        {"factory": "benchmarks.accuracy:autoencoder"}, {"factory": "benchmarks.accuracy:digit_images"}, "mse", 32, 30,
        24, [Row(1, ADAMW, {}), Row(4, ADAMW, {})],
    ),
    "regression": Family(
        {"factory": "benchmarks.accuracy:regressor", "args": {"inputs": 16}},
        {"factory": "benchmarks.accuracy:one_input"},
        "mse", 128, 50, 40, [Row(1, ADAMW, {}), Row(2, ADAMW, {"loss": 0.01}), Row(4, ADAMW, {"loss": 0.01})],
    ),
    "diabetes": Family(
        {"factory": "benchmarks.accuracy:regressor", "args": {"inputs": 10}},
        {"factory": "benchmarks.accuracy:diabetes"},
        "mse", 32, 20, 20,
        [Row(1, ADAMW, {}), Row(2, ADAMW, {"loss / whole": 1.1}), Row(4, ADAMW, {"loss / whole": 1.1})],
    ),
}  # fmt: skip
TINY = {
    "mlp": replace(
        FAMILIES["mlp"],
        model={"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10], "norm": None}},
        data={"name": "digits"}, batch_size=32, local_steps=10, rounds=6,
        rows=[Row(1, {"lr": 0.3}, {}), Row(4, {"lr": 0.3}, {"accuracy": 20})],
    ),
    "diabetes": replace(FAMILIES["diabetes"], rounds=3),
}  # fmt: skip


# --- models and data --------------------------------------------------------------------------------------------------


def regressor(inputs: int) -> nn.Module:
    """Build a plain MLP with one output."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def autoencoder() -> nn.Module:
    """Build an autoencoder of images `[B, 1, 8, 8]`, with 32 channels of 2 by 2 between."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1),
    )  # fmt: skip


def bytes_of_text() -> tuple[Pair, Pair]:
    """Return windows of text and the bytes that follow."""
    (x, y), (held_x, held_y) = text.gcide(WINDOWS, HELD_OUT, CONTEXT)
    return (x.astype(np.int64), y.astype(np.int64)), (held_x.astype(np.int64), held_y.astype(np.int64))


def digit_images() -> tuple[Pair, Pair]:
    """Return scikit-learn's digits as images from 0 to 1, and the same again as targets."""
    from sklearn.datasets import load_digits

    images = (load_digits().images / 16).astype(np.float32)[:, None]
    return _held_out(images, images)


def one_input() -> tuple[Pair, Pair]:
    """Return sixteen normal numbers, of which the first is the target."""
    x = np.random.default_rng(0).standard_normal((ROWS * 4 // 3, 16)).astype(np.float32)
    return _held_out(x, x[:, :1].copy())


def diabetes() -> tuple[Pair, Pair]:
    """Return scikit-learn's diabetes data, inputs and target of mean 0 and variance 1."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = ((values - values.mean(0)) / values.std(0) for values in (x, y[:, None]))
    return _held_out(x.astype(np.float32), y.astype(np.float32))


def _held_out(x: NDArray[Any], y: NDArray[Any]) -> tuple[Pair, Pair]:
    """Split the rows at random, holding out a quarter."""
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[len(x) // 4 :], order[: len(x) // 4]
    return (x[train], y[train]), (x[test], y[test])


# --- training ---------------------------------------------------------------------------------------------------------


def job_of(family: Family, row: Row, seed: int) -> Job:
    """Return the job of one training."""
    training = {
        "method": "local-sgd" if row.subnets == 1 else "ist",
        "loss": family.loss,
        "optimizer": {"name": "sgd", **row.optimizer},
        **{key: getattr(family, key) for key in ("batch_size", "local_steps", "rounds")},
    }
    return parse_job(
        {
            "name": "accuracy",
            "model": dict(family.model),
            "data": dict(family.data),
            "training": {**training, "subnets": row.subnets, "seed": seed},
        }
    )


def simulate(job: Job) -> tuple[Score, Score]:
    """Train a job in this process, its subnets one after the other; score it halfway and at the end."""
    prepared = from_settings(job.model, job.data, job.training)
    program, training = prepared.program, job.training
    network, samples = Network.of(program, prepared.network), program.source.open()
    order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
    scores = []
    for round_ in range(training.rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, by_neurons((1 / training.subnets,) * training.subnets))):
            flat = network.pull(subnet)
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(training.local_steps):
                work.step(samples, order, step)
            updates.append((subnet, flat, training.local_steps))
        network.commit(updates)
        if round_ + 1 in (training.rounds // 2, training.rounds):
            scores.append(held_out_score(prepared, network, training.seed))
    halfway, end = scores
    return halfway, end


def held_out_score(prepared: Prepared, network: Network, seed: int) -> Score:
    """Score a network on held-out data, with BatchNorm's statistics estimated as a run does."""
    module = assembled(prepared.module, network.values)
    estimate_statistics(module, prepared.program.source.open(), seed)
    assert prepared.test is not None
    return score(module, prepared.test.open(), prepared.program.loss)


def run_one(family: str, of: Family, row: Row, seed: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    started = time.monotonic()
    halfway, end = simulate(job_of(of, row, seed))
    seconds = time.monotonic() - started
    print(f"{family}, {row.name}, seed {seed}: {end} in {seconds:.0f} s", flush=True)
    names = {"family": family, "row": row.name, "subnets": row.subnets, "seed": seed, "seconds": seconds}
    return {**names, "halfway": asdict(halfway), "end": asdict(end)}


def run_all(families: Mapping[str, Family], seeds: Sequence[int], *, tiny: bool) -> list[dict[str, Any]]:
    """Train everything, as many at once as there are cores; what takes longest first."""
    calls = (
        (name, family, row, seed)
        for name, family in families.items()
        for row in sorted(family.rows, key=lambda row: -row.subnets)
        for seed in seeds
    )
    return call_all(run_one, calls, tiny=tiny)


def figures_of(name: str, family: Family, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return a family's figures, with their bounds."""
    figures: list[Figure] = []
    whole = _mean_of(runs, name, family.rows[0], "end", "loss")
    for row in family.rows:
        for figure, unit, factor in (("accuracy", "%", POINTS), ("loss", "", 1.0), ("calibration_error", "", 1.0)):
            samples = _samples(runs, name, row, "end", figure)
            if not samples:
                continue
            values = [value * factor for value in samples]
            mean, what = statistics.mean(values), f"{name}, {row.name}: {figure.replace('_', ' ')}"
            bound = row.bounds.get(figure)
            judged = at_least if figure == "accuracy" else at_most
            figures.append(
                Figure(what, mean, unit, samples=values) if bound is None else judged(what, mean, unit, bound, values)
            )
        halfway, end = (_mean_of(runs, name, row, at, "loss") for at in ("halfway", "end"))
        figures.append(Figure(f"{name}, {row.name}: loss halfway", halfway, ""))
        if row.subnets > 1:
            what = f"{name}, {row.name}: loss / whole"
            bound = row.bounds.get("loss / whole")
            figures.append(Figure(what, end / whole, "") if bound is None else at_most(what, end / whole, "", bound))
        if temperatures := _samples(runs, name, row, "end", "temperature"):
            mean, what = statistics.mean(temperatures), f"{name}, {row.name}: best temperature"
            met = TEMPERATURES[0] <= mean <= TEMPERATURES[1]
            figures.append(Figure(what, mean, "", f"{TEMPERATURES[0]} to {TEMPERATURES[1]}", met, temperatures))
    return figures


def _samples(runs: Sequence[dict[str, Any]], name: str, row: Row, at: str, figure: str) -> list[float]:
    of_row = (run[at][figure] for run in runs if (run["family"], run["row"]) == (name, row.name))
    return [value for value in of_row if value is not None]


def _mean_of(runs: Sequence[dict[str, Any]], name: str, row: Row, at: str, figure: str) -> float:
    return statistics.mean(_samples(runs, name, row, at, figure))


def available(names: Iterable[str]) -> dict[str, Family]:
    """Return the families of these names, without that of text where the text is not installed."""
    families = {name: FAMILIES[name] for name in names}
    if "pre-LN transformer" in families and not text.GCIDE.exists():
        print(f"pre-LN transformer: left out, {text.GCIDE} is not there; install the Debian package dict-gcide")
        del families["pre-LN transformer"]
    return families


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    options = command.parse_args(argv)
    families = TINY if options.tiny else available(options.only or FAMILIES)
    runs = run_all(families, (0, 1) if options.tiny else (0, 1, 2), tiny=options.tiny)
    figures = [figure for name, family in families.items() for figure in figures_of(name, family, runs)]
    return report("accuracy", options, figures, runs=runs)


if __name__ == "__main__":
    main()
