"""Trials run to their end or are pruned, go on where they were stopped, and stay within the sweep's budget."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_trial_process import JOB, processes

from idletrain.errors import JobError, RunError
from idletrain.job import Job
from idletrain.observe.records import Record, read_records
from idletrain.rounds.durable.history import holds_run
from idletrain.sweeps import running, trial_process
from idletrain.sweeps.grid import SweepTrial, Varied, decisive_settings, trials
from idletrain.sweeps.pruning import Halving
from idletrain.sweeps.running import Sweep, SweepSettings, TrialUnderWay
from idletrain.sweeps.trial_process import launched
from idletrain.sweeps.trial_results import ResultsFile, SweepResult


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    trial_process.warm_up()
    return tmp_path


def start(job: Job) -> AbstractAsyncContextManager[TrialUnderWay]:
    return launched(job, again=holds_run(job.run_dir), options=())


def events_of(job: Job) -> list[Record]:
    file = job.run_dir / "events.jsonl"
    return list(read_records(file)) if file.exists() else []


def sweep(found: list[SweepTrial], **changes: Any) -> Sweep:
    options: dict[str, Any] = {
        "start": start, "events_of": events_of, "parallel": 1,
        "watched": "loss", "better": "lower", "prune": False, "budget_usd": None,
        "cost_of": lambda _: 0.0, "report": lambda _: None,
    }  # fmt: skip
    return Sweep(found, ResultsFile(Path("runs/digits.sweep.json")), SweepSettings(**{**options, **changes}))


def with_rates(*rates: float, **training: Any) -> list[SweepTrial]:
    tree = {**JOB, "training": {**JOB["training"], "optimizer": {"name": "sgd"}, **training}}
    return trials(tree, [Varied("training.optimizer.lr", rates)])


def test_every_trial_runs_and_the_same_command_starts_none_again() -> None:
    found, said = with_rates(0.05, 0.1), []
    first = sweep(found, parallel=2)
    asyncio.run(first.run())
    assert [first.results[trial.job.name].state for trial in found] == ["completed", "completed"]
    assert all(result.values[-1][0] == result.record["rounds"] == 3 for result in first.results.values())
    again = sweep(found, report=said.append)
    asyncio.run(again.run())
    assert said == ["2 of 2 trials have ended before"]
    assert again.results == first.results


def test_a_trial_that_cannot_run_says_why_and_the_others_go_on() -> None:
    found = with_rates(0.1)
    (Path("runs") / found[0].job.name).mkdir(parents=True)
    Path("runs", found[0].job.name, "wal").write_text("another's")
    under_way = sweep([*found, *with_rates(0.2)])
    asyncio.run(under_way.run())
    failed, done = under_way.results.values()
    assert failed.state == "failed"
    assert "job.json is missing" in failed.reason
    assert done.state == "completed"


def test_a_sweep_that_is_stopped_leaves_no_process_and_goes_on_later() -> None:
    (trial,) = with_rates(0.1, rounds=150)
    under_way = sweep([trial])

    async def stopped() -> None:
        running = asyncio.create_task(under_way.run())
        while not under_way.results[trial.job.name].began:
            await asyncio.sleep(0.05)
            assert not running.done()
        began = [*processes()["idletrain-laun"], *processes().get("idletrain-work", ())]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not psutil.wait_procs(began, timeout=20)[1]

    asyncio.run(stopped())
    assert under_way.results[trial.job.name].state == "stopped"
    (shorter,) = with_rates(0.1, rounds=151)  # the same run, of which little is left to do here
    assert shorter.job.name == trial.job.name
    later = sweep([shorter])
    assert later.results[trial.job.name].began
    asyncio.run(later.run())
    assert later.results[trial.job.name].state == "completed"
    assert later.results[trial.job.name].record["rounds"] == 151


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])  # as a killed sweep, and one at its limit, leave it
def test_a_trial_whose_run_had_ended_is_not_run_again(state: str) -> None:
    found = with_rates(0.1)
    name = found[0].job.name
    asyncio.run(sweep(found).run())
    file, done = ResultsFile(Path("runs/digits.sweep.json")), sweep(found).results[name]
    file.write({name: replace(done, state=state, began=state == "failed", values=done.values[:1], record={})})
    again = sweep(found)
    asyncio.run(again.run())
    assert again.results[name].state == "completed"
    assert again.results[name].record["rounds"] == 3
    assert again.results[name].values[-1] == done.values[-1]
    assert sum(event["kind"] == "run_started" for event in events_of(found[0].job)) == 1


def test_a_trial_whose_values_are_no_numbers_has_ended_as_that() -> None:
    (trial,) = with_rates(1e30, rounds=10)
    under_way, said = sweep([trial]), []
    asyncio.run(under_way.run())
    result = under_way.results[trial.job.name]
    assert (result.state, result.record["status"], result.ended) == ("diverged", "diverged", True)
    assert "a lower learning rate may help" in result.reason
    asyncio.run(sweep([trial], report=said.append).run())
    assert said == ["1 of 1 trials have ended before"]


def test_a_trial_that_is_far_behind_is_pruned() -> None:
    found = with_rates(0.1, 1e-6, rounds=60)  # the second learns nothing
    under_way = sweep(found, prune=True)
    asyncio.run(under_way.run())
    good, bad = (under_way.results[trial.job.name] for trial in found)
    assert (good.state, bad.state) == ("completed", "pruned")
    assert bad.values[-1][0] < 60
    resumed = sweep(found, prune=True)
    assert all(result.ended for result in resumed.results.values())


class Kept:
    """A trial's run that ends as the test says, and takes note of when it began."""

    def __init__(self, job: Job, began: list[str], why: str) -> None:
        began.append(job.name)
        self._why = why

    async def records(self) -> AsyncIterator[dict[str, Any]]:
        for record in [] if self._why else [{"rounds": 3, "evaluated_rounds": 3, "loss": 0.5, "status": "completed"}]:
            yield record

    def interrupt(self) -> None:
        """It has ended."""

    async def wait(self) -> str:
        return self._why


