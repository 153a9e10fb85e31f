"""Try what settings teach a network, before a run takes one of them: the forecast knows seconds, not learning.

Each candidate is trained in this process, its subnets one after another, on a part of the job's own data, for a small
part of the run's time. What counts is its loss on held-out samples after equal times of the forecast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idletrain.autotune.forecast import FINISH_SHARE, AutotuneChoice
from idletrain.nn import alone
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.streams import StreamSource
from idletrain.nn.evaluate import assembled, score
from idletrain.nn.ist.randomness import generator
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.nn.program import Program
from idletrain.nn.statistics import set_buffers
from idletrain.phases import finishing_whole

PART_OF_RUN = 0.02  # of the run's time, spent on all trials together
MOST_TRIAL_SECONDS = 60.0  # of all trials together, however long the run is
ROUNDS_SHORTER = 10  # times than the run's, so that even a short trial assembles the network a few times
LEAST_ROUNDS = 2  # the fewest that say anything: the second trains neurons that others have moved
TRIAL_SLACK_SECONDS = 2.0  # beside twice the expected time, after which a candidate is given up
UNTRIED_WORTH = 2.0  # times the progress of local SGD, below which no other candidate is taken without a trial
MOST_TRIAL_LOSS_RATIO = 1.02  # times the loss of local SGD at equal time, above which a candidate is not taken
HELD_OUT, HELD_OUT_PART = 2000, 10  # samples, and of a small data set a tenth


@dataclass(frozen=True)
class Candidate:
    """Settings to try, in rounds that are shorter than the run's.

    Attributes:
        choice: The settings with the forecast of their round.
        prepared: The network with its program for these settings.
    """

    choice: AutotuneChoice
    prepared: Prepared

    @property
    def local_steps(self) -> int:
        """Local steps of a round here."""
        return max(1, self.choice.local_steps // ROUNDS_SHORTER)

    @property
    def round_seconds(self) -> float:
        """Seconds of a run in which it takes so many steps."""
        return self.choice.round_seconds * self.local_steps / self.choice.local_steps

    @property
    def computation(self) -> float:
        """Seconds that a round takes in one process, which trains all subnets one after another."""
        return self.choice.option.subnets * self.local_steps * self.choice.step_seconds

    def program(self, rounds: int) -> Program:
        """Return the program of the shorter rounds, over as many steps as the run's, which ends after some of them."""
        training = self.prepared.program.training
        of_run = training.rounds * self.choice.local_steps // self.local_steps
        changes: dict[str, Any] = {"local_steps": self.local_steps, "rounds": of_run}
        if self.choice.finish and (last := round(FINISH_SHARE * rounds)):
            changes["phases"] = finishing_whole(of_run, of_run - rounds + last, training.subnets)
        return replace(self.prepared.program, training=training.model_copy(update=changes))

    def rounds_in(self, seconds: float) -> int:
        """Return how many rounds here are as many steps as a run takes in so much time."""
        return round(seconds / self.round_seconds)


@dataclass(frozen=True)
class TrialResult:
    """The result of training a candidate for a while.

    Attributes:
        rounds: Number of rounds trained.
        loss: The held-out loss; infinite if it is no number, or if time ran out.
    """

    candidate: Candidate
    rounds: int
    loss: float


def pick(
    candidates: Sequence[Candidate], rounds: int, report: Callable[[str], None] | None
) -> tuple[AutotuneChoice, str]:
    """Return the settings to take among candidates, and why in a sentence.

    Args:
        candidates: The one with the fastest forecast, then others; local SGD, which counts more than those between,
            last.
        rounds: Rounds of the run.
        report: Called with a line before the trial, which takes seconds; None for no trial.
    """
    if isinstance(candidates[0].prepared.program.source.open(), StreamSource):
        return _untried(candidates, "samples of a stream cannot be held out")
    seconds = comparison_seconds(candidates, rounds)
    if not seconds and len(candidates) > 2:
        return pick([candidates[0], candidates[-1]], rounds, report)
    if not seconds:
        return _untried(candidates, f"{PART_OF_RUN:.0%} of this run is too short to compare anything")
    *names, last = (candidate.choice.name for candidate in candidates)
    tried = f"{', '.join(names)} and {last}"
    takes = f"{sum(c.rounds_in(seconds) * c.computation for c in candidates):.0f} s"
    if report is None:
        return candidates[0].choice, f"a run first tries {tried} for {takes}, and takes what learns better"
    report(f"trying {tried} for {takes}")
    results = try_candidates(candidates, seconds)
    return best_result(results).candidate.choice, result_text(results, seconds)


