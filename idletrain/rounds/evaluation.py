"""Evaluates the committed network on test data, and compares its training loss with its subnets'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from torch import nn

from idletrain.errors import JobError, RunError, user_code
from idletrain.job import StopSettings
from idletrain.nn import assembly
from idletrain.nn.evaluate import Score, assembled, score
from idletrain.nn.ist.modules import copied
from idletrain.nn.prepare import Prepared
from idletrain.nn.statistics import set_buffers
from idletrain.nn.user_metrics import Tally
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.table import Watch

OnEvaluate = Callable[[nn.Module, Mapping[str, float | None]], object]


class Evaluator:
    """The committed network's scores.

    Args:
        run: The run.
        prepared: Its module, test data and metrics.
        on_evaluate: Called with a copy of the network and its scores, from a thread; the next commit waits for it.

    Attributes:
        score: The latest score, or None.
        watch: What tells the best network, or None.
    """

    def __init__(self, run: RunContext, prepared: Prepared, on_evaluate: OnEvaluate | None = None) -> None:
        self._run, self._test, self._began = run, prepared.test, prepared.module
        self._metrics, self._on_evaluate, self.watch = prepared.metrics, on_evaluate, watch_of(run.job.stop, prepared)
        self._faulty: set[str] = set()
        self._module, self._estimated_round = run.directory.module, -1
        self._warned = False
        self.score: Score | None = None

    async def run(self, subnet_loss: float | None) -> float | None:
        """Evaluate and record the result; return the accuracy, or None without test data.

        Args:
            subnet_loss: Mean training loss of the committed round's subnets, or None if it is not known.
        """
        started, accuracy = time.monotonic(), None
        self.score, warning, tallies = await asyncio.to_thread(self._evaluate, subnet_loss)
        seconds, number = time.monotonic() - started, self._run.directory.round
        if self.score:
            accuracy = self.score.accuracy
            self._run.record("evaluated", round=number, **asdict(self.score), seconds=seconds)
        if warning:
            self._warned = True
            self._run.record("warning", round=number, reason=warning)
        self._warn_of(tallies)
        return accuracy

    def _warn_of(self, tallies: Sequence[Tally]) -> None:
        """Record, once a metric, that it is no number."""
        faults = {tally.name: tally.fault for tally in tallies if tally.fault}
        if self.watch and self.score and self.watch.metric not in faults and self.score.of(self.watch.metric) is None:
            faults[self.watch.metric] = f"{self.watch.metric} is no number on the test data"
        for name in faults.keys() - self._faulty:
            what = " and counts as no better" if self.watch and self.watch.metric == name else "; check its arguments"
            self._run.record("warning", round=self._run.directory.round, reason=f"{faults[name]}{what}")
        self._faulty |= faults.keys()

    async def estimate(self) -> None:
        """Give the directory's module the buffers of the committed network, for a snapshot of it."""
        await asyncio.to_thread(self._estimate)

    def _estimate(self) -> None:
        if self._estimated_round != self._run.directory.round:
            set_buffers(self._module, self._began, self._run.program, self._run.directory.network.averaged)
            self._estimated_round = self._run.directory.round

    def _evaluate(self, subnet_loss: float | None) -> tuple[Score | None, str | None, Sequence[Tally]]:
        program, directory = self._run.program, self._run.directory
        compared, tallies = subnet_loss if not self._warned else None, [Tally(metric) for metric in self._metrics]
        if self._test is None and compared is None and self._on_evaluate is None:
            return None, None, ()
        self._estimate()
        samples = program.source.open()
        try:
            result = score(self._module, self._test.open(), program.loss, tallies) if self._test else None
        except JobError as error:
            raise RunError(f"evaluating fails: {error}; fix it, and go on with resume") from error
        if self._on_evaluate:
            self._call_back(self._on_evaluate, result)
        if compared is None or program.output:  # a very wide output's subnets have losses over other labels
            return result, None, tallies
        losses = assembly.training_loss(self._committed(), samples, program), compared
        return result, assembly.warning(program, directory.network, directory.subnets, losses), tallies

    def _committed(self) -> nn.Module:
        """Return the network that training goes on from, of which the directory's module may be an average."""
        if self._run.program.training.ema is None:
            return self._module
        values = self._run.directory.network.values
        module = assembled(self._began, values)
        set_buffers(module, self._began, self._run.program, values)
        return module

    def _call_back(self, on_evaluate: OnEvaluate, result: Score | None) -> None:
        """Call the user's function with a copy of the network, which may change it without harm.

        Raises:
            RunError: it raised something.
        """
        scores: dict[str, float | None] = {"round": self._run.directory.round}
        if result:
            scores |= {name: value for name, value in asdict(result).items() if name != "metrics"} | dict(
                result.metrics
            )
        try:
            with user_code("on_evaluate fails (", "); fix it, and go on with resume"):
                on_evaluate(copied(self._module), scores)
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
