"""Say what data parallel training comes to on a simulated fleet, by simple models of what a lost node costs it. Pure.

Both models are ours, in the spirit of Young (1974) and Daly (2006); the seconds that they take are the caller's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from idletrain.simulation.engine import Outcome
from idletrain.simulation.fleet import Fleet, changes_of


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """A model of data parallel training.

    Attributes:
        step_seconds: Seconds of a step of the whole network on every node, with its exchange.
        pause_seconds: Seconds in which nobody trains after a node is lost: a restart, or a new group.
        checkpoint_seconds: Time between two checkpoints, to which all go back; 0 if only the step under way is lost.
    """

    step_seconds: float
    pause_seconds: float
    checkpoint_seconds: float = 0.0

    def kept(self, seconds: float) -> float:
        """Return what is kept of so many seconds of training that a loss ends."""
        unit = self.checkpoint_seconds or self.step_seconds
        return seconds // unit * unit


PEERS: Mapping[str, Callable[[float], DataParallel]] = {
    "data parallel, checkpoints": lambda step: DataParallel(
        step_seconds=step, pause_seconds=60.0, checkpoint_seconds=600.0
    ),
    "data parallel, steps": lambda step: DataParallel(step_seconds=step, pause_seconds=2.0),
}


def data_parallel(model: DataParallel, fleet: Fleet, seconds: float) -> Outcome:
    """Return what data parallel training comes to; a node that joins costs nothing."""
    outcome, here, since = Outcome(seconds=seconds), 0, 0.0
    trained = node_trained = 0.0  # since the last loss: seconds of all, and node-seconds
    for at, comes in itertools.chain(_until(fleet, seconds), [(seconds, None)]):
        span = max(0.0, at - since)
        trained, node_trained = trained + span, node_trained + span * here
        since = max(since, at)
        if comes is True:
            here += 1
        else:
            kept = model.kept(trained) if comes is False else trained
            outcome.useful_seconds += node_trained * (kept / trained) if trained else 0.0
            outcome.steps += int(kept / model.step_seconds)
            trained = node_trained = 0.0
            if comes is False:
                here -= 1
                outcome.lost += 1
                since = at + model.pause_seconds
    outcome.alive_seconds = _alive_seconds(fleet, seconds)
    outcome.steps_a_neuron = float(outcome.steps)
    return outcome


def _until(fleet: Fleet, seconds: float) -> Iterator[tuple[float, bool]]:
    return ((c.at, c.comes) for c in itertools.takewhile(lambda change: change.at < seconds, changes_of(fleet)))


def _alive_seconds(fleet: Fleet, seconds: float) -> float:
    """Return the node-seconds that nodes are there."""
    total, here, last = 0.0, 0, 0.0
    for at, comes in _until(fleet, seconds):
        total, last = total + here * (at - last), at
        here += 1 if comes else -1
    return total + here * (seconds - last)