def test_trials_that_failed_before_come_last_and_those_that_never_began_are_not_taken_for_done() -> None:
    bad, good = with_rates(0.1, 0.2)
    began: list[str] = []
    whys = {bad.job.name: "its loss raised", good.job.name: ""}

    @asynccontextmanager
    async def start(job: Job) -> AsyncIterator[TrialUnderWay]:
        yield Kept(job, began, whys[job.name])

    done = [{"v": 2, "t": 1.0, "s": 1.0, "kind": "run_ended", "status": "completed", "rounds": 3}]  # another run's
    for _ in range(2):
        under_way = sweep([bad, good], start=start, events_of=lambda _job: done)
        under_way.results[good.job.name].state = "waiting"
        asyncio.run(under_way.run())
        assert under_way.results[bad.job.name].state == "failed"
        assert under_way.results[bad.job.name].reason == "its loss raised"
    assert began == [bad.job.name, good.job.name, good.job.name, bad.job.name]


def evaluated(round_: int, **metrics: float) -> Record:
    return {"kind": "evaluated", "round": round_, "accuracy": None, "loss": 0.5, "metrics": metrics}


class ByRounds:
    """A trial's run that prints a record of each round, as a launch does, and a last one."""

    def __init__(self, events: list[Record], rounds: int, status: str) -> None:
        self._events, self._rounds, self._status, self.interrupted = events, rounds, status, False

    async def records(self) -> AsyncIterator[dict[str, Any]]:
        for round_ in range(1, self._rounds + 1):
            if self.interrupted and self._status != "completed":
                break
            done, mae = round_, 0.1 * len(self._events)
            self._events.append(evaluated(round_, mae=mae))
            yield {"rounds": round_, "evaluated_rounds": round_, "accuracy": None, "loss": 0.5}
        last = {"rounds": done, "evaluated_rounds": done, "accuracy": None, "loss": 0.5, "metrics": {"mae": mae}}
        yield {**last, "status": self._status}

    def interrupt(self) -> None:
        self.interrupted = True

    async def wait(self) -> str:
        return ""


def by_rounds(statuses: dict[str, str], events: dict[str, list[Record]], rounds: int) -> Any:
    @asynccontextmanager
    async def start(job: Job) -> AsyncIterator[TrialUnderWay]:
        yield ByRounds(events[job.name], rounds, statuses[job.name])

    return start


def events_before(found: list[SweepTrial], rounds: int) -> dict[str, list[Record]]:
    """The events of runs that begin, of which the later ones learn less."""
    start = {"kind": "run_started", "rounds": rounds}
    return {trial.job.name: [start] * (5 * n + 1) for n, trial in enumerate(found)}


def test_trials_are_pruned_by_a_metric_of_the_job_s_own() -> None:
    found = with_rates(0.1, 0.2, rounds=9)
    events = events_before(found, 9)
    start = by_rounds(dict.fromkeys(events, "stopped") | {found[0].job.name: "completed"}, events, 9)
    under_way = sweep(found, start=start, events_of=lambda job: events[job.name], watched="mae", prune=True)
    asyncio.run(under_way.run())
    good, bad = (under_way.results[trial.job.name] for trial in found)
    assert (good.state, [at for at, _ in good.values]) == ("completed", [*range(1, 10)])
    assert (bad.state, bad.values) == ("pruned", [(1, pytest.approx(0.6))])


def test_a_trial_that_came_to_its_end_is_not_called_pruned() -> None:
    found = with_rates(0.1, 0.2, rounds=9)
    events = events_before(found, 9)
    start = by_rounds(dict.fromkeys(events, "completed"), events, 9)  # too quick for an interrupt
    under_way = sweep(found, start=start, events_of=lambda job: events[job.name], watched="mae", prune=True)
    asyncio.run(under_way.run())
    assert [result.state for result in under_way.results.values()] == ["completed", "completed"]


