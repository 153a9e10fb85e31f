"""The same codes and bounded loss for plain PyTorch data parallel: a communication hook for DistributedDataParallel.

Every process owns a part of each bucket. Gradients go straight to the part's owner and their mean straight back to all
(not round a ring, where one lost chunk loses what all processes before it gave). What an owner did not get counts for
nothing: it divides by what came, chunk by chunk, so that the mean stays where it is (DLCP, arXiv 2008.08445; MLT,
NSDI'24). Of a chunk whose base layer came alone, its sender adds the refinement to its next gradient. Means come whole,
or replicas would drift apart.

Letters: N values of a bucket, W processes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from distributed.utils import get_ip
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from idletrain.exchange.codec import CODECS, SMALL_TENSOR, VALUES_PER_CHUNK, Codec, ReceivedMask, spans_of
from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.datagram.packet import KEY_BYTES, PAYLOAD, SessionKeys
from idletrain.exchange.datagram.protocol import PATH_SOCKETS
from idletrain.exchange.datagram.transfer import ReceivedPayload

logger = logging.getLogger(__name__)
PEER_SILENCE_SECONDS = 1800.0  # gloo's: another process may evaluate, write a checkpoint, compile
PEER_OPEN_SECONDS = 10.0
CommHook = Callable[["Exchange", GradBucket], torch.futures.Future[Tensor]]


@dataclass(frozen=True)
class ReceivedPart:
    """What a process got from another: bytes in their places, and which rows of its codec are there."""

    content: Tensor
    received: ReceivedMask


class Transport(Protocol):
    """Carries one payload from each process to each other."""

    def exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Codec], loss: float
    ) -> tuple[list[ReceivedPart], list[ReceivedMask]]:
        """Send `going[k]` to process k, and get what it sends here, coded by `coming[k]`, without up to `loss` of its
        rows; returns that, and which pieces of PAYLOAD bytes of this process's own arrived.
        """

    def close(self) -> None:
        """Free what it holds."""


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
    """State and hook for `model.register_comm_hook(*ddp_hook(...))`, in every process after `init_process_group`.

    The model is replicated over all of the default group.

    Args:
        push: How gradients travel to their owners; whole numbers are rounded up or down by chance.
        pull: How means travel back.
        loss: Which share of a gradient of whole numbers may be missing, over UDP.
        norm_loss: And which share of its squared norm.
        transport: Over gloo's connections; or datagrams, where those pass between all processes. Their keys travel over
            gloo, which is as safe as the network that gradients would have crossed in the clear.
        host: The address that other processes reach this one at, for udp; that of the way out of here if None.
        seed: Of the chances.

    Raises:
        ValueError: an unknown code or transport, a bound outside 0 to 0.3, a loss where there is nothing to lose.
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
    return Exchange(push, pull, loss, _transport(transport, host, norm_loss), seed), _hook


def _transport(name: str, host: str | None, norm_loss: float) -> Transport:
    """What all processes agree on."""
    found = Datagrams(host or get_ip(), norm_loss) if name == "udp" else None
    if found is None or found.open:
        return found or Streams()
    found.close()
    if dist.get_rank() == 0:
        logger.warning("datagrams do not pass between all processes: gradients go over gloo, and none is left out")
    return Streams()


def _hook(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    told: torch.futures.Future[Tensor] = torch.futures.Future()
    exchange.submit(bucket.buffer(), bucket.parameters(), bucket.index(), told)
    return told


# DDP looks at annotations themselves, which are words in this file.
_hook.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[Tensor]})


