"""Transports of the DDP hook: one payload from each process to each other one, over gloo or UDP."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from distributed.utils import get_ip
from numpy.typing import NDArray
from torch import Tensor

from idletrain.exchange.codec import Codec, ReceivedMask
from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.datagram.packet import PAYLOAD, SESSION_KEY_BYTES, SessionKeys
from idletrain.exchange.datagram.protocol import PATH_SOCKETS
from idletrain.exchange.datagram.transfer import ReceivedPayload

logger = logging.getLogger(__name__)
PEER_SILENCE_SECONDS = 1800.0  # gloo's: another process may evaluate, write a checkpoint, compile
PEER_OPEN_SECONDS = 10.0


@dataclass(frozen=True)
class ReceivedPart:
    """A payload received from one process: bytes in their places, and which rows of its codec arrived."""

    content: Tensor
    received: ReceivedMask


class Transport(Protocol):
    """Carries one payload from each process to each other process."""

    def exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Codec], loss: float
    ) -> tuple[list[ReceivedPart], list[ReceivedMask]]:
        """Send `outgoing[k]` to process k and receive its payload, coded by `incoming[k]`, of whose rows the fraction
        `loss` may be missing; return the payloads, and which pieces of PAYLOAD bytes of each outgoing one arrived.
        """

    def close(self) -> None:
        """Free its connections."""


def open_transport(name: str, host: str | None, norm_loss: float) -> Transport:
    """Return a transport that works between all processes: the same in each."""
    datagrams = Datagrams(host or get_ip(), norm_loss) if name == "udp" else None
    if datagrams is None or datagrams.open:
        return datagrams or Streams()
    datagrams.close()
    if dist.get_rank() == 0:
        logger.warning("datagrams do not get through between all processes: gradients travel over gloo, without loss")
    return Streams()


class Streams:
    """Sends over gloo's connections, in a process group of its own, without loss."""

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
        requests = [dist.irecv(contents[k], k, group=self._group) for k in others if len(contents[k])]
        requests += [dist.isend(outgoing[k], k, group=self._group) for k in others if len(outgoing[k])]
        for request in requests:
            assert request is not None
            request.wait()
        received = [_whole(content, codec) for content, codec in zip(contents, incoming, strict=True)]
        return received, _all_pieces(outgoing)

    def close(self) -> None:
        """See `Transport`."""
        dist.destroy_process_group(self._group)


class Datagrams:
    """Sends over UDP between processes, encrypted with keys from a secret that travels over gloo.

    Args:
        host: This process's address.
        norm_loss: Fraction of a payload's squared norm that may be missing.

    Attributes:
        open: Whether datagrams get through between all processes.
    """

    def __init__(self, host: str, norm_loss: float) -> None:
        self._rank, self._world, self._norm_loss = dist.get_rank(), dist.get_world_size(), norm_loss
        self._group = dist.new_group(backend="gloo")
        self._transfer = 0
        try:
            self._endpoint: Endpoint | None = Endpoint(host, PATH_SOCKETS)
        except OSError as error:  # all processes fall back together
            logger.warning("no UDP socket at %s: %s", host, error)
            self._endpoint = None
        opened = torch.tensor(int(self._open_sessions()))
        dist.all_reduce(opened, dist.ReduceOp.MIN, group=self._group)
        self.open = bool(opened)

    def _open_sessions(self) -> bool:
        """Open a session with every other process; return whether datagrams got through to those of higher rank."""
        addresses = _all_gathered(self._endpoint.address if self._endpoint else ("-", 0), self._group)
        secret = torch.tensor(list(os.urandom(32)), dtype=torch.uint8)
        dist.broadcast(secret, 0, group=self._group)
        if self._endpoint is None or not all(port for _, port in addresses):
            return False
        keys = bytes(secret.tolist())
        for k in range(self._rank):
            self._endpoint.open(_keys(keys, k, self._rank).swapped()).result(PEER_OPEN_SECONDS)
        dist.barrier(group=self._group)  # now every process listens
        higher = range(self._rank + 1, self._world)
        opened = [self._endpoint.open(_keys(keys, self._rank, k), addresses[k]) for k in higher]
        return not wait(opened, PEER_OPEN_SECONDS).not_done

    def exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Codec], loss: float
    ) -> tuple[list[ReceivedPart], list[ReceivedMask]]:
        """See `Transport`."""
        self._transfer += 1
        others = [k for k in range(self._world) if k != self._rank]
        receiving = {k: self._receive(k, incoming[k], loss) for k in others if incoming[k].nbytes}
        sending = {k: self._send(k, outgoing[k]) for k in others if len(outgoing[k])}
        contents = [torch.empty(codec.nbytes, dtype=torch.uint8) for codec in incoming]
        contents[self._rank] = outgoing[self._rank]
        received = [_whole(content, codec) for content, codec in zip(contents, incoming, strict=True)]
        pieces = _all_pieces(outgoing)
        for k, receipt in receiving.items():
            payload = receipt.result()
            content = torch.frombuffer(payload.content, dtype=torch.uint8)
            received[k] = ReceivedPart(content, incoming[k].rows_within(payload.received, PAYLOAD))
        for k, delivery in sending.items():
            pieces[k] = delivery.result()
        return received, pieces

    def close(self) -> None:
        """See `Transport`."""
        dist.barrier(group=self._group)  # another process may still probe for the end of this one's last payload
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

        def is_acceptable(content: memoryview, received: ReceivedMask) -> bool:
            if not gains:
                gains.append(codec.gains(torch.frombuffer(content, dtype=torch.uint8)))
            missing = ~codec.rows_within(received, PAYLOAD)
            return bool(missing.sum() <= loss * codec.rows and gains[0][missing].sum() <= self._norm_loss)

        required, minimum = -(-codec.first_row // PAYLOAD), math.ceil((1 - loss) * pieces)
        return self._endpoint.receive(
            self._session(k),
            self._transfer,
            codec.nbytes,
            patience=PEER_SILENCE_SECONDS,
            required_pieces=required if loss else pieces,
            min_pieces=minimum,
            is_acceptable=is_acceptable if loss else None,
        )

    def _session(self, k: int) -> int:
        return _session(min(k, self._rank), max(k, self._rank))


def _session(low: int, high: int) -> int:
    """Return the session number of two processes, by their ranks."""
    return 1 + low + high * (high - 1) // 2


def _keys(secret: bytes, low: int, high: int) -> SessionKeys:
    """Return the keys of the session of two processes, as the one of lower rank uses them."""
    send, receive = (
        hashlib.blake2b(f"{low}-{high}-{direction}".encode(), key=secret, digest_size=SESSION_KEY_BYTES).digest()
        for direction in ("up", "down")
    )
    return SessionKeys(_session(low, high), send, receive)


def _all_gathered(own: tuple[str, int], group: Any) -> list[tuple[str, int]]:
    """Return every process's address, by rank."""
    text = f"{own[0]} {own[1]}".encode().ljust(64)
    rows = torch.zeros(dist.get_world_size(), 64, dtype=torch.uint8)
    rows[dist.get_rank()] = torch.tensor(list(text), dtype=torch.uint8)
    dist.all_reduce(rows, group=group)
    addresses = (bytes(row.tolist()).decode().split() for row in rows)
    return [(host, int(port)) for host, port in addresses]


def _whole(content: Tensor, codec: Codec) -> ReceivedPart:
    return ReceivedPart(content, np.ones(codec.rows, bool))


def _all_pieces(outgoing: Sequence[Tensor]) -> list[ReceivedMask]:
    return [np.ones(max(1, -(-len(content) // PAYLOAD)), bool) for content in outgoing]
