"""Train a run without rounds again, on one machine, by its log: whatever happened to it, the bits are the same.

No run that commits updates as they come could be checked before: what its workers did depends on when they did it. Here
the order of the commits decides everything, and it is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from idletrain.errors import RunError
from idletrain.exchange.messages import LeaseId, checksum
from idletrain.export import read_prepared
from idletrain.nn.alone import Steps, take_steps
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.seeding import seeded
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.program import Program
from idletrain.nn.rolling import RollingSubnets
from idletrain.nn.threads import one_thread
from idletrain.rounds.durable.history import read_history
from idletrain.worker import encoding
from idletrain.worker.device import compute_repeatably, make_repeatable


@dataclass(frozen=True)
class Replay:
    """A run that was trained again.

    Attributes:
        updates: How many updates it has.
        params_sha256: The digest of its last network as it was trained now.
        recorded_sha256: The one that the run ended with; None if it has not ended.
        differs: The number of the first update that has other bits than the run's, or None.
    """

    updates: int
    params_sha256: str
    recorded_sha256: str | None
    differs: int | None

    @property
    def same(self) -> bool:
        """Return whether every bit is the run's."""
        return self.differs is None and self.recorded_sha256 in (None, self.params_sha256)


def train_again(run_dir: Path, report: Callable[[int, int], None] = lambda _done, _of: None) -> Replay:
    """Train a run's updates again, one after another, in the order of its log; this executes the run's code.

    Args:
        run_dir: The run's directory.
        report: Called after each update with the number of those done, and of all.

    Raises:
        RunError: there is no such run, or it was trained in rounds.
    """
    past = read_history(run_dir)
    if not past.is_rolling:
        raise RunError(f"{run_dir}: was trained in rounds; launch its job under another name to have the same bits")
    job, prepared = read_prepared(run_dir)
    program = prepared.program
    network = Network.of(program, prepared.network)
    rolling = RollingSubnets(program, network, past.lanes)
    samples, differs = program.source.open(), None
    make_repeatable()
    compute_repeatably(wanted=True)
    with one_thread():
        while (rolled := past.rolled.get(rolling.commits)) is not None:
            lane, steps = rolled.update.subnet, rolled.update.steps
            update = _train(program, rolling, lane, steps, samples, job.name)
            if differs is None and checksum([update.numpy().data.cast("B")]) != rolled.update.checksum:
                differs = rolling.commits
            rolling.commit(lane, update, steps)
            report(rolling.commits, len(past.rolled))
    return Replay(rolling.commits, network.sha256(), past.params_sha256, differs)


def _train(program: Program, rolling: RollingSubnets, lane: int, steps: int, samples: Samples, run: str) -> Tensor:
    """Return the update of a lane's open subnet as the head decoded it: a whole one travels encoded, if any does."""
    opened = rolling.opened[lane]
    pulled = encoding.decode_pull(program, opened.subnet, encoding.encode_pull(program, opened.subnet, opened.began))
    with seeded(program.training.seed):
        of_lane = Steps(lane, opened.number, steps, opened.first_step)
        update = take_steps(program, opened.subnet, pulled, of_lane, samples, batch_order(samples, program.training))
    assert update is not None
    codec = encoding.codec(program, opened.subnet, "push")
    if codec is None or steps < program.training.local_steps:
        return update
    lease = LeaseId(run, 0, opened.number, lane, 0)
    return codec.decode(encoding.encode_update(program, opened.subnet, update, pulled, lease), opened.began.clone())