@dataclass
class Exchange:
    """What one process keeps from bucket to bucket.

    Attributes:
        sent_bytes: Of payloads to other processes.
        lost_rows: Of this process's gradients that did not arrive in time.
    """

    push: str
    pull: str
    loss: float
    transport: Transport
    seed: int
    sent_bytes: int = 0
    lost_rows: int = 0
    _steps: dict[int, int] = field(default_factory=dict)
    _residuals: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)  # and of which parameters
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "idletrain-ddp"))

    def submit(
        self, flat: Tensor, parameters: Sequence[Tensor], index: int, result: torch.futures.Future[Tensor]
    ) -> None:
        """Replace a bucket's gradients by their mean over all processes, beside the backward pass."""

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
        shapes, whose = [tuple(p.shape) for p in parameters], [p.data_ptr() for p in parameters]
        of, left = self._residuals.pop(index, ([], flat))
        if of == whose:  # DDP may build buckets anew
            flat = flat + left
        parts = parts_of(len(flat), world)
        pushes = [codec_of(self.push, shapes, part, ranked=True) for part in parts]
        going = [
            codec.encode(flat[start:stop], None, _key(self.seed, step, index, rank, k))
            for k, ((start, stop), codec) in enumerate(zip(parts, pushes, strict=True))
        ]
        came, pieces = self.transport.exchange(going, [pushes[rank]] * world, self.loss)
        mine = mean_of(pushes[rank], came)
        arrived = [codec.rows_within(one, PAYLOAD) for codec, one in zip(pushes, pieces, strict=True)]
        if any((~got).any() for got in arrived):
            self._residuals[index] = whose, self._residual_of(flat, parts, going, pushes, arrived)
        pulls = [codec_of(self.pull, shapes, part, ranked=False) for part in parts]
        back = pulls[rank].encode(mine)
        means, _ = self.transport.exchange([back] * world, pulls, 0.0)
        self.sent_bytes += sum(len(one) for k, one in enumerate(going) if k != rank) + (world - 1) * len(back)
        return torch.cat([codec.decode(one.content) for codec, one in zip(pulls, means, strict=True)])

    def _residual_of(
        self,
        flat: Tensor,
        parts: Sequence[tuple[int, int]],
        outgoing: Sequence[Tensor],
        codecs: Sequence[Codec],
        arrived: Sequence[ReceivedMask],
    ) -> Tensor:
        """What goes with the next gradient: of chunks that did not arrive at all the owner took the others' mean."""
        self.lost_rows += sum(int((~got).sum()) for got in arrived)
        left = torch.zeros_like(flat)
        for (start, stop), codec, content, got in zip(parts, codecs, outgoing, arrived, strict=True):
            whole, there = codec.decode(content), codec.decode(content, None, got)
            lacking = (whole - there).nan_to_num(0.0, 0.0, 0.0)  # what is odd now is not for ever
            left[start:stop] = lacking * codec.arrived_rows(content, got)
        return left


