"""Compare ways to train subnets, above all with whole networks in the last rounds, for as many steps and for as long.

Families of `benchmarks.accuracy`, some with fewer rounds, each trained by local SGD on four workers and as four
subnets: every neuron in one of them (ist), in one until the last fifth of the rounds, which train whole networks
(`training.finish_whole`), or in two (`training.copies`). First every subnet takes as many steps as a worker of local
SGD; then each way goes on for as long as local SGD took, in seconds of one core for all subnets, with other parts of
whole rounds, too. Reported are the loss on held-out data, as a mean of three seeds, and the seconds.

    python -m benchmarks.finishing [--tiny] [--only FAMILY ...] [--json FILE]

`idletrain.autotune` tries a fifth beside none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import in_process
from benchmarks.accuracy import TINY, Family, available
from benchmarks.cores import call_all
from benchmarks.report import Figure, at_most, parser, report
from idletrain.job_file import parse_job
from idletrain.nn.evaluate import score
from idletrain.nn.prepare import from_settings

NAMES = ("autoencoder", "regression", "diabetes", "mlp with BatchNorm")
ROUNDS = {"mlp with BatchNorm": 20}  # instead of the family's own, which take hours
SUBNETS, SEEDS = 4, (0, 1, 2)
WHOLE, CHOSEN = "local SGD", "ist, 20% whole"
WAYS: dict[str, dict[str, Any]] = {
    WHOLE: {"method": "local-sgd"},
    "ist": {"method": "ist"},
    CHOSEN: {"method": "ist", "finish_whole": 0.2},
    "2 copies": {"method": "ist", "copies": 2},
}
LONGER_WAYS: dict[str, dict[str, Any]] = {
    **{way: settings for way, settings in WAYS.items() if way != WHOLE},
    "ist, 10% whole": {"method": "ist", "finish_whole": 0.1},
    "ist, 40% whole": {"method": "ist", "finish_whole": 0.4},
    "2 copies, 20% whole": {"method": "ist", "copies": 2, "finish_whole": 0.2},
}
Run = dict[str, Any]


def run_one(name: str, family: Family, way: str, seed: int, rounds: int) -> Run:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    settings = {key: getattr(family, key) for key in ("loss", "batch_size", "local_steps")}
    settings |= {"rounds": rounds, "seed": seed, "subnets": SUBNETS}
    settings |= {"optimizer": {"name": "sgd", **family.rows[0].optimizer}, **(WAYS | LONGER_WAYS)[way]}
    job = parse_job({"name": "t", "model": family.model, "data": family.data, "training": settings})
    prepared = from_settings(job.model, job.data, job.training)
    assert not prepared.fallback
    assert prepared.test is not None
    started = time.process_time()
    module = in_process.train(prepared, rounds, family.local_steps)
    seconds = time.process_time() - started
    end = score(module, prepared.test.open(), prepared.program.loss)
    print(f"{name}, {way}, {rounds} rounds, seed {seed}: {end} in {seconds:.0f} s", flush=True)
    found = {"family": name, "way": way, "seed": seed, "rounds": rounds}
    return {**found, "seconds": seconds, "loss": end.loss, "accuracy": end.accuracy}


def shorter(name: str, family: Family) -> Family:
    """Return a family with as many rounds as it has here."""
    return replace(family, rounds=ROUNDS.get(name, family.rounds))


def rounds_as_long(family: Family, runs: Sequence[Run]) -> dict[str, int]:
    """Return for each way how many rounds take as long as local SGD took, by the seconds of runs of one family."""
    seconds = {way: statistics.median(_of(runs, way, "seconds")) for way in WAYS}
    rounds = {}
    for way, settings in LONGER_WAYS.items():
        share, own = settings.get("finish_whole", 0.0), "2 copies" if "copies" in settings else "ist"
        mean = (1 - share) * seconds[own] + share * seconds[WHOLE]
        rounds[way] = max(2, round(family.rounds * seconds[WHOLE] / mean))
    return rounds


def figures_of(name: str, runs: Sequence[Run], longer: Sequence[Run]) -> list[Figure]:
    """Return a family's figures."""
    figures = []
    mean = {}
    for how, own, ways in (("", runs, WAYS), (", as long", longer, LONGER_WAYS)):
        for way in ways:
            losses, accuracies = _of(own, way, "loss"), _of(own, way, "accuracy")
            mean[way + how] = statistics.mean(losses)
            figures.append(Figure(f"{name}, {way}{how}: loss", mean[way + how], "", samples=losses))
            if None not in accuracies:
                percents = [100 * accuracy for accuracy in accuracies]
                figures.append(
                    Figure(f"{name}, {way}{how}: accuracy", statistics.mean(percents), "%", samples=percents)
                )
            seconds = _of(own, way, "seconds")
            figures.append(
                Figure(f"{name}, {way}{how}: time of one core", statistics.median(seconds), "s", samples=seconds)
            )
    figures.append(at_most(f"{name}: loss of {CHOSEN} / ist", mean[CHOSEN] / mean["ist"], "", 1.0))
    as_long = mean[f"{CHOSEN}, as long"]
    figures.append(at_most(f"{name}: loss of {CHOSEN} / ist, both as long", as_long / mean["ist, as long"], "", 1.0))
    figures.append(at_most(f"{name}: loss of {CHOSEN}, as long / local SGD", as_long / mean[WHOLE], "", 1.0))
    return figures


def _of(runs: Sequence[Run], way: str, key: str) -> list[Any]:
    return [run[key] for run in runs if run["way"] == way]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=NAMES, metavar="FAMILY", help=", ".join(NAMES))
    options = command.parse_args(argv)
    families = (
        TINY if options.tiny else {name: shorter(name, of) for name, of in available(options.only or NAMES).items()}
    )
    seeds = SEEDS[:1] if options.tiny else SEEDS
    figures, everything = [], []

    def train(name: str, family: Family, rounds: Mapping[str, int]) -> list[Run]:
        calls = ((name, family, way, seed, count) for way, count in rounds.items() for seed in seeds)
        return call_all(run_one, calls, tiny=options.tiny)

    for name, family in families.items():
        runs = train(name, family, dict.fromkeys(WAYS, family.rounds))
        longer = train(name, family, rounds_as_long(family, runs))
        figures += figures_of(name, runs, longer)
        everything += [*runs, *({**run, "as_long": True} for run in longer)]
    return report("finishing", options, figures, runs=everything)


if __name__ == "__main__":
    main()