def _untried(candidates: Sequence[Candidate], reason: str) -> tuple[AutotuneChoice, str]:
    """Return the first choice if its forecast is so far ahead of local SGD's that learning less a step cannot matter.

    Args:
        candidates: The one with the fastest forecast, then others.
        reason: Why they cannot be tried.
    """
    first, *others = (candidate.choice for candidate in candidates)
    whole = max((o for o in others if o.option.method == "local-sgd"), key=lambda o: o.progress, default=first)
    ahead = first.progress / whole.progress
    choice = first if whole is first or ahead >= UNTRIED_WORTH else whole
    return choice, (
        f"not tried: {reason}; {first.name} is forecast to be {ahead:.2g} times as fast as {whole.name}, and without a "
        f"trial it has to be {UNTRIED_WORTH:g}"
    )


def comparison_seconds(candidates: Sequence[Candidate], rounds: int) -> float:
    """Return after how many seconds of the forecast candidates can be compared; 0 if it is too soon to say anything.

    Args:
        candidates: What is tried; the first is what the run would take.
        rounds: Rounds of the run.
    """
    budget = min(MOST_TRIAL_SECONDS, PART_OF_RUN * rounds * candidates[0].choice.expected.round)
    seconds = budget / sum(c.computation / c.round_seconds for c in candidates)
    return seconds if all(c.rounds_in(seconds) >= LEAST_ROUNDS for c in candidates) else 0.0


def try_candidates(candidates: Sequence[Candidate], seconds: float) -> list[TrialResult]:
    """Train each candidate for as many rounds as its forecast has in `seconds`, and score held-out samples.

    All get the same held-out samples. A candidate that takes much longer than its steps were measured is given up.
    """
    results = []
    for candidate in candidates:
        rounds = candidate.rounds_in(seconds)
        results.append(_try(candidate, rounds, TRIAL_SLACK_SECONDS + 2 * rounds * candidate.computation))
    return results


def best_result(results: Sequence[TrialResult]) -> TrialResult:
    """Return the result of the lowest loss of ist, unless local SGD's is beyond `MOST_TRIAL_LOSS_RATIO` lower."""
    ranked = sorted(results, key=lambda result: result.loss)
    best = next(result for result in ranked if result.candidate.choice.option.method != "local-sgd")
    whole = (result for result in ranked if result.candidate.choice.option.method == "local-sgd")
    return next((result for result in whole if not best.loss <= MOST_TRIAL_LOSS_RATIO * result.loss), best)


def result_text(results: Sequence[TrialResult], seconds: float) -> str:
    """Return the trial in a sentence."""
    losses = ", ".join(f"{r.candidate.choice.name}: {r.loss:.3g}" for r in results)
    return f"tried here on the job's own data: held-out loss after what the fleet does in {seconds:.2g} s is {losses}"


def _try(candidate: Candidate, rounds: int, most_seconds: float) -> TrialResult:
    prepared, program = candidate.prepared, candidate.program(rounds)
    samples = program.source.open()
    order = generator(program.training.seed, "trial").permutation(len(samples))
    count = min(HELD_OUT, len(samples) // HELD_OUT_PART)
    held_out, training_rows = _Rows(samples, np.sort(order[:count])), _Rows(samples, np.sort(order[count:]))
    network = Network.of(program, prepared.network)
    deadline = time.perf_counter() + most_seconds
    if not alone.train_rounds(program, network, training_rows, rounds, lambda: time.perf_counter() < deadline):
        return TrialResult(candidate, rounds, math.inf)
    module = assembled(prepared.module, network.averaged)
    own = replace(program, source=_At(training_rows))
    set_buffers(module, prepared.module, own, network.averaged)
    loss = score(module, held_out, program.loss).loss
    return TrialResult(candidate, rounds, loss if math.isfinite(loss) else math.inf)


class _Rows:
    """Some of a data set's samples, in an order of their own."""

    def __init__(self, samples: Samples, rows: NDArray[np.int64]) -> None:
        self._samples, self._rows = samples, rows

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:
        """See `Samples`."""
        return self._samples.batch(self._rows[index])


@dataclass(frozen=True)
class _At:
    """A source whose samples are open."""

    samples: Samples

    def open(self) -> Samples:
        """See `Source`."""
        return self.samples
