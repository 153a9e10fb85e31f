"""Evaluates committed networks on test data, and compares their training loss with their subnets'."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from torch import nn

from idletrain.errors import JobError, RunError, user_code
from idletrain.job import StopSettings
from idletrain.nn import assembly
from idletrain.nn.evaluate import Score, assembled, score
from idletrain.nn.ist.modules import copied
from idletrain.nn.ist.randomness import generator
from idletrain.nn.prepare import Prepared
from idletrain.nn.statistics import STATISTICS_SAMPLES, set_buffers
from idletrain.nn.user_metrics import Tally
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.table import Watch

# Samples that are enough for a score on which nothing depends: accuracy to 1.1 points at 50 %, to 0.7 at 90 %.
QUICK_SAMPLES = 2048
OnEvaluate = Callable[[nn.Module, Mapping[str, float | None]], object]


class CommittedNetwork:
    """The committed network as it is now; or a copy of it, which no later commit changes.

    Args:
        run: The run.
        began: Its module before training.
        subnet_loss: Mean training loss of the committed round's subnets, or None if it is not known.
        copy: Whether to copy it.

    Attributes:
        round: Committed rounds.
        network: Its values.
        module: The module with these values; its buffers are set by `estimate`.
        subnets: The next round's subnets.
    """

    def __init__(self, run: RunContext, began: nn.Module, subnet_loss: float | None, *, copy: bool) -> None:
        self._program, self._began, self.subnet_loss, directory = run.program, began, subnet_loss, run.directory
        self.round, self.subnets = directory.round, directory.subnets
        self.network = directory.network.copy_of_values() if copy else directory.network
        self.module = assembled(began, self.network.averaged) if copy else directory.module
        self._estimated_from = 0

    def estimate(self, most: int = STATISTICS_SAMPLES) -> None:
        """Give the module its buffers: those that travel, and statistics of at most so many samples of the data."""
        if self._estimated_from < most:
            set_buffers(self.module, self._began, self._program, self.network.averaged, most)
            self._estimated_from = most

    def training_module(self) -> nn.Module:
        """Return the network that training goes on from, of which `module` may be an average."""
        if self._program.training.ema is None:
            return self.module
        module = assembled(self._began, self.network.values)
        set_buffers(module, self._began, self._program, self.network.values)
        return module


class Evaluator:
    """The scores of committed networks.

    Args:
        run: The run.
        prepared: Its module, test data and metrics.
        on_evaluate: Called with a copy of each network that is evaluated and its scores, from a thread.

    Attributes:
        score: The latest score, or None.
        watch: What tells the best network, or None.
    """

    def __init__(self, run: RunContext, prepared: Prepared, on_evaluate: OnEvaluate | None = None) -> None:
        self._run, self._test, self._began = run, prepared.test, prepared.module
        self._metrics, self._on_evaluate, self.watch = prepared.metrics, on_evaluate, watch_of(run.job.stop, prepared)
        self._faulty: set[str] = set()
        self._warned = False
        self.score: Score | None = None

    async def committed(self, subnet_loss: float | None, *, copy: bool) -> CommittedNetwork:
        """Return the committed network or a copy of it; no commit must run meanwhile (see `CommittedNetwork`)."""
        return await asyncio.to_thread(CommittedNetwork, self._run, self._began, subnet_loss, copy=copy)

    async def run(self, of: CommittedNetwork, *, quick: bool = False) -> None:
        """Evaluate a network and record the result.

        Args:
            of: The network.
            quick: Whether `QUICK_SAMPLES` of the test data, and as many for statistics, are enough.
        """
        started = time.monotonic()
        numbers = await asyncio.to_thread(self._quick_numbers) if quick else None
        self.score, warning, tallies = await asyncio.to_thread(self._evaluate, of, numbers)
        if self.score:
            fewer = {} if numbers is None else {"samples": len(numbers)}
            seconds = time.monotonic() - started
            self._run.record("evaluated", round=of.round, **asdict(self.score), **fewer, seconds=seconds)
        if warning:
            self._warned = True
            self._run.record("warning", round=of.round, reason=warning)
        self._warn_of(tallies, of.round)

    def _warn_of(self, tallies: Sequence[Tally], round_: int) -> None:
        """Record, once a metric, that it is no number."""
        faults = {tally.name: tally.fault for tally in tallies if tally.fault}
        if self.watch and self.score and self.watch.metric not in faults and self.score.of(self.watch.metric) is None:
            faults[self.watch.metric] = f"{self.watch.metric} is no number on the test data"
        for name in faults.keys() - self._faulty:
            what = " and counts as no better" if self.watch and self.watch.metric == name else "; check its arguments"
            self._run.record("warning", round=round_, reason=f"{faults[name]}{what}")
        self._faulty |= faults.keys()

    def _quick_numbers(self) -> NDArray[np.int64] | None:
        """The test samples of a quick evaluation, always the same; None for all, as the job's own measures need."""
        if self._test is None or self._metrics or self._on_evaluate:
            return None
        with _running():
            samples = len(self._test.open())
        drawn = generator(self._run.program.training.seed, "evaluation").permutation(samples)
        return np.sort(drawn[:QUICK_SAMPLES]) if samples > QUICK_SAMPLES else None

    def _evaluate(
        self, of: CommittedNetwork, numbers: NDArray[np.int64] | None
    ) -> tuple[Score | None, str | None, Sequence[Tally]]:
        program = self._run.program
        compared, tallies = of.subnet_loss if not self._warned else None, [Tally(metric) for metric in self._metrics]
        if self._test is None and compared is None and self._on_evaluate is None:
            return None, None, ()
        of.estimate(STATISTICS_SAMPLES if numbers is None else QUICK_SAMPLES)
        samples = program.source.open()
        with _running():
            result = score(of.module, self._test.open(), program.loss, tallies, numbers) if self._test else None
        if self._on_evaluate:
            _call_back(self._on_evaluate, of, result)
        if compared is None or program.output:  # a very wide output's subnets have losses over other labels
            return result, None, tallies
        with _running():
            losses = assembly.training_loss(of.training_module(), samples, program), compared
        constant_loss = result.constant_loss if result else None
        return result, assembly.warning(program, of.network, of.subnets, losses, constant_loss), tallies


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """Evaluate: what the user's code raises ends the run.

    Raises:
        RunError: it raised something.
    """
    try:
        yield
    except JobError as error:
        raise RunError(f"evaluating fails: {error}; fix it, and go on with --resume") from error.__cause__


