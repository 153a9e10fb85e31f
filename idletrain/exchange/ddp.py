"""A communication hook for DistributedDataParallel: gradients coded like updates, with bounded loss over UDP.

Every process owns a part of each bucket. It receives all processes' gradients of that part and sends their mean back to
all (not round a ring, where one lost chunk loses the sum of all processes before it). A missing chunk does not bias the
mean: its owner divides by the number that arrived, chunk by chunk (DLCP, arXiv 2008.08445; MLT, NSDI'24). If only the
base layer of a chunk arrived, its sender adds the refinement to its next gradient. Means are sent without loss, because
replicas would drift apart otherwise.

Letters: N values of a bucket, W processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from idletrain.exchange.codec import CODECS, SMALL_TENSOR, VALUES_PER_CHUNK, Codec, ReceivedMask, spans_of
from idletrain.exchange.datagram.packet import PAYLOAD
from idletrain.exchange.ddp_transport import ReceivedPart, Transport, open_transport

CommHook = Callable[["Exchange", GradBucket], torch.futures.Future[Tensor]]


def ddp_hook(
    push: Literal["bf16", "int8", "int4"] = "int8",
    pull: Literal["bf16", "int8", "int4"] = "bf16",
    *,
    loss: float = 0.0,
    norm_loss: float = 0.02,
    transport: Literal["tcp", "udp"] = "tcp",
    host: str | None = None,
    seed: int = 0,
) -> tuple[Exchange, CommHook]:
    """Return state and hook for `model.register_comm_hook(*ddp_hook(...))`; call it after `init_process_group`.

    Call it in every process; the model is replicated over all of the default group.

    Args:
        push: Code of gradients on the way to their owners; whole numbers are rounded up or down at random.
        pull: Code of means on the way back.
        loss: Fraction of the rows of a gradient of whole numbers that may be missing, over UDP.
        norm_loss: Fraction of its squared norm that may be missing.
        transport: `tcp` for gloo's connections; `udp` for datagrams, if they get through between all processes. Their
            keys travel over gloo, which is as safe as the network that gradients would have crossed in the clear.
        host: The address at which other processes reach this one, for udp; that of the default route if None.
        seed: Of the random rounding.

    Raises:
        ValueError: unknown code or transport, a bound outside 0 to 0.3, or a loss without udp and whole numbers.
    """
    for name, kind, known in (("push", push, CODECS), ("pull", pull, CODECS), ("transport", transport, ("tcp", "udp"))):
        if kind not in known:
            raise ValueError(f"{name}: {kind!r} is not one of {', '.join(known)}")
    if seed < 0:
        raise ValueError(f"seed: {seed} is negative")
    for name, bound in (("loss", loss), ("norm_loss", norm_loss)):
        if not 0 <= bound <= 0.3:
            raise ValueError(f"{name}: {bound} is not within 0 and 0.3")
    if loss and (transport != "udp" or push == "bf16"):
        raise ValueError("loss: needs transport='udp' and push='int8' or 'int4'")
    return Exchange(push, pull, loss, open_transport(transport, host, norm_loss), seed), _hook


def _hook(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    mean: torch.futures.Future[Tensor] = torch.futures.Future()
    exchange.submit(bucket.buffer(), bucket.parameters(), bucket.index(), mean)
    return mean


# DDP checks the annotations, which are strings in this file because of `from __future__ import annotations`.
_hook.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[Tensor]})


@dataclass
class Exchange:
    """The hook's state in one process.

    Attributes:
        sent_bytes: Bytes of payloads to other processes.
        lost_rows: Rows of this process's gradients that did not arrive in time.
    """

    push: str
    pull: str
    loss: float
    transport: Transport
    seed: int
    sent_bytes: int = 0
    lost_rows: int = 0
    _steps: dict[int, int] = field(default_factory=dict)
    _residuals: dict[int, tuple[list[int], Tensor]] = field(
        default_factory=dict
    )  # by bucket: its parameters, and what to add
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "idletrain-ddp"))

    def submit(
        self, flat: Tensor, parameters: Sequence[Tensor], index: int, result: torch.futures.Future[Tensor]
    ) -> None:
        """Replace a bucket's gradients by their mean over all processes, in a thread, during the backward pass."""

        def work() -> None:
            try:
                flat.copy_(self._mean(flat.detach().float().cpu(), parameters, index))
                result.set_result(flat)
            except Exception as error:  # noqa: BLE001 (raised where the step waits for it)
                result.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is of the value

        self._thread.submit(work)

    def close(self) -> None:
        """End the thread and the transport."""
        self._thread.shutdown()
        self.transport.close()

    def _mean(self, flat: Tensor, parameters: Sequence[Tensor], index: int) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        step = self._steps[index] = self._steps.get(index, -1) + 1
        shapes, pointers = [tuple(p.shape) for p in parameters], [p.data_ptr() for p in parameters]
        residual_pointers, residual = self._residuals.pop(index, ([], flat))
        if residual_pointers == pointers:  # DDP may rebuild its buckets
            flat = flat + residual
        parts = parts_of(len(flat), world)
        pushes = [codec_of(self.push, shapes, part, ranked=True) for part in parts]
        outgoing = [
            codec.encode(flat[start:stop], None, _key(self.seed, step, index, rank, k))
            for k, ((start, stop), codec) in enumerate(zip(parts, pushes, strict=True))
        ]
        received, pieces = self.transport.exchange(outgoing, [pushes[rank]] * world, self.loss)
        own_mean = mean_of(pushes[rank], received)
        arrived = [codec.rows_within(mask, PAYLOAD) for codec, mask in zip(pushes, pieces, strict=True)]
        if any((~rows).any() for rows in arrived):
            self._residuals[index] = pointers, self._residual_of(flat, parts, outgoing, pushes, arrived)
        pulls = [codec_of(self.pull, shapes, part, ranked=False) for part in parts]
        encoded_mean = pulls[rank].encode(own_mean)
        means, _ = self.transport.exchange([encoded_mean] * world, pulls, 0.0)
        self.sent_bytes += sum(len(content) for k, content in enumerate(outgoing) if k != rank)
        self.sent_bytes += (world - 1) * len(encoded_mean)
        return torch.cat([codec.decode(mean.content) for codec, mean in zip(pulls, means, strict=True)])

    def _residual_of(
        self,
        flat: Tensor,
        parts: Sequence[tuple[int, int]],
        outgoing: Sequence[Tensor],
        codecs: Sequence[Codec],
        arrived: Sequence[ReceivedMask],
    ) -> Tensor:
        """Return what to add to the next gradient: the missing refinements. Of a chunk that did not arrive at all,
        nothing: the owner used the other processes' mean.
        """
        self.lost_rows += sum(int((~rows).sum()) for rows in arrived)
        residual = torch.zeros_like(flat)
        for (start, stop), codec, content, rows in zip(parts, codecs, outgoing, arrived, strict=True):
            sent, delivered = codec.decode(content), codec.decode(content, None, rows)
            missing = (sent - delivered).nan_to_num(0.0, 0.0, 0.0)  # a NaN must not stay in the residual
            residual[start:stop] = missing * codec.arrived_rows(content, rows)
        return residual