def parts_of(size: int, world: int) -> list[tuple[int, int]]:
    """`[start, stop)` of the part of each of W processes, whole chunks but for the last."""
    each = -(-size // (world * VALUES_PER_CHUNK)) * VALUES_PER_CHUNK
    return [(min(size, k * each), min(size, (k + 1) * each)) for k in range(world)]


def codec_of(kind: str, shapes: Sequence[tuple[int, ...]], part: tuple[int, int], *, ranked: bool) -> Codec:
    """What codes a part of a bucket of tensors of these shapes."""
    sizes = [(math.prod(shape), len(shape) > 1 and math.prod(shape) >= SMALL_TENSOR) for shape in shapes]
    start, stop = part
    clipped = ((max(a, start) - start, min(b, stop) - start) for a, b in spans_of(sizes))
    return Codec(kind, tuple((a, b) for a, b in clipped if a < b), stop - start, ranked)


def mean_of(codec: Codec, parts: Sequence[ReceivedPart]) -> Tensor:
    """The mean over processes, chunk by chunk of those whose base layer came."""
    total, counts = torch.zeros(codec.size), torch.zeros(codec.size)
    for one in parts:
        total += codec.decode(one.content, None, one.received)
        counts += codec.arrived_rows(one.content, one.received)
    return total / counts.clamp(min=1)


def _key(*labels: int) -> int:
    """A key of its own for each payload."""
    return int(np.random.SeedSequence(labels).generate_state(1, np.uint32)[0])


class Streams:
    """gloo's connections, in a group of its own: nothing is lost."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Codec], loss: float
    ) -> tuple[list[ReceivedPart], list[ReceivedMask]]:
        """See `Transport`."""
        del loss
        rank = dist.get_rank()
        contents = [torch.empty(codec.nbytes, dtype=torch.uint8) for codec in incoming]
        contents[rank] = outgoing[rank]
        others = [k for k in range(len(outgoing)) if k != rank]
        waiting = [dist.irecv(contents[k], k, group=self._group) for k in others if len(contents[k])]
        waiting += [dist.isend(outgoing[k], k, group=self._group) for k in others if len(outgoing[k])]
        for one in waiting:
            assert one is not None
            one.wait()
        return [_whole(content, codec) for content, codec in zip(contents, incoming, strict=True)], _all_pieces(
            outgoing
        )

    def close(self) -> None:
        """See `Transport`."""
        dist.destroy_process_group(self._group)


class Datagrams:
    """UDP straight between processes, sealed with keys of a secret that travels over gloo.

    Attributes:
        open: Whether datagrams pass between all of them.
    """

    def __init__(self, host: str, norm_loss: float) -> None:
        self._rank, self._world, self._norm_loss = dist.get_rank(), dist.get_world_size(), norm_loss
        self._group = dist.new_group(backend="gloo")
        self._transfer = 0
        try:
            self._endpoint: Endpoint | None = Endpoint(host, PATH_SOCKETS)
        except OSError as error:  # the others have to hear of it
            logger.warning("no datagrams from %s: %s", host, error)
            self._endpoint = None
        passed = torch.tensor(int(self._opened()))
        dist.all_reduce(passed, dist.ReduceOp.MIN, group=self._group)
        self.open = bool(passed)

    def _opened(self) -> bool:
        """Whether they pass between this process and those behind it."""
        addresses = _all_gathered(self._endpoint.address if self._endpoint else ("-", 0), self._group)
        secret = torch.tensor(list(os.urandom(32)), dtype=torch.uint8)
        dist.broadcast(secret, 0, group=self._group)
        if self._endpoint is None or not all(port for _, port in addresses):
            return False
        keys = bytes(secret.tolist())
        for k in range(self._rank):
            self._endpoint.open(_keys(keys, k, self._rank).swapped()).result(PEER_OPEN_SECONDS)
        dist.barrier(group=self._group)  # everybody listens
        higher = range(self._rank + 1, self._world)
        opened = [self._endpoint.open(_keys(keys, self._rank, k), addresses[k]) for k in higher]
        return not wait(opened, PEER_OPEN_SECONDS).not_done

    def exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Codec], loss: float
    ) -> tuple[list[ReceivedPart], list[ReceivedMask]]:
        """See `Transport`."""
        self._transfer += 1
        others = [k for k in range(self._world) if k != self._rank]
        waiting = {k: self._receive(k, incoming[k], loss) for k in others if incoming[k].nbytes}
        sent = {k: self._send(k, outgoing[k]) for k in others if len(outgoing[k])}
        contents = [torch.empty(codec.nbytes, dtype=torch.uint8) for codec in incoming]
        contents[self._rank] = outgoing[self._rank]
        came = [_whole(content, codec) for content, codec in zip(contents, incoming, strict=True)]
        pieces = _all_pieces(outgoing)
        for k, one in waiting.items():
            received = one.result()
            content = torch.frombuffer(received.content, dtype=torch.uint8)
            came[k] = ReceivedPart(content, incoming[k].rows_within(received.received, PAYLOAD))
        for k, other in sent.items():
            pieces[k] = other.result()
        return came, pieces

    def close(self) -> None:
        """See `Transport`."""
        dist.barrier(group=self._group)  # somebody may still ask whether the last of this one's has come
        if self._endpoint:
            self._endpoint.close()
        dist.destroy_process_group(self._group)

    def _send(self, k: int, content: Tensor) -> Future[ReceivedMask]:
        assert self._endpoint
        view = content.numpy().data
        return self._endpoint.send(
            self._session(k), self._transfer, view, prompt=len(view) // 2, patience=PEER_SILENCE_SECONDS
        )

    def _receive(self, k: int, codec: Codec, loss: float) -> Future[ReceivedPayload]:
        assert self._endpoint
        pieces = -(-codec.nbytes // PAYLOAD)
        gains: list[NDArray[np.float64]] = []

        def enough(content: memoryview, received: ReceivedMask) -> bool:
            if not gains:
                gains.append(codec.gains(torch.frombuffer(content, dtype=torch.uint8)))
            lost = ~codec.rows_within(received, PAYLOAD)
            return bool(lost.sum() <= loss * codec.rows and gains[0][lost].sum() <= self._norm_loss)

        needed, least = -(-codec.first_row // PAYLOAD), math.ceil((1 - loss) * pieces)
        return self._endpoint.receive(
            self._session(k),
            self._transfer,
            codec.nbytes,
            patience=PEER_SILENCE_SECONDS,
            required_pieces=needed if loss else pieces,
            min_pieces=least,
            is_acceptable=enough if loss else None,
        )

    def _session(self, k: int) -> int:
        return _session(min(k, self._rank), max(k, self._rank))


def _session(low: int, high: int) -> int:
    return 1 + low + high * (high - 1) // 2


def _keys(secret: bytes, low: int, high: int) -> SessionKeys:
    """Of the lower one of a pair of processes, a key for each direction."""
    out, back = (
        hashlib.blake2b(f"{low}-{high}-{way}".encode(), key=secret, digest_size=KEY_BYTES).digest()
        for way in ("up", "down")
    )
    return SessionKeys(_session(low, high), out, back)


def _all_gathered(own: tuple[str, int], group: Any) -> list[tuple[str, int]]:
    """Every process's address."""
    text = f"{own[0]} {own[1]}".encode().ljust(64)
    told = torch.zeros(dist.get_world_size(), 64, dtype=torch.uint8)
    told[dist.get_rank()] = torch.tensor(list(text), dtype=torch.uint8)
    dist.all_reduce(told, group=group)
    words = (bytes(row.tolist()).decode().split() for row in told)
    return [(host, int(port)) for host, port in words]


def _whole(content: Tensor, codec: Codec) -> ReceivedPart:
    return ReceivedPart(content, np.ones(codec.rows, bool))


def _all_pieces(outgoing: Sequence[Tensor]) -> list[ReceivedMask]:
    return [np.ones(max(1, -(-len(one) // PAYLOAD)), bool) for one in outgoing]
