"""Late rows of an update: added at the next commit, to the same bits for every reader of the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from idletrain.exchange.messages import checksum
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.durable import recovery, updates
from idletrain.rounds.durable.run_directory import Payload, RunDirectory

HALVES, OTHERS = (0.5, 0.5), (0.25, 0.75)
WIDTHS = (40, 64, 64, 3)


@pytest.fixture
def opened(tmp_path: Path, small_program: Callable[..., Prepared]) -> Callable[[], RunDirectory]:
    prepared = small_program(widths=WIDTHS, norm="batch", local_steps=5, optimizer={"lr": 0.1, "momentum": 0.9})
    (tmp_path / "run").mkdir()

    def open_() -> RunDirectory:
        return RunDirectory(tmp_path / "run", prepared, lambda *_, **__: None, lambda _: None, 100)

    return open_


def payload(values: torch.Tensor) -> Payload:
    frames = [values.numpy().data.cast("B")]
    return Payload(frames, 1.0, checksum(frames))


async def train(directory: RunDirectory, next_shares: tuple[float, ...] = HALVES) -> None:
    """A round of made-up updates, of 5 and of 2 steps."""
    for k, subnet in enumerate(directory.subnets):
        flat = directory.network.pull(subnet)
        await directory.stage(k, 7 + k, 5 - 3 * k, payload(flat + torch.rand(len(flat))), 1.0)
    await directory.commit([(0, 5), (1, 2)], next_shares)


def change_of(directory: RunDirectory, k: int) -> torch.Tensor:
    """Of a round's subnet, as it was cut."""
    subnet = directory.subnets[k]
    return torch.rand(subnet.parameters)


async def some_rounds(directory: RunDirectory) -> list[tuple[int, int, torch.Tensor]]:
    """Two rounds of different shares, with late rows of the first in the second, and of that in the third."""
    late: list[tuple[int, int, torch.Tensor]] = []
    await directory.begin(HALVES)
    first = [(0, k, change_of(directory, k)) for k in (0, 1)]
    await train(directory, OTHERS)
    for of, k, change in first:
        await directory.late_rows(of, k, payload(change))
    second = (1, 0, change_of(directory, 0))
    await train(directory)
    await directory.late_rows(second[0], second[1], payload(second[2]))
    await train(directory)
    late += [*first, second]
    return late


def test_late_rows_are_replayed_to_the_same_bits(opened: Callable[[], RunDirectory], tmp_path: Path) -> None:
    torch.manual_seed(0)
    journal = opened()
    asyncio.run(some_rounds(journal))
    journal.close()
    program = journal._program
    restored, rounds = recovery.load_network(tmp_path / "run", program)
    assert rounds == 3
    assert torch.equal(restored.flat, journal.network.flat)
    again = opened()
    assert torch.equal(again.network.flat, journal.network.flat)
    again.close()


def test_neurons_of_one_subnet_get_the_change_and_what_all_have_its_share_of_it(
    opened: Callable[[], RunDirectory],
) -> None:
    """Of a layer's bias, which is cut, the whole; of the output's, which every subnet has, as its steps counted."""
    torch.manual_seed(0)
    journal = opened()

    async def run() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        await journal.begin(HALVES)
        subnet = journal.subnets[0]
        await train(journal)
        before = [t.clone() for t in journal.network.values]
        bare = Network(journal._program.layout, 2, [t.clone() for t in before])
        await journal.late_rows(0, 0, payload(torch.ones(subnet.parameters)))
        untouched = [t.clone() for t in journal.network.values]
        assert all(torch.equal(a, b) for a, b in zip(before, untouched, strict=True))  # before the commit
        flats = [journal.network.pull(s) for s in journal.subnets]
        for k, flat in enumerate(flats):
            await journal.stage(k, 9 + k, 5, payload(flat), 1.0)
        await journal.commit([(0, 5), (1, 5)], HALVES)
        bare.add(subnet, torch.ones(subnet.parameters), 5 / 7)
        return before, journal.network.values, torch.cat([v.flatten() for v in bare.values])

    before, after, bare = asyncio.run(run())
    moved = [a - b for a, b in zip(after, before, strict=True)]
    names = [t.name for t in journal._program.layout.tensors]
    output = moved[names.index(names[-1])]
    assert torch.allclose(output, torch.full_like(output, 5 / 7), atol=1e-5)
    hidden = next(
        m for m, t in zip(moved, journal._program.layout.tensors, strict=True) if not t.shared and m.dim() == 1
    )
    assert sorted({round(v, 4) for v in hidden.tolist()}) == [0.0, 1.0]
    assert torch.allclose(torch.cat([v.flatten() for v in after]), bare, atol=1e-5)
    journal.close()


def test_late_rows_of_the_open_round_survive_a_head_unless_they_are_damaged(
    opened: Callable[[], RunDirectory], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    journal = opened()

    async def until_killed() -> None:
        await journal.begin(HALVES)
        changes = [change_of(journal, k) for k in (0, 1)]
        await train(journal)
        for k, change in enumerate(changes):
            await journal.late_rows(0, k, payload(change))

    asyncio.run(until_killed())
    journal.close()
    path = updates.path_of(tmp_path / "run", 1)
    content = bytearray(path.read_bytes())
    content[10] ^= 1  # of the first
    path.write_bytes(content)

    async def go_on() -> RunDirectory:
        successor = opened()
        assert [late.change.subnet for late in successor._late_updates] == [1]
        await successor.begin(HALVES)
        await train(successor)
        return successor

    successor = asyncio.run(go_on())
    successor.close()
    restored, rounds = recovery.load_network(tmp_path / "run", successor._program)
    assert rounds == 2
    assert torch.equal(restored.flat, successor.network.flat)
    (record,) = [r for r in recovery.write_ahead_log.read(tmp_path / "run" / "wal").records if r["kind"] == "commit"][
        1:
    ]
    assert record["late_updates"] == [2]
