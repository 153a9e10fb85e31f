"""torchft: every node a replica group of its own, LocalSGD or DiLoCo between them (arXiv 1805.09767, 2311.08105).

Settings: `algorithm` (local-sgd or diloco), `sync_every`; of DiLoCo `outer_lr`,
`outer_momentum` (0.7 and 0.9 with Nesterov, as its authors recommend); `min_nodes`: how few may go on alone.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there, yet not re-exported
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD

from benchmarks.peers.node import Spec, Task, read_spec, say

COLLECTIVE = timedelta(seconds=300)  # the slowest exchange here takes a tenth; torchft's own 60 s would be tight
CHURN_COLLECTIVE = timedelta(seconds=10)  # a dead neighbour is noticed by its closed connection; this is for the rest


def manager_of(spec: Spec, task: Task) -> Any:
    """Make this node's manager, with a store for itself alone."""
    store = TCPStore(spec.address, 0, is_master=True, wait_for_workers=False)
    elastic = "min_nodes" in spec.settings
    timeout = CHURN_COLLECTIVE if elastic else COLLECTIVE
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=task.module.load_state_dict,
        state_dict=task.module.state_dict,
        min_replica_size=spec.settings.get("min_nodes", spec.nodes),
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=COLLECTIVE,
        rank=0,
        world_size=1,
        store_addr=spec.address,
        store_port=store.port,
        lighthouse_addr=f"http://{spec.root}:{spec.port}",
        replica_id=f"n{spec.rank}",
        hostname=spec.address,
        init_sync=elastic,  # all begin with the same values; who joins later has to fetch them
    )
    manager.own_store = store  # lives as long as the manager
    return manager


def algorithm_of(spec: Spec, task: Task, manager: Any) -> tuple[contextlib.AbstractContextManager[Any], Any]:
    """Return the synchronising algorithm, and the local optimizer whose steps it counts."""
    settings, every = spec.settings, spec.settings["sync_every"]
    optimizer = task.optimizer()
    if settings["algorithm"] == "local-sgd":
        return LocalSGD(manager, task.module, optimizer, sync_every=every), optimizer
    lr, momentum = settings.get("outer_lr", 0.7), settings.get("outer_momentum", 0.9)
    outer = torch.optim.SGD(task.module.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    return DiLoCo(manager, [task.module], optimizer, outer, sync_every=every, use_bucketization=True), optimizer


def main() -> None:
    """Train."""
    spec = read_spec()
    task = Task(spec)
    manager = manager_of(spec, task)
    synchronising, optimizer = algorithm_of(spec, task, manager)
    every, committed = spec.settings["sync_every"], 0
    say("ready")
    with synchronising:
        for step in range(spec.steps):
            at = manager.current_step() * every + step % every  # a commit is a sync; who joins late goes on from there
            task.backward(at)
            task.set_lr(optimizer, at)
            optimizer.step()
            if (step + 1) % every == 0:
                now, taking_part = manager.current_step(), manager.num_participants()
                task.report(step + 1, commits=now, counted=now > committed, nodes=taking_part)
                committed = now
    say("done")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
