"""hivemind's Optimizer with local updates: parameters are averaged at every target batch.

Settings: `sync_every`, the steps of every node that make a target batch; `delay`: average in the background, hivemind's
default; `timeout` in seconds (60, its default); `min_nodes`: how few may begin. 16 bits on the wire, which hivemind's
guide recommends. Its other mode averages gradients instead and so has to meet (some seconds) at every step of the
optimizer. It ends when the peers together have done as many steps as the spec says, whichever peer did them.
"""

from __future__ import annotations

import signal
import time

import hivemind
import torch
from hivemind.compression import Float16Compression
from hivemind.utils import get_dht_time

from benchmarks.peers.node import Task, read_spec, say

MATCHMAKING_SECONDS = 3.0  # its documentation: 3 to 5 s for small local runs
POLL_SECONDS = 0.1


def wait_for(dht: hivemind.DHT, rank: int, nodes: int) -> None:
    """Wait until so many nodes are there: a node that began sooner would train before the clock runs."""
    dht.store("here", value=True, subkey=rank, expiration_time=get_dht_time() + 3600)
    while (present := dht.get("here", latest=True)) is None or len(present.value) < nodes:
        time.sleep(POLL_SECONDS)


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
        averager_opts={"request_timeout": MATCHMAKING_SECONDS / 3},  # well below the time to meet, as it asks for
    )
    wait_for(dht, spec.rank, settings.get("min_nodes", spec.nodes))
    say("ready")
    steps = 0
    while optimizer.local_epoch * every < spec.steps:
        before = optimizer.local_epoch
        task.backward(steps)
        optimizer.step()
        steps += 1
        if optimizer.local_epoch != before:
            peers = optimizer.tracker.global_progress.num_peers
            task.report(steps, commits=optimizer.local_epoch, nodes=peers)
    say("done")
    signal.pause()  # a peer that leaves makes the others wait; the bench ends all at once


if __name__ == "__main__":
    main()
