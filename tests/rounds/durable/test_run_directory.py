"""Late rows of an update: added at the next commit, to the same bits for every reader of the run directory."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idletrain.errors import DamageError, RunError
from idletrain.exchange.messages import checksum
from idletrain.nn.ist.schemes import SubnetSpec, by_neurons
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.rounds.durable import history, recovery, snapshots, updates, write_ahead_log
from idletrain.rounds.durable.run_directory import INLINE_SECONDS, Payload, RunDirectory

HALVES, OTHERS = by_neurons((0.5, 0.5)), by_neurons((0.25, 0.75))
WIDTHS = (40, 64, 64, 3)


@pytest.fixture
def opened(tmp_path: Path, small_program: Callable[..., Prepared]) -> Callable[[], RunDirectory]:
    prepared = small_program(
        widths=WIDTHS, norm="batch", local_steps=5, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}
    )
    (tmp_path / "run").mkdir()

    def open_() -> RunDirectory:
        return RunDirectory(tmp_path / "run", prepared, lambda *_, **__: None, lambda _: None, 100)

    return open_


def payload(values: torch.Tensor) -> Payload:
    frames = [values.numpy().data.cast("B")]
    return Payload(frames, 1.0, checksum(frames))


async def train(directory: RunDirectory, next_specs: tuple[SubnetSpec, ...] = HALVES) -> None:
    """A round of made-up updates, of 5 and of 2 steps."""
    for k, subnet in enumerate(directory.subnets):
        flat = directory.network.pull(subnet)
        await directory.stage(k, 7 + k, 5 - 3 * k, payload(flat + torch.rand(len(flat))), 1.0)
    await directory.commit([(0, 5), (1, 2)], next_specs)


def test_behind_a_slow_write_small_updates_are_written_in_a_thread_until_one_was_quick(
    opened: Callable[[], RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by: list[bool] = []
    pauses = iter((0.0, 2 * INLINE_SECONDS, 2 * INLINE_SECONDS, 0.0, 0.0))
    write = updates.write

    def slow(*arguments: Any) -> None:
        written_by.append(threading.current_thread() is threading.main_thread())
        time.sleep(next(pauses))
        write(*arguments)

    async def test() -> None:
        directory = opened()
        await directory.begin(HALVES)
        for attempt in range(5):
            await directory.stage(0, attempt, 5, payload(directory.network.pull(directory.subnets[0])), 1.0)
        directory.close()

    monkeypatch.setattr(updates, "write", slow)
    asyncio.run(test())
    assert written_by == [True, True, False, False, True]


@pytest.mark.parametrize("is_factory_made", [True, False])
def test_only_a_module_that_the_job_s_factory_made_shares_the_network_s_memory(
    is_factory_made: bool, tmp_path: Path, small_program: Callable[..., Prepared]
) -> None:
    prepared = replace(small_program(widths=WIDTHS, norm="batch"), is_factory_made=is_factory_made)
    before = [parameter.detach().clone() for parameter in prepared.module.parameters()]
    directory = RunDirectory(tmp_path, prepared, lambda *_, **__: None, lambda _: None, 1)
    directory.close()
    parameters = list(prepared.module.parameters())
    values = directory.network.values
    for own, parameter, value, old in zip(prepared.network, parameters, values, before, strict=False):
        assert (own.data_ptr() == value.data_ptr()) is is_factory_made
        assert (parameter.data_ptr() == value.data_ptr()) is is_factory_made
        assert torch.equal(parameter, value if is_factory_made else old)


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
    recovered = recovery.load_network(tmp_path / "run", program)
    restored, rounds = recovered.network, recovered.rounds
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
    recovered = recovery.load_network(tmp_path / "run", successor._program)
    restored, rounds = recovered.network, recovered.rounds
    assert rounds == 2
    assert torch.equal(restored.flat, successor.network.flat)
    (record,) = [r for r in write_ahead_log.read(tmp_path / "run" / "wal").records if r["kind"] == "commit"][1:]
    assert record["late_updates"] == [2]


# --- damage has a way back -------------------------------------------------------------------------------------------


async def rounds_of(directory: RunDirectory, until: int, snapshot_at: int) -> None:
    """Train to a round, with a snapshot on the way; a round's updates are functions of its number."""
    await directory.begin(HALVES)
    while directory.round < until:
        torch.manual_seed(directory.round)
        await train(directory)
        if directory.round == snapshot_at:
            await directory.snapshot()


