"""Data parallel with codes and bounded loss, in real processes: the same replicas, nearly the same mean."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import idletrain.exchange
from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.ddp import codec_of, ddp_hook, parts_of
from idletrain.nn.outofcore.phases import update_in_phases

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
        told = dict(results.get(timeout=WAIT) for _ in processes)
    finally:
        for process in processes:
            process.join(WAIT)
            process.kill()
    for value in told.values():
        if isinstance(value, str):
            raise AssertionError(value)
    return [told[rank] for rank in range(WORLD)]


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


def train(rank: int, steps: int, **words: Any) -> dict[str, Any]:
    """Some steps of data parallel; the gradients of the first and the parameters of the last."""
    model = nn.parallel.DistributedDataParallel(network())
    found = None
    if words:
        found = ddp_hook(**words)
        model.register_comm_hook(*found)
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
    told = {"losses": losses, "gradients": gradients, "parameters": [p.detach().numpy() for p in model.parameters()]}
    if found:
        told |= {"sent": found[0].sent_bytes, "lost": found[0].lost_rows}
        found[0].close()
    return told


@pytest.mark.parametrize(
    "words",
    [
        {"push": "int8", "pull": "bf16"},
        {"push": "int4", "pull": "int8"},
        {"push": "bf16", "pull": "bf16"},
        {"push": "int8", "pull": "bf16", "transport": "udp", "host": "127.0.0.1"},
        {"push": "int8", "pull": "int8", "transport": "udp", "host": "127.0.0.1", "loss": 0.2},
    ],
    ids=lambda words: "-".join(map(str, words.values())),
)
def test_replicas_are_the_same_and_learn_as_without_the_hook(words: dict[str, Any]) -> None:
    plain = together(train, 20)
    mine = together(_train_with, 20, words)
    for one in mine[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(one["parameters"], mine[0]["parameters"], strict=True))
    for exact, ours in zip(plain[0]["gradients"], mine[0]["gradients"], strict=True):
        off = np.linalg.norm(exact - ours) / np.linalg.norm(exact)
        assert off < (0.3 if "int4" in words.values() else 0.1)  # of each process, int4 is 0.22 off
        if exact.ndim < 2:
            assert off < 0.02
    assert mine[0]["losses"][-1] < 0.9 * mine[0]["losses"][0]
    assert abs(mine[0]["losses"][-1] - plain[0]["losses"][-1]) < 0.1
    assert (mine[0]["lost"] > 0) == ("loss" in words)
    values = sum(p.size for p in mine[0]["parameters"])
    assert mine[0]["sent"] < 20 * 0.6 * 2 * 4 * values


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_a_network_so_small_that_not_every_process_owns_a_part_of_it(transport: str) -> None:
    plain, mine = together(_tiny, None), together(_tiny, transport)
    for one in mine:
        assert all(np.allclose(a, b, atol=0.05) for a, b in zip(one, plain[0], strict=True))


def _tiny(_rank: int, transport: str | None) -> list[Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(10, 3))
    found = ddp_hook("int8", "bf16", transport=transport, host="127.0.0.1") if transport else None  # type: ignore[arg-type]
    if found:
        model.register_comm_hook(*found)
    model(torch.ones(4, 10)).square().mean().backward()
    if found:
        found[0].close()
    return [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]


def _train_with(rank: int, steps: int, words: dict[str, Any]) -> dict[str, Any]:
    return train(rank, steps, **words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"loss": 0.5}, "loss: 0.5 is not within 0 and 0.3"),
        ({"loss": -0.1}, "loss: -0.1 is not within 0 and 0.3"),
        ({"loss": 0.1}, "needs transport='udp'"),
        ({"loss": 0.1, "transport": "udp", "push": "bf16"}, "needs transport='udp'"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ddp_hook(**words)


def test_parts_are_whole_chunks_and_their_codecs_code_what_is_large() -> None:
    shapes = [(64, 300), (300,), (300, 40)]
    size = 64 * 300 + 300 + 300 * 40
    parts = parts_of(size, 4)
    assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    assert parts[-1][1] == size
    codecs = [codec_of("int8", shapes, part, ranked=True) for part in parts]
    assert sum(codec.size for codec in codecs) == size
    assert sum(codec.coded for codec in codecs) == size - 300


def _in_phases(rank: int) -> list[Any]:
    """Parameters that move as soon as their bucket's mean is there."""
    model = nn.parallel.DistributedDataParallel(network())
    exchange, hook = ddp_hook("int8", "bf16")

    def move(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        parameter.sub_(gradient, alpha=0.1)

    update_in_phases(model, move, hook, exchange)
    torch.manual_seed(rank)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.ones(8, dtype=torch.long))
        loss.backward()
        losses.append(loss.item())
    exchange.close()
    return [losses, *(p.detach().numpy() for p in model.parameters())]


def test_updates_in_phases_go_with_the_hook() -> None:
    first, *others = together(_in_phases)
    assert first[0][-1] < 0.5 * first[0][0]
    for one in others:
        assert all(np.array_equal(a, b) for a, b in zip(one[1:], first[1:], strict=True))


def test_a_small_bucket_leaves_some_processes_without_a_part() -> None:
    assert parts_of(100, 3) == [(0, 100), (100, 100), (100, 100)]


def test_the_hook_is_found_where_the_readme_says() -> None:
    assert idletrain.exchange.ddp_hook is ddp_hook
    with pytest.raises(AttributeError):
        _ = idletrain.exchange.nothing
    assert Endpoint  # the transport behind it
