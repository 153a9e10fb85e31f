"""Data parallel with codes and bounded loss, in real processes: the same replicas, nearly the same mean."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import idletrain.exchange
from idletrain.exchange import ddp_transport
from idletrain.exchange.codec import VALUES_PER_CHUNK, Codec
from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.datagram.packet import PAYLOAD
from idletrain.exchange.datagram.protocol import DatagramProtocol
from idletrain.exchange.ddp import Exchange, codec_of, ddp_hook, parts_of
from idletrain.exchange.ddp_transport import ReceivedPart, Streams

WORLD = 3
WAIT = 60.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def together(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function returns in each of the processes of a gloo group."""
    context = multiprocessing.get_context("fork")
    port, results = free_port(), context.Queue()
    processes = [
        context.Process(target=_one, args=(rank, port, work, arguments, results), daemon=True) for rank in range(WORLD)
    ]
    try:
        for process in processes:
            process.start()
        results_by_rank = dict(results.get(timeout=WAIT) for _ in processes)
    finally:
        for process in processes:
            process.join(WAIT)
            process.kill()
    for value in results_by_rank.values():
        if isinstance(value, str):
            raise AssertionError(value)
    return [results_by_rank[rank] for rank in range(WORLD)]


def _one(rank: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
        results.put((rank, work(rank, *arguments)))
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc()))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))