def _call_back(on_evaluate: OnEvaluate, of: CommittedNetwork, result: Score | None) -> None:
    """Call the user's function with a copy of a network, which may change it without harm.

    Raises:
        RunError: it raised something.
    """
    scores: dict[str, float | None] = {"round": of.round}
    if result:
        scores |= {name: value for name, value in asdict(result).items() if name != "metrics"} | dict(result.metrics)
    try:
        with user_code("on_evaluate fails (", "); fix it, and go on with resume"):
            on_evaluate(copied(of.module), scores)
    except JobError as error:
        raise RunError(str(error)) from error


def watch_of(stop: StopSettings, prepared: Prepared) -> Watch | None:
    """Return what tells the best network of a job, or None if none is kept.

    Raises:
        JobError: there are no test data, or no such metric.
    """
    if (name := stop.watched) is None:
        return None
    field = "stop.metric" if stop.metric else "stop.patience"
    if prepared.test is None:
        raise JobError(f"{field}: is measured on test data, which are missing; give test data, or leave stop out")
    better = {"loss": "lower", "accuracy": "higher", **prepared.better}
    if name not in better:
        raise JobError(f"{field}: there is no {name}; choose from {', '.join(better)}, or add it to training.metrics")
    return Watch(name, better[name] == "higher", stop.patience)
