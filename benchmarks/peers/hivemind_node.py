"""hivemind's Optimizer with local updates: parameters are averaged at every target batch.

Settings: `sync_every`, the steps of every node that make a target batch; `delay`: average in the background, hivemind's
default; `timeout` in seconds (60, its default). 16 bits on the wire, which hivemind's guide recommends. Its other mode
averages gradients instead and so has to meet (some seconds) at every step of the optimizer.
"""

from __future__ import annotations

import itertools
import signal

import hivemind
import torch
from hivemind.compression import Float16Compression

from benchmarks.peers.node import Task, read_spec, say

MATCHMAKING_SECONDS = 3.0  # its documentation: 3 to 5 s for small local runs


def main() -> None:
    """Train."""
    spec = read_spec()
    task, settings = Task(spec), spec.settings
    own = f"/ip4/{spec.address}/tcp/0"
    dht = hivemind.DHT(host_maddrs=[own], initial_peers=settings["initial_peers"], start=True)
    every = settings["sync_every"]

    def schedule(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: task.share_of_lr(epoch * every))

    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        batch_size_per_step=spec.batch_size,
        target_batch_size=spec.batch_size * spec.nodes * every,
        params=list(task.module.parameters()),
        optimizer=task.optimizer,
        scheduler=schedule,
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=settings.get("timeout", 60.0),
        state_averaging_compression=Float16Compression(),
        delay_state_averaging=settings.get("delay", True),
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )
    say("ready")
    # Nobody waits for anybody: all but the one that is watched go on until the bench ends them.
    for step in range(spec.steps) if spec.rank == 0 else itertools.count():
        before = optimizer.local_epoch
        task.backward(step)
        optimizer.step()
        if optimizer.local_epoch != before:
            peers = optimizer.tracker.global_progress.num_peers
            task.report(step + 1, commits=optimizer.local_epoch, nodes=peers)
    say("done")
    signal.pause()  # a peer that leaves makes the others wait; the bench ends all at once


if __name__ == "__main__":
    main()
