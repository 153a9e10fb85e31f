"""`sampler: auto`: all samplers are tried, the best of them once more, and the best of these is taken."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from idletrain.autotune import sampler_trial
from idletrain.autotune.sampler_trial import FINALISTS, HELD_OUT, PART_OF_RUN, SamplerTrial, best, choose_sampler
from idletrain.errors import JobError
from idletrain.job_file import parse_job
from idletrain.optimizer_settings import OptimizerSettings


def scored(name: str, right: int, of: int = 1000) -> SamplerTrial:
    return SamplerTrial(name, 1, 1.0, np.arange(of) < right)


def test_the_best_come_first_and_of_equal_ones_the_first() -> None:
    trials = [scored("uniform", 100), scored("simhash", 102), scored("dwta", 100), scored("all", 50)]
    assert [trial.sampler for trial in best(trials, 3)] == ["simhash", "uniform", "dwta"]
    assert [trial.sampler for trial in best(trials[2:], 5)] == ["dwta", "all"]


@pytest.fixture
def job(tmp_path: Path) -> object:
    random = np.random.default_rng(0)
    labels, noise = random.integers(0, 50, 1500), random.integers(0, 60, (1500, 2))
    rows = [
        (label, sorted({label, *features})) for label, features in zip(labels.tolist(), noise.tolist(), strict=True)
    ]
    lines = ["1500 60 50\n", *(f"{label} {' '.join(f'{word}:1' for word in features)}\n" for label, features in rows)]
    (tmp_path / "train.txt").write_text("".join(lines))
    return parse_job(
        {
            "name": "auto",
            "model": {
                "factory": "idletrain.nn.wide.models:wide",
                "args": {"features": 60, "hidden": 8, "labels": 50, "sampler": "auto", "start": "random"},
                "exclude": ["hidden"],
            },
            "data": {"train": str(tmp_path / "train.txt")},
            "training": {
                "batch_size": 16,
                "local_steps": 10,
                "loss": "sampled_softmax",
                "optimizer": {"name": "row-adagrad", "lr": 0.2, "start": 1e-4},
            },
            "checkpoint": {"to": str(tmp_path / "runs")},
        }
    )


def test_every_candidate_is_trained_for_its_time(job: object, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1)  # a look at it takes a second, however busy the machine is
    monkeypatch.setattr(sampler_trial, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    candidates = ({"name": "uniform", "negatives": 10}, {"name": "simhash", "k": 3, "tables": 4, "negatives": 5})
    chosen, trials = choose_sampler(job.model, job.data, job.training, seconds=300, candidates=candidates)
    assert [t.sampler for t in trials] == list(candidates)
    assert chosen in candidates
    assert [t.steps for t in trials] == [150, 150]
    assert all(t.precision > 0.2 for t in trials), [(t.steps, t.precision) for t in trials]  # by chance 0.02


def test_the_best_of_the_first_trials_are_tried_once_more_and_that_decides(
    job: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, tried = {"a": [300, 100], "b": [200, 400], "c": [100], "d": [50]}, []

    def trial(_prepared: object, sampler: str, seconds: float, most_steps: float, scored: int) -> SamplerTrial:
        tried.append((sampler, seconds, most_steps, scored))
        return SamplerTrial(sampler, 1, min(seconds, 6.0), np.arange(1000) < right[sampler].pop(0))

    monkeypatch.setattr(sampler_trial, "from_settings", lambda *_: None)
    monkeypatch.setattr(sampler_trial, "_try", trial)
    chosen, trials = choose_sampler(job.model, job.data, job.training, seconds=40.0, candidates=("a", "b", "c", "d"))
    assert chosen == "b"
    assert [(name, seconds) for name, seconds, *_ in tried] == [
        ("a", 5.0), ("b", 5.0), ("c", 5.0), ("d", 5.0), ("a", 10.0), ("b", 6.0),  # as long as the first
    ]  # fmt: skip
    assert [scored for *_, scored in tried] == [sampler_trial.SCORED_FIRST] * 4 + [sampler_trial.HELD_OUT] * 2
    assert sorted(trial.sampler for trial in trials) == ["a", "b", "c", "d"]


def test_first_trials_are_scored_on_a_part_of_the_rows_held_out(job: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_trial, "HELD_OUT", 200)
    monkeypatch.setattr(sampler_trial, "SCORED_FIRST", 50)
    candidates = tuple({"name": "uniform", "negatives": 5 + n} for n in range(3))
    _, trials = choose_sampler(job.model, job.data, job.training, seconds=0.1, candidates=candidates)
    assert [len(trial.hits) for trial in trials] == [200, 200, 50]


@pytest.mark.parametrize(
    ("labels", "hidden", "rows"),
    [(225_988, 64, HELD_OUT), (200_270, 512, HELD_OUT), (670_091, 2560, 1165), (10**8, 512, 1000)],
)
def test_fewer_rows_are_scored_where_ranking_all_labels_takes_minutes(labels: int, hidden: int, rows: int) -> None:
    assert sampler_trial.scored_rows(HELD_OUT, labels * hidden) == rows


def test_trials_of_a_short_run_take_a_twentieth_of_its_steps(job: object, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 1e-6)
    monkeypatch.setattr(sampler_trial, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    training = job.training.model_copy(update={"rounds": 400})
    candidates = tuple({"name": "uniform", "negatives": 5 + n} for n in range(4))
    _, trials = choose_sampler(job.model, job.data, training, candidates=candidates)
    half = PART_OF_RUN * training.steps / 2
    assert training.steps == 400 * 10
    assert [trial.steps for trial in trials[:FINALISTS]] == pytest.approx([half / 2] * FINALISTS, abs=1)
    assert [trial.steps for trial in trials[FINALISTS:]] == pytest.approx([half / 4] * 2, abs=1)


def test_a_job_is_settled_once_and_resumed_with_what_it_began_with(
    job: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idletrain.run import settle

    monkeypatch.setattr(sampler_trial, "TRIAL_SECONDS", 0.2)
    monkeypatch.setattr(sampler_trial, "SAMPLER_CANDIDATES", ({"name": "uniform", "negatives": 7},))
    settled = settle(job)
    assert settled.model.args["sampler"] == {"name": "uniform", "negatives": 7}
    assert settle(settled) is settled
    job.run_dir.mkdir(parents=True)
    started = settled.model_copy(
        update={"model": settled.model.model_copy(update={"args": {**settled.model.args, "sampler": "dwta"}})}
    )
    (job.run_dir / "job.json").write_text(started.model_dump_json())
    (job.run_dir / "wal").touch()
    assert settle(job).model.args["sampler"] == "dwta"


def test_state_that_does_not_travel_begins_at_zero_in_a_trial_too(job: object) -> None:
    optimizer = job.training.optimizer.model_copy(update={"state": "reset"})
    training = job.training.model_copy(update={"optimizer": optimizer})
    _, (tried,) = choose_sampler(job.model, job.data, training, seconds=0.1, candidates=("uniform",))
    assert tried.steps > 0


def test_too_few_rows_to_hold_some_out_are_refused(job: object, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("4 60 50\n" + "1 1:1\n" * 4)
    with pytest.raises(JobError, match="sampler: auto needs 5 rows or more"):
        choose_sampler(job.model, job.data, job.training, seconds=0.1)


def test_a_candidate_that_diverges_is_left_out(job: object, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1)
    monkeypatch.setattr(sampler_trial, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    training = job.training.model_copy(update={"optimizer": OptimizerSettings(name="sgd", lr=1e30)})
    candidates = ("uniform", {"name": "simhash", "k": 3, "tables": 4})
    chosen, trials = choose_sampler(job.model, job.data, training, seconds=100, candidates=candidates)
    assert chosen == "uniform"
    assert [t.sampler for t in trials] == ["uniform"]


def test_a_candidate_whose_tables_do_not_fit_is_left_out(job: object) -> None:
    args = {**job.model.args, "most_table_bytes": 1}
    model = job.model.model_copy(update={"args": args})
    chosen, trials = choose_sampler(model, job.data, job.training, seconds=0.2, candidates=("uniform", "simhash"))
    assert chosen == "uniform"
    assert len(trials) == 1
