"""What a short trial teaches about settings, before a run takes them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from idletrain.autotune import choose, forecast, learning_trial, step_time
from idletrain.autotune.forecast import AutotuneChoice, RoundForecast, TrainingOption
from idletrain.autotune.learning_trial import Candidate, TrialResult
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.prepare import from_settings

from .test_forecast import FLEET


def job(rounds: int = 200, **training: Any) -> Job:
    return parse_job(
        {
            "name": "t",
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
            "data": {"name": "digits"},
            "training": {"batch_size": 32, "rounds": rounds, **training},
        }
    )


def candidate(method: str, round_seconds: float = 0.1, step_seconds: float = 0.001, **training: Any) -> Candidate:
    settings = job(method=method, local_steps=20, **training)
    option = TrainingOption(method, settings.training.subnets, "fp32", "fp32", 1, 1, 1, step_seconds)
    expected = RoundForecast(0.0, round_seconds, 0.0, 0.0)
    prepared = from_settings(settings.model, settings.data, settings.training, settings.memory)
    return Candidate(AutotuneChoice(option, 20, expected, ("a reason",)), prepared)


def result(method: str, loss: float) -> TrialResult:
    return TrialResult(candidate(method), 3, loss)


def test_trials_take_a_fiftieth_of_the_run_s_time_and_equal_times_of_the_forecast() -> None:
    slow, quick = candidate("local-sgd", round_seconds=0.2), candidate("ist", round_seconds=0.1)
    seconds = learning_trial.comparison_seconds([quick, slow], rounds=1000)
    assert slow.rounds_in(seconds) == pytest.approx(quick.rounds_in(seconds) / 2, abs=1)
    spent = sum(c.rounds_in(seconds) * c.computation for c in (quick, slow))
    assert spent == pytest.approx(0.02 * 1000 * 0.1, rel=0.1)


def test_no_run_is_tried_for_more_than_a_minute() -> None:
    both = [candidate("ist", round_seconds=10, step_seconds=0.1), candidate("local-sgd", 10, 0.1)]
    seconds = learning_trial.comparison_seconds(both, rounds=10**6)
    assert sum(c.rounds_in(seconds) * c.computation for c in both) <= 60 + 2 * both[0].computation


@pytest.mark.parametrize(("ahead", "chosen"), [(0.5, "local-sgd"), (1.9, "local-sgd"), (2.1, "ist")])
def test_a_run_too_short_for_a_trial_takes_ist_only_where_it_is_forecast_to_be_far_ahead(
    ahead: float, chosen: str
) -> None:
    whole, said = candidate("local-sgd"), list[str]()
    equal = candidate("ist").choice.progress / whole.choice.progress
    cut = candidate("ist", round_seconds=0.1 * equal / ahead)
    choice, why = learning_trial.pick([cut, whole], 5, said.append)
    assert choice.option.method == chosen
    assert "too short" in why
    assert f"{ahead:.2g} times as fast as local-sgd" in why
    assert said == []


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ((0.50, 0.50), "ist"),
        ((0.505, 0.50), "ist"),  # within two per cent
        ((0.52, 0.50), "local-sgd"),
        ((math.inf, 0.50), "local-sgd"),
        ((0.50, math.inf), "ist"),
        ((math.inf, math.inf), "ist"),
    ],
)
def test_ist_is_taken_unless_local_sgd_learns_more_in_the_same_time(losses: tuple[float, float], chosen: str) -> None:
    results = [result("ist", losses[0]), result("local-sgd", losses[1])]
    assert learning_trial.best_result(results).candidate.choice.option.method == chosen


def finishing(of: Candidate, whole: Candidate) -> Candidate:
    finished = forecast.finished_whole(of.choice, [whole.choice.option], FLEET)
    assert finished is not None
    return replace(of, choice=finished)


def test_rounds_of_whole_networks_at_the_end_count_with_the_time_that_they_take() -> None:
    plain, whole = candidate("ist"), candidate("local-sgd", step_seconds=0.003)
    last = finishing(plain, whole)
    assert last.choice.finish is not None
    assert last.choice.finish.option.subnets == plain.choice.option.subnets
    assert last.choice.round_seconds == pytest.approx(0.8 * 0.1 + 0.2 * last.choice.finish.expected.round)
    assert last.computation == pytest.approx(plain.computation * (0.8 + 0.2 * 3))
    assert forecast.training_settings(last.choice)["finish_whole"] == 0.2
    assert forecast.finished_whole(plain.choice, [replace(whole.choice.option, push="int8")], FLEET) is None


def test_a_trial_of_whole_networks_at_the_end_has_them_in_its_last_fifth_and_the_run_s_steps() -> None:
    last = finishing(candidate("ist"), candidate("local-sgd"))
    training = last.program(20).training
    assert [(phase.first_round, phase.copies) for phase in training.every_phase] == [(0, 1), (16, 4)]
    assert training.steps == last.prepared.program.training.steps
    assert last.program(5).training.phase(4).averages_whole_networks


def test_whole_networks_at_the_end_are_left_out_where_they_make_a_run_too_long() -> None:
    plain = candidate("ist")
    for step_seconds, fits in ((0.016, True), (0.019, False)):  # a fifth of the rounds takes 3.4 and 4 times as long
        whole = replace(candidate("local-sgd").choice.option, step_seconds=step_seconds)
        assert (forecast.finished_whole(plain.choice, [whole], FLEET) is not None) is fits


def test_a_trial_of_few_rounds_has_no_whole_network_at_its_end() -> None:
    last = finishing(candidate("ist"), candidate("local-sgd"))
    assert not last.program(2).training.listed_phases
    assert last.program(3).training.listed_phases


def test_a_trial_trains_as_a_run_does_without_the_held_out_samples() -> None:
    own = candidate("ist", step_seconds=1.0, copies=2)
    drawn: list[int] = []
    program = own.prepared.program
    opened = program.source.open()

    class Watched:
        def __len__(self) -> int:
            return len(opened)

        def batch(self, index: Any) -> Any:
            drawn.extend(index.tolist()) if torch.is_grad_enabled() else None
            return opened.batch(index)

        def open(self) -> Any:
            return self

    watched = replace(own, prepared=replace(own.prepared, program=replace(program, source=Watched())))
    (tried,) = learning_trial.try_candidates([watched], 40 * 0.1)
    assert tried.rounds == 40 * 10
    assert tried.loss < 1.0  # 2.3 without training
    assert len(set(drawn)) == len(opened) - len(opened) // 10
    assert len(drawn) == 40 * 4 * 20 * 32
    assert program.subnets(0, by_neurons(program.training.phase(0).equal_shares, 2))[0].parameters > 0


def test_a_trial_whose_steps_take_much_longer_than_forecast_is_given_up() -> None:
    (tried,) = learning_trial.try_candidates([candidate("ist", step_seconds=1e-9)], 1e4)
    assert tried.loss == math.inf


def test_settings_that_diverge_are_left_for_local_sgd() -> None:
    diverging = candidate("ist", step_seconds=0.1, optimizer={"name": "sgd", "lr": 1e6})
    sound = candidate("local-sgd", step_seconds=0.1, optimizer={"name": "sgd", "lr": 0.05})
    said: list[str] = []
    choice, why = learning_trial.pick([diverging, sound], 100_000, said.append)
    assert choice is sound.choice
    assert "ist: inf" in why
    assert [line.split(" for ")[0] for line in said] == ["trying ist and local-sgd"]


def test_a_job_that_leaves_the_method_open_is_tried_where_a_run_begins_and_told_of_in_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_forecast(option: TrainingOption, steps: int, fleet: forecast.FleetFigures) -> float:
        del steps, fleet
        return 2.0 if option.method == "ist" else 1.0

    monkeypatch.setattr(forecast, "progress", by_forecast)
    monkeypatch.setattr(step_time, "times_longer", lambda *_: 1.2)
    monkeypatch.setattr(
        learning_trial,
        "try_candidates",
        lambda candidates, _: [TrialResult(c, 3, loss) for c, loss in zip(candidates, losses, strict=True)],
    )
    losses = [0.9, 0.8, 0.5]
    said: list[str] = []
    decided, choice = choose.choose_settings(job(rounds=5000), FLEET, said.append)
    assert decided.training.method == choice.option.method == "local-sgd"
    assert "held-out loss" in choice.why[0]
    assert said
    losses[:] = [0.4, 0.45, 0.5]
    decided, choice = choose.choose_settings(job(rounds=5000), FLEET, said.append)
    assert (decided.training.method, decided.training.copies, decided.training.finish_whole) == ("ist", 1, 0.2)
    assert choose.choice_lines(choice)[1].startswith("  then expected ")
    assert choice.why[-1].startswith("the last 20% of the rounds train whole networks, which takes ")
    decided, _ = choose.choose_settings(job(rounds=5000, finish_whole=0.0), FLEET, said.append)
    assert (decided.training.method, decided.training.finish_whole) == ("ist", 0.0)
    planned, choice = choose.choose_settings(job(rounds=5000), FLEET)
    assert planned.training.method == "ist"
    tried = "ist with its last 20% whole, ist in 2 copies with its last 20% whole and local-sgd"
    assert f"first tries {tried} for" in choice.why[0]
    losses[:] = [0.45, 0.4, 0.5]
    decided, choice = choose.choose_settings(job(rounds=5000), FLEET, said.append)
    assert (decided.training.method, decided.training.copies, decided.training.finish_whole) == ("ist", 2, 0.2)
    assert any(reason.startswith("every neuron is in 2 subnets of a round, which takes ") for reason in choice.why)
    losses[:] = [0.45, 0.5]
    for given in ({"copies": 3, "method": "ist"}, {"subnets": 2}):
        decided, choice = choose.choose_settings(job(rounds=5000, **given), FLEET, said.append)
        assert decided.training.copies == given.get("copies", 1)


def test_a_trial_of_three_that_is_too_short_leaves_the_one_in_copies_out() -> None:
    three = [candidate("ist"), candidate("ist", copies=2), candidate("local-sgd")]
    rounds = next(n for n in range(1, 10_000) if learning_trial.comparison_seconds([three[0], three[2]], n))
    assert not learning_trial.comparison_seconds(three, rounds)
    _, why = learning_trial.pick(three, rounds, None)
    assert "first tries ist and local-sgd for" in why