def run_to_the_end(opened: Callable[[], RunDirectory], until: int = 6, snapshot_at: int = 3) -> str:
    directory = opened()
    asyncio.run(rounds_of(directory, until, snapshot_at))
    digest = directory.network.sha256()
    directory.close()
    return digest


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "an update": (lambda run: flip(updates.path_of(run, 4), 100), 4),
    "the newest snapshot": (lambda run: flip(run / "snapshots/00000003/network", 100), 6),
    "the newest snapshot and an update": (
        lambda run: (flip(run / "snapshots/00000003/network", 9), flip(updates.path_of(run, 1), 9)),
        1,
    ),
    "the log's middle": (lambda run: flip(run / "wal", 900), 3),
    "the log": (lambda run: (run / "wal").write_bytes(b""), 3),
    "the log and all updates": (lambda run: ((run / "wal").unlink(), shutil.rmtree(run / "updates")), 3),
    "all updates": (lambda run: shutil.rmtree(run / "updates"), 3),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_run_goes_on_from_its_newest_sound_state_to_the_same_bits(
    what: str, opened: Callable[[], RunDirectory], tmp_path: Path
) -> None:
    whole = run_to_the_end(opened)
    harm, sound = DAMAGES[what]
    harm(tmp_path / "run")
    again = opened()
    assert again.round == sound
    assert (again.epoch == 2) == (what == "the newest snapshot"), "no number that a lost head may have had"
    again.close()
    assert run_to_the_end(opened) == whole
    once_more = opened()
    assert once_more.round == 6
    once_more.close()