def test_events_that_cannot_be_read_stop_no_trial() -> None:
    (trial,) = with_rates(0.1, rounds=2)

    def fails(_: Job) -> list[Record]:
        raise RunError("these records are of schema 9")

    start = by_rounds({trial.job.name: "completed"}, {trial.job.name: [{}]}, 2)
    under_way = sweep([trial], start=start, events_of=fails, watched="mae")
    asyncio.run(under_way.run())
    assert under_way.results[trial.job.name].values == [(2, pytest.approx(0.2))]  # the last record has it


@pytest.mark.parametrize("training", [{"epochs": 1}, {}])
def test_progress_and_pruning_are_by_the_rounds_that_the_run_counts(
    training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PROGRESS_SECONDS", -1.0)
    halved, said = [], []
    monkeypatch.setattr(running, "Halving", lambda rounds, better: halved.append(rounds) or Halving(rounds, better))
    tree = {**JOB, "training": {"optimizer": {"name": "sgd"}, **training}}
    (trial,) = trials(tree, [Varied("training.optimizer.lr", (0.1,))])
    events = events_before([trial], 18)
    start = by_rounds({trial.job.name: "completed"}, events, 18)
    asyncio.run(
        sweep([trial], start=start, events_of=lambda _: events[trial.job.name], prune=True, report=said.append).run()
    )
    assert halved == [18]
    assert f"{trial.job.name}: 2 of 18 rounds, loss 0.5000" in said
    asyncio.run(sweep([trial], prune=True).run())
    assert halved == [18, 18]


def test_a_trial_that_ended_with_other_settings_is_refused_before_anything_starts() -> None:
    first, second = with_rates(0.1, 0.2)
    began: list[str] = []

    @asynccontextmanager
    async def start(job: Job) -> AsyncIterator[TrialUnderWay]:
        yield Kept(job, began, "")

    asyncio.run(sweep([first], start=start).run())
    for changes, paths in (({"batch_size": 7}, "training.batch_size"), ({"rounds": 9}, "training.rounds")):
        sentence = f"name: trial {first.job.name} ended with other settings ({paths}); give the sweep another --name"
        with pytest.raises(JobError, match=re.escape(sentence)):
            sweep([*with_rates(0.1, **changes), second], start=start)
    assert sweep([first, second], start=start).results[first.job.name].ended
    assert began == [first.job.name]


def test_a_trial_that_has_not_ended_goes_on_to_other_rounds_but_not_with_other_settings() -> None:
    (trial,) = with_rates(0.1)
    file = ResultsFile(Path("runs/digits.sweep.json"))
    for state in ("stopped", "running"):
        file.write({trial.job.name: SweepResult(state, settings=decisive_settings(trial.job))})
        sweep(with_rates(0.1, rounds=9))
        with pytest.raises(JobError, match=r"began with other settings \(training.batch_size\)"):
            sweep(with_rates(0.1, batch_size=7))
    file.write({trial.job.name: SweepResult("failed", settings=decisive_settings(trial.job))})
    sweep(with_rates(0.1, batch_size=7))  # its launch decides


def test_a_trial_that_is_pruned_stays_so_where_the_sweep_is_stopped_meanwhile() -> None:
    trial, *_ = with_rates(0.1)

    async def stopped() -> None:
        held = asyncio.Event()

        @asynccontextmanager
        async def start(job: Job) -> AsyncIterator[TrialUnderWay]:
            under_way.results[job.name].state = "pruned"
            await held.wait()
            yield Kept(job, [], "")

        under_way = sweep([trial], start=start)
        running = asyncio.create_task(under_way.run())
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert under_way.results[trial.job.name].state == "pruned"

    asyncio.run(stopped())


def test_no_trial_begins_without_money_left() -> None:
    found = with_rates(0.1, 0.2, 0.3)
    under_way = sweep(found, budget_usd=1.0, cost_of=lambda _: 0.6)
    asyncio.run(under_way.run())
    ended = [under_way.results[trial.job.name] for trial in found]
    assert [result.state for result in ended] == ["completed", "completed", "not started"]  # the second took 0.6 of 0.4
    assert ended[-1].reason == "the budget is used up"


def test_a_long_trial_tells_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PROGRESS_SECONDS", 0.0)
    said: list[str] = []
    (trial,) = with_rates(0.1, rounds=30)  # a round's score can come after the next rounds
    asyncio.run(sweep([trial], report=said.append).run())
    assert [line for line in said if re.match(rf"{trial.job.name}: \d+ of 30 rounds, loss \d", line)]
    assert said[-1].startswith(f"{trial.job.name}: completed, loss ")