def parts_of(size: int, world: int) -> list[tuple[int, int]]:
    """Return `[start, stop)` of the part of each of W processes: whole chunks, except for the last part."""
    each = -(-size // (world * VALUES_PER_CHUNK)) * VALUES_PER_CHUNK
    return [(min(size, k * each), min(size, (k + 1) * each)) for k in range(world)]


def codec_of(kind: str, shapes: Sequence[tuple[int, ...]], part: tuple[int, int], *, ranked: bool) -> Codec:
    """Return the codec of the part `[start, stop)` of a bucket of tensors of these shapes."""
    sizes = [(math.prod(shape), len(shape) > 1 and math.prod(shape) >= SMALL_TENSOR) for shape in shapes]
    start, stop = part
    clipped = ((max(a, start) - start, min(b, stop) - start) for a, b in spans_of(sizes))
    return Codec(kind, tuple((a, b) for a, b in clipped if a < b), stop - start, ranked)


def mean_of(codec: Codec, parts: Sequence[ReceivedPart]) -> Tensor:
    """Return the mean over processes, chunk by chunk over those whose base layer arrived."""
    total, counts = torch.zeros(codec.size), torch.zeros(codec.size)
    for part in parts:
        total += codec.decode(part.content, None, part.received)
        counts += codec.arrived_rows(part.content, part.received)
    return total / counts.clamp(min=1)


def _key(*labels: int) -> int:
    """Return the key of the random rounding of one payload."""
    return int(np.random.SeedSequence(labels).generate_state(1, np.uint32)[0])