def test_nothing_is_pruned_because_of_a_damaged_snapshot(
    opened: Callable[[], RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_the_end(opened, until=4, snapshot_at=3)
    flip(tmp_path / "run/snapshots/00000003/network", 50)
    flip(updates.path_of(tmp_path / "run", 1), 50)
    again = opened()
    again._keep = 1
    assert again.round == 1

    async def a_round_and_a_snapshot() -> None:
        await rounds_of(again, 2, 2)

    asyncio.run(a_round_and_a_snapshot())
    again.close()
    assert [path.name for path in sorted((tmp_path / "run/snapshots").iterdir())] == ["00000002", "00000003.damaged"]
    last = opened()
    assert last.round == 2
    last.close()


def test_a_directory_that_can_no_longer_be_written_is_reported_as_that(
    opened: Callable[[], RunDirectory], tmp_path: Path
) -> None:
    directory = opened()

    async def without_updates() -> None:
        await directory.begin(HALVES)
        shutil.rmtree(tmp_path / "run/updates")
        await train(directory)

    with pytest.raises(RunError, match=r"updates/00000000 cannot be written \(No such file or directory\).*--resume"):
        asyncio.run(without_updates())
    directory.close()


def test_updates_without_a_log_and_snapshots_are_no_beginning(
    opened: Callable[[], RunDirectory], tmp_path: Path
) -> None:
    directory = opened()
    asyncio.run(some_rounds(directory))
    directory.close()
    shutil.rmtree(tmp_path / "run" / "snapshots")
    (tmp_path / "run" / "wal").unlink()
    assert history.holds_run(tmp_path / "run")
    left = sorted((tmp_path / "run" / "updates").iterdir())
    with pytest.raises(DamageError, match=r"no snapshot is sound .there is no snapshot.; start the job again"):
        opened()
    assert sorted((tmp_path / "run" / "updates").iterdir()) == left


class KilledError(Exception):
    """Stands for a kill at a named point."""


def watched(run_dir: Path, prepared: Prepared, killed_at: str = "") -> RunDirectory:
    """A run directory that keeps one snapshot, and the best one by loss."""

    def reached(name: str) -> None:
        if name == killed_at:
            raise KilledError

    return RunDirectory(run_dir, prepared, lambda *_, **__: None, reached, 1, "loss")


@pytest.fixture
def small(tmp_path: Path, small_program: Callable[..., Prepared]) -> tuple[Path, Prepared]:
    (tmp_path / "run").mkdir()
    return tmp_path / "run", small_program(widths=WIDTHS, norm="batch", local_steps=5)


async def scored(directory: RunDirectory, scores: list[tuple[float | None, bool]]) -> dict[int, torch.Tensor]:
    """A round and a kept score each; return the networks by round."""
    networks = {}
    for score, best in scores:
        await train(directory)
        networks[directory.round] = directory.network.flat.clone()
        await directory.keep_score(score, best=best)
        await directory.snapshot()
    return networks


def test_the_best_network_s_snapshot_is_kept_until_there_is_a_better_one(small: tuple[Path, Prepared]) -> None:
    run_dir, prepared = small
    directory = watched(run_dir, prepared)

    async def rounds() -> dict[int, torch.Tensor]:
        await directory.begin(HALVES)
        networks = await scored(directory, [(3.0, True), (2.0, True), (2.5, False), (None, False)])
        assert snapshots.rounds(run_dir) == [2, 4]
        assert updates.rounds(run_dir) == []  # the newest snapshot holds them, whatever the best one's age
        return networks

    networks = asyncio.run(rounds())
    past = history.read_history(run_dir)
    assert past.best_round("loss") == directory.best_round == 2
    assert past.best_round("f1") is None
    for metric, round_ in (("loss", 2), (None, 4), ("f1", 4)):
        result = recovery.load_result(run_dir, prepared.program, metric)
        assert result.rounds == round_
        assert torch.equal(result.network.flat, networks[round_])
    directory.close()
    again = watched(run_dir, prepared)
    assert again.best_round == 2
    assert again.scores == {1: 3.0, 2: 2.0, 3: 2.5, 4: None}
    again.close()


@pytest.mark.parametrize("killed_at", ["snapshot-data-written", "snapshot-written", "updates-pruned", "score-recorded"])
def test_wherever_a_head_dies_the_recorded_best_network_is_there(small: tuple[Path, Prepared], killed_at: str) -> None:
    run_dir, prepared = small
    directory = watched(run_dir, prepared)

    async def first() -> dict[int, torch.Tensor]:
        await directory.begin(HALVES)
        networks = await scored(directory, [(3.0, True), (3.5, False)])
        await train(directory)
        networks[3] = directory.network.flat.clone()
        return networks

    networks = asyncio.run(first())
    directory.close()
    dying = watched(run_dir, prepared, killed_at)
    with pytest.raises(KilledError):
        asyncio.run(dying.keep_score(2.0, best=True))
    dying.close()
    result = recovery.load_result(run_dir, prepared.program, "loss")
    best = 3 if killed_at == "score-recorded" else 1
    assert result.rounds == best
    assert torch.equal(result.network.flat, networks[best])
    again = watched(run_dir, prepared)  # and evaluates the same round again
    asyncio.run(again.keep_score(2.0, best=True))
    assert again.best_round == 3
    assert history.read_history(run_dir).scores["loss"].keys() == {1, 2, 3}
    assert snapshots.rounds(run_dir) == [3]
    again.close()


def test_where_damage_took_the_best_network_the_last_one_is_taken_and_the_best_is_sought_anew(
    small: tuple[Path, Prepared],
) -> None:
    run_dir, prepared = small
    directory = watched(run_dir, prepared)

    async def rounds() -> dict[int, torch.Tensor]:
        await directory.begin(HALVES)
        return await scored(directory, [(1.0, True), (2.0, False)])

    networks = asyncio.run(rounds())
    directory.close()
    shutil.rmtree(run_dir / "snapshots" / "00000001")
    result = recovery.load_result(run_dir, prepared.program, "loss")
    assert torch.equal(result.network.flat, networks[2])
    assert "it was the best by loss, and the last network is taken in its place" in result.note
    again = watched(run_dir, prepared)
    assert (again.best_round, again.scores) == (None, {})
    again.close()


def test_scores_of_rounds_that_damage_lost_are_forgotten() -> None:
    def evaluated(round_: int, score: float, best: bool) -> dict[str, object]:
        return {"kind": "evaluated", "round": round_, "metric": "loss", "score": score, "best": best}

    records = [evaluated(1, 3.0, True), evaluated(2, 2.0, True), {"kind": "restored", "round": 1}]
    assert history.collect(records).best_round("loss") == 1
    assert history.collect([*records, evaluated(2, 1.0, True)]).scores["loss"][2].score == 1.0
