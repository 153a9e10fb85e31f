"""Post-local SGD (arXiv 1808.07217) with PyTorch's own hook, averager and optimizer.

Settings: `sync_every`, and `warmup` steps of plain data parallel before it.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.node import Task, read_spec, say


def main() -> None:
    """Train."""
    spec = read_spec()
    task = Task(spec)
    dist.init_process_group("gloo", init_method=f"tcp://{spec.root}:{spec.port}", rank=spec.rank, world_size=spec.nodes)
    warmup, every = spec.settings.get("warmup", 0), spec.settings["sync_every"]
    ddp = DistributedDataParallel(task.module, broadcast_buffers=False, gradient_as_bucket_view=True)
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        None, None, start_localSGD_iter=warmup, post_local_gradient_allreduce=False
    )
    ddp.register_comm_hook(state, post_localSGD_hook)
    # The averager counts from 0 and averages at its multiples; one more keeps it from averaging the first values.
    averager = PeriodicModelAverager(period=every, warmup_steps=warmup + every - 1)
    optimizer = PostLocalSGDOptimizer(task.optimizer(), averager)
    dist.barrier()
    say("ready")
    for step in range(spec.steps):
        task.backward(step, ddp)
        task.set_lr(optimizer, step)
        optimizer.step()  # type: ignore[no-untyped-call]
        if step < warmup or (step + 1 - warmup) % every == 0:
            task.report(step + 1)
    say("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