def train(rank: int, steps: int, **arguments: Any) -> dict[str, Any]:
    """Some steps of data parallel; the gradients of the first and the parameters of the last."""
    model = nn.parallel.DistributedDataParallel(network())
    hook = None
    if arguments:
        hook = ddp_hook(**arguments)
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(64, generator=generator)
    losses, gradients = [], []
    for _ in range(steps):
        x = torch.randn(32 * WORLD, 64, generator=generator)[rank * 32 : (rank + 1) * 32]
        loss = nn.functional.cross_entropy(model(x), ((x @ weights) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(loss.item())
    outcome = {"losses": losses, "gradients": gradients, "parameters": [p.detach().numpy() for p in model.parameters()]}
    if hook:
        outcome |= {"sent": hook[0].sent_bytes, "lost": hook[0].lost_rows}
        hook[0].close()
    return outcome


@pytest.mark.parametrize(
    "arguments",
    [
        {"push": "int8", "pull": "bf16"},
        {"push": "int4", "pull": "int8"},
        {"push": "bf16", "pull": "bf16"},
        {"push": "int8", "pull": "bf16", "transport": "udp", "host": "127.0.0.1"},
        {"push": "int8", "pull": "int8", "transport": "udp", "host": "127.0.0.1", "loss": 0.2, "norm_loss": 0.002},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())),
)
def test_replicas_are_the_same_and_learn_as_without_the_hook(arguments: dict[str, Any]) -> None:
    plain = together(train, 20)
    mine = together(_train_with, 20, arguments)
    for one in mine[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(one["parameters"], mine[0]["parameters"], strict=True))
    for exact, ours in zip(plain[0]["gradients"], mine[0]["gradients"], strict=True):
        off = np.linalg.norm(exact - ours) / np.linalg.norm(exact)
        assert off < (0.3 if "int4" in arguments.values() else 0.1)  # of each process, int4 is 0.22 off
        if exact.ndim < 2:
            assert off < 0.02
    assert mine[0]["losses"][-1] < 0.9 * mine[0]["losses"][0]
    assert abs(mine[0]["losses"][-1] - plain[0]["losses"][-1]) < 0.1
    assert (mine[0]["lost"] > 0) == ("loss" in arguments)
    values = sum(p.size for p in mine[0]["parameters"])
    assert mine[0]["sent"] < 20 * 0.6 * 2 * 4 * values


class Lossy(Streams):
    """Of every second gradient, the last pieces of what process 1 sends to process 0 do not come."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def exchange(self, going: Sequence[torch.Tensor], coming: Sequence[Codec], loss: float) -> Any:
        received, pieces = super().exchange(going, coming, loss)
        self._count += 1
        if self._count % 4 == 1:  # means travel in between
            count = len(pieces[0])
            arrived = np.arange(count) < count - 2
            if dist.get_rank() == 0:
                received[1] = ReceivedPart(received[1].content, coming[1].rows_within(arrived, PAYLOAD))
            if dist.get_rank() == 1:
                pieces[0] = arrived
        return received, pieces


def _sum_of_means(_rank: int, kind: str) -> tuple[float, int]:
    """What a constant gradient comes to over some steps, as a share of what it should, where rows are lost."""
    hook = Exchange(kind, "bf16", 0.3, Lossy(), 0)
    parameter = torch.nn.Parameter(torch.zeros(WORLD * 40 * VALUES_PER_CHUNK, 1))
    gradient, total = torch.linspace(0.5, 1.5, parameter.numel()), torch.zeros(parameter.numel())
    for _ in range(24):
        total += hook._mean(gradient.clone(), [parameter], 0)
    lost = hook.lost_rows
    hook.close()
    return float(total.sum() / (24 * gradient.sum())), lost


@pytest.mark.parametrize("kind", ["int4", "int8"], ids=["whole chunks", "refinements"])
def test_lost_rows_do_not_bias_the_mean(kind: str) -> None:
    results = together(_sum_of_means, kind)
    assert results[1][1] > 0
    for share, _ in results:
        assert share == pytest.approx(1, abs=0.01)


def _carried(_rank: int, kind: str) -> tuple[list[float], list[float]]:
    """What a process has left of a gradient, and the mean of what all then send beside a gradient of zeros."""
    hook = Exchange(kind, "bf16", 0.3, Lossy(), 0)
    parameter = torch.nn.Parameter(torch.zeros(WORLD * 40 * VALUES_PER_CHUNK, 1))
    hook._mean(torch.linspace(-1, 1, parameter.numel()), [parameter], 0)
    left = hook._residuals[0][1].tolist() if hook._residuals else []
    mean = hook._mean(torch.zeros(parameter.numel()), [parameter], 0)
    hook.close()
    return left, mean.tolist()


def test_a_lost_refinement_is_added_to_the_next_gradient() -> None:
    results = together(_carried, "int8")
    left, mean = torch.tensor(results[1][0]), torch.tensor(results[0][1])
    assert results[0][0] == []  # nothing of this one's was lost
    assert left.any()
    assert torch.allclose(mean, left / WORLD, atol=0.02 * float(left.abs().max()))
    whole, nothing = together(_carried, "int4")[1]
    assert not any(whole)  # chunks that did not come at all: the owner took the others' mean
    assert not any(nothing)


def _left_behind(_rank: int) -> list[bool]:
    """Whether what was left of a gradient is added to the next, of the same parameters and of others."""
    hook = Exchange("int8", "bf16", 0.3, Streams(), 0)
    a, b = (torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    results = []
    for whose in ([a, b], [b, a]):
        hook._residuals[0] = [a.data_ptr(), b.data_ptr()], torch.ones(2 * 64 * 64)
        results.append(bool(hook._mean(torch.zeros(2 * 64 * 64), whose, 0).any()))
    hook.close()
    return results


def test_a_residual_is_added_for_the_same_parameters_only() -> None:
    assert together(_left_behind) == [[True, False]] * WORLD


def _open_where_nothing_passes(rank: int) -> list[str]:
    ddp_transport.PEER_OPEN_SECONDS = 0.5
    host = "127.0.0.1" if rank != 1 else "127.0.0.2"
    if rank == 1:  # hears nothing
        DatagramProtocol._on_hello = lambda *_: None  # type: ignore[method-assign]
    exchange, _ = ddp_hook("int8", "bf16", transport="udp", host=host)
    name = type(exchange.transport).__name__
    exchange.close()
    return [name]


def _open_where_one_has_no_socket(rank: int) -> list[str]:
    exchange, _ = ddp_hook("int8", "bf16", transport="udp", host="127.0.0.1" if rank != 1 else "192.0.2.1")
    name = type(exchange.transport).__name__
    exchange.close()
    return [name]


@pytest.mark.parametrize("opened", [_open_where_nothing_passes, _open_where_one_has_no_socket])
def test_all_processes_use_gloo_where_datagrams_do_not_get_through(opened: Callable[[int], list[str]]) -> None:
    assert together(opened) == [["Streams"]] * WORLD


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_a_network_so_small_that_not_every_process_owns_a_part_of_it(transport: str) -> None:
    plain, mine = together(_tiny, None), together(_tiny, transport)
    for one in mine:
        assert all(np.allclose(a, b, atol=0.05) for a, b in zip(one, plain[0], strict=True))


def _tiny(_rank: int, transport: str | None) -> list[Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(10, 3))
    hook = ddp_hook("int8", "bf16", transport=transport, host="127.0.0.1") if transport else None  # type: ignore[arg-type]
    if hook:
        model.register_comm_hook(*hook)
    model(torch.ones(4, 10)).square().mean().backward()
    if hook:
        hook[0].close()
    return [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]


def _train_with(rank: int, steps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return train(rank, steps, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": 0.5}, "loss: 0.5 is not within 0 and 0.3"),
        ({"loss": -0.1}, "loss: -0.1 is not within 0 and 0.3"),
        ({"loss": 0.1}, "needs transport='udp'"),
        ({"norm_loss": 0.5}, "norm_loss: 0.5 is not within 0 and 0.3"),
        ({"loss": 0.1, "transport": "udp", "push": "bf16"}, "needs transport='udp'"),
        ({"push": "fp32"}, "push: 'fp32' is not one of bf16, int8, int4"),
        ({"pull": "int3"}, "pull: 'int3' is not one of bf16, int8, int4"),
        ({"transport": "quic"}, "transport: 'quic' is not one of tcp, udp"),
        ({"seed": -1}, "seed: -1 is negative"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ddp_hook(**arguments)


def test_parts_are_whole_chunks_and_their_codecs_code_what_is_large() -> None:
    shapes = [(64, 300), (300,), (300, 40)]
    size = 64 * 300 + 300 + 300 * 40
    parts = parts_of(size, 4)
    assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    assert parts[-1][1] == size
    codecs = [codec_of("int8", shapes, part, ranked=True) for part in parts]
    assert sum(codec.size for codec in codecs) == size
    assert sum(codec.coded for codec in codecs) == size - 300


def test_a_small_bucket_leaves_some_processes_without_a_part() -> None:
    assert parts_of(100, 3) == [(0, 100), (100, 100), (100, 100)]


def test_the_hook_is_found_where_the_readme_says() -> None:
    assert idletrain.exchange.ddp_hook is ddp_hook
    with pytest.raises(AttributeError):
        _ = idletrain.exchange.nothing
    assert Endpoint  # the transport behind it
