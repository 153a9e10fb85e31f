"""Data parallel steps by a plan: gradients are exchanged in phases, and the host updates what has arrived meanwhile.

DistributedDataParallel cuts gradients into buckets in the order in which they become ready; each bucket's exchange
begins while the backward pass goes on, and its parameters are moved as soon as it is summed (KARMA, arXiv 2008.11421,
section III-E; the optimizer's place in the hook is that of torch's own `optimizer_overlap_hooks`).
"""

# Without `annotations` of the future: DistributedDataParallel looks at those of a hook.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

ParameterMove = Callable[[nn.Parameter, Tensor], None]  # (parameter, the mean of all ranks' gradients)
PhaseHook = Callable[[Any, GradBucket], Future[Tensor]]


def mean(group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """What DistributedDataParallel does without a hook."""
    summed = dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group, async_op=True)
    future: Future[list[Tensor]] = summed.get_future()
    return future.then(lambda done: done.value()[0])


def update_in_phases(
    ddp: nn.parallel.DistributedDataParallel, move: ParameterMove, exchange: PhaseHook = mean, state: Any = None
) -> None:
    """Have a bucket's parameters moved as soon as it is exchanged.

    Args:
        ddp: Around a module, whose units may run by a plan (`execute.Executor`); its gradients are no longer needed
            after a backward pass, and no optimizer steps after it.
        move: Moves one parameter.
        exchange: Of a bucket, a DDP communication hook.
        state: The hook's; DDP's process group if None.
    """

    def hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        parameters = bucket.parameters()

        def then(done: Future[Tensor]) -> Tensor:
            with torch.no_grad():
                bucket.buffer().copy_(done.value())  # not every hook works in place
                for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                    assert isinstance(parameter, nn.Parameter)
                    move(parameter, gradient)
            summed: Tensor = bucket.buffer()
            return summed

        return exchange(state, bucket).then(then)

    ddp.register_comm_hook(state or ddp.process_group, hook)
