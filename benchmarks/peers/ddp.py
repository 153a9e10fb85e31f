"""PyTorch's DistributedDataParallel on gloo: as it is, or with one of its communication hooks.

Settings: `hook` (none, fp16 or powersgd), and of PowerSGD `rank` and `start_iter` (its docs: after some 10 % of the
steps). BatchNorm's statistics are not broadcast: they are estimated again before every evaluation.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.node import Task, read_spec, say

ONE_BUCKET_MB = 4096
LOCAL_STEPS = 3  # without synchronisation, before the clock starts: what the gradients alone take, all nodes at once


def main() -> None:
    """Train."""
    spec = read_spec()
    task = Task(spec)
    dist.init_process_group("gloo", init_method=f"tcp://{spec.root}:{spec.port}", rank=spec.rank, world_size=spec.nodes)
    # PowerSGD's callbacks wait for further collectives on gloo's two threads: two buckets at once would wait for ever.
    cap = ONE_BUCKET_MB if spec.settings.get("hook") == "powersgd" else None
    ddp = DistributedDataParallel(task.module, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    match spec.settings.get("hook"):
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "powersgd":
            rank, start = spec.settings["rank"], spec.settings["start_iter"]
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = task.optimizer()
    with ddp.no_sync():
        task.backward(0, ddp)  # the first one also sets things up
        task.backward_seconds = 0.0
        for step in range(LOCAL_STEPS):
            task.backward(step, ddp)
    backward = task.backward_seconds / LOCAL_STEPS
    dist.barrier()
    say("ready")
    for step in range(spec.steps):
        task.backward(step, ddp)
        task.set_lr(optimizer, step)
        optimizer.step()
        task.backward_seconds = backward * (step + 1)  # the pass itself overlaps the exchange; this is without
        task.report(step + 1)
    say("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
