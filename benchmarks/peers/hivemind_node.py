"""hivemind's Optimizer: gradients averaged at every target batch, or local updates with parameters averaged.

Settings: `local` (use_local_updates), `sync_every`: steps of every node that make a target batch; 16 bits on the wire,
which hivemind's guide recommends; `matchmaking` and `timeout` in seconds.
"""

from __future__ import annotations

import itertools
import signal

import hivemind
import torch
from hivemind.compression import Float16Compression

from benchmarks.peers.node import Task, read_spec, say


def main() -> None:
    """Train."""
    spec = read_spec()
    task, settings = Task(spec), spec.settings
    begun = f"/ip4/{spec.address}/tcp/0"
    dht = hivemind.DHT(host_maddrs=[begun], initial_peers=settings["initial_peers"], start=True)

    every = settings["sync_every"]

    def schedule(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: task.share_of_lr(epoch * every))

    local = settings.get("local", False)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        batch_size_per_step=spec.batch_size,
        target_batch_size=spec.batch_size * spec.nodes * every,
        params=list(task.module.parameters()),
        optimizer=task.optimizer,
        scheduler=schedule,
        use_local_updates=local,
        matchmaking_time=settings.get("matchmaking", 3.0),
        averaging_timeout=settings.get("timeout", 120.0),
        grad_compression=Float16Compression(),
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
