"""Evaluates the committed network on test data, and compares its training loss with its subnets'."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from idletrain.nn import assembly
from idletrain.nn.evaluate import Score, assembled, estimate_statistics, score
from idletrain.nn.prepare import Prepared
from idletrain.rounds.run_context import RunContext


class Evaluator:
    """The committed network's scores.

    Args:
        run: The run.
        prepared: Its module and test data.

    Attributes:
        score: The latest score, or None.
    """

    def __init__(self, run: RunContext, prepared: Prepared) -> None:
        self._run, self._test = run, prepared.test
        self._module = assembled(prepared.module, run.directory.network.values)
        self._warned = False
        self.score: Score | None = None

    async def run(self, subnet_loss: float | None) -> float | None:
        """Evaluate and record the result; return the accuracy, or None without test data.

        Args:
            subnet_loss: Mean training loss of the committed round's subnets, or None if it is not known.
        """
        started, accuracy = time.monotonic(), None
        self.score, warning = await asyncio.to_thread(self._evaluate, subnet_loss)
        seconds, number = time.monotonic() - started, self._run.directory.round
        if self.score:
            accuracy = self.score.accuracy
            self._run.record("evaluated", round=number, **asdict(self.score), seconds=seconds)
        if warning:
            self._warned = True
            self._run.record("warning", round=number, reason=warning)
        return accuracy

    def _evaluate(self, subnet_loss: float | None) -> tuple[Score | None, str | None]:
        program, directory = self._run.program, self._run.directory
        compared = subnet_loss if not self._warned else None
        if self._test is None and compared is None:
            return None, None
        samples = program.source.open()
        estimate_statistics(self._module, samples, program.training.seed)
        result = score(self._module, self._test.open(), program.loss) if self._test else None
        if compared is None or program.output:  # a very wide output's subnets have losses over other labels
            return result, None
        losses = assembly.training_loss(self._module, samples, program), compared
        return result, assembly.warning(program, directory.network, directory.subnets, losses)
