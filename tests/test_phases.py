"""Phases: what a job leaves out of them, and which batch each subnet of them takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.errors import JobError
from idletrain.job import Job, TrainingSettings
from idletrain.job_file import parse_job
from idletrain.phases import PhaseSettings, batch_number, in_order

PHASES = st.lists(
    st.builds(PhaseSettings, rounds=st.integers(1, 4), subnets=st.integers(1, 5), local_steps=st.integers(1, 4)),
    min_size=1,
    max_size=4,
)


def job(**training: Any) -> Job:
    model = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}}
    return parse_job({"name": "t", "model": model, "data": {"name": "digits"}, "training": training})


@given(PHASES)
def test_every_batch_is_taken_once_in_the_order_of_steps_and_subnets(given: list[PhaseSettings]) -> None:
    phases = list(in_order(given, 4, 1, 50))
    taken = [
        batch_number(phases, subnet, phase.steps_before(round_) + step)
        for phase in phases
        for round_ in range(phase.first_round, phase.first_round + phase.rounds)
        for step in range(phase.local_steps)
        for subnet in range(phase.subnets)
    ]
    assert taken == list(range(sum(p.rounds * p.subnets * p.local_steps for p in phases)))


def test_a_phase_takes_from_training_what_it_leaves_out() -> None:
    training = job(subnets=6, copies=2, local_steps=7, phases=[{"rounds": 3}, {"rounds": 2, "subnets": 3}]).training
    found = [(p.number, p.first_round, p.subnets, p.copies, p.local_steps, p.first_step) for p in training.every_phase]
    assert found == [(1, 0, 6, 2, 7, 0), (2, 3, 3, 2, 7, 21)]
    assert (training.rounds, training.steps) == (5, 35)
    assert [training.phase(round_).number for round_ in range(7)] == [1, 1, 1, 2, 2, 2, 2]
    assert training.every_phase[1].equal_shares == (2 / 3,) * 3


def test_without_phases_there_is_one_of_all_rounds() -> None:
    (phase,) = TrainingSettings(subnets=3, rounds=9, local_steps=2).every_phase
    assert (phase.rounds, phase.subnets, phase.copies, phase.local_steps) == (9, 3, 1, 2)


@pytest.mark.parametrize(
    ("subnets", "rounds", "expected"),
    [
        ({"start": 8, "end": 2}, 90, [(30, 8), (30, 4), (30, 2)]),
        ({"start": 8, "end": 1}, 10, [(2, 8), (3, 4), (2, 2), (3, 1)]),
        ({"start": 3, "end": 3}, 5, [(5, 3)]),
    ],
)
def test_a_range_is_phases_of_half_as_many_subnets_each(
    subnets: dict[str, int], rounds: int, expected: list[tuple[int, int]]
) -> None:
    training = job(subnets=subnets, rounds=rounds).training
    assert [(phase.rounds, phase.subnets) for phase in training.phases] == expected
    assert (training.rounds, training.subnets) == (rounds, subnets["start"])
    again = Job.model_validate_json(job(subnets=subnets, rounds=rounds).model_dump_json())
    assert again.training == training


@pytest.mark.parametrize(
    "training",
    [
        {"subnets": {"start": 8, "end": 3}},
        {"subnets": {"start": 2, "end": 8}},
        {"subnets": {"start": 8, "end": 1}, "rounds": 3},
        {"subnets": {"start": 8}},
        {"subnets": {"start": "8", "end": 2}},
        {"subnets": {"start": 8, "end": 2}, "phases": [{"rounds": 3}]},
    ],
    ids=str,
)
def test_a_range_that_is_no_phases_is_refused_with_one_sentence(training: dict[str, Any]) -> None:
    with pytest.raises(JobError) as refused:
        job(**training)
    (fault,) = refused.value.faults
    assert fault.startswith("training.subnets: {'start': ")
    assert "should be a number, or a range such as {start: 8, end: 2}" in fault


@pytest.mark.parametrize(
    ("training", "fault"),
    [
        (
            {"phases": [{"rounds": 3}, {"rounds": 4}], "rounds": 8},
            "training.phases: have 7 rounds, and training.rounds is 8; leave rounds out",
        ),
        (
            {"phases": [{"rounds": 3}, {"rounds": 4, "subnets": 2, "copies": 3}]},
            "training.phases: phase 2 has 3 copies of 2 subnets, too many",
        ),
        (
            {"phases": [{"rounds": 3, "subnets": 2}], "copies": 3},
            "training.phases: phase 1 has 3 copies of 2 subnets, too many",
        ),
        (
            {"subnets": {"start": 4, "end": 2}, "epochs": 2},
            "training.epochs: phases, or a range of subnets, say how many rounds there are; leave one of the two out",
        ),
        (
            {"phases": [{"rounds": 3}], "epochs": 2},
            "training.epochs: phases, or a range of subnets, say how many rounds there are; leave one of the two out",
        ),
        (
            {"phases": [{"rounds": 3, "copies": 2}], "method": "local-sgd"},
            "training.copies: local-sgd has one of the network for each subnet; leave it out, or use method: ist",
        ),
        (
            {"phases": [{"rounds": 3}], "finish_whole": 0.2},
            "training.finish_whole: training.phases say how the last rounds divide the network; leave one out",
        ),
        (
            {"finish_whole": 0.2, "method": "local-sgd"},
            "training.finish_whole: local-sgd trains the whole network in all rounds; leave it out, or use method: ist",
        ),
        ({"phases": [{"subnets": 3}]}, "training.phases.0.rounds: is missing; add it"),
        ({"phases": [{"rounds": 0}]}, "training.phases.0.rounds: 0 should be greater than or equal to 1"),
    ],
    ids=str,
)
def test_phases_that_do_not_add_up_are_refused_with_one_sentence(training: dict[str, Any], fault: str) -> None:
    with pytest.raises(JobError) as refused:
        job(**training)
    assert list(refused.value.faults) == [fault]


@pytest.mark.parametrize(
    ("share", "rounds", "expected"),
    [(0.2, 10, [8, 2]), (0.9, 3, [1, 2]), (0.01, 3, [2, 1]), (0.5, 2, [1, 1]), (0.3, 1, [1]), (0.99, 50, [1, 49])],
)
def test_a_share_of_rounds_at_the_end_trains_whole_networks(share: float, rounds: int, expected: list[int]) -> None:
    phases = job(finish_whole=share, rounds=rounds, local_steps=7).training.every_phase
    assert [phase.rounds for phase in phases] == expected
    assert [(phase.subnets, phase.local_steps) for phase in phases] == [(4, 7)] * len(expected)
    assert [phase.averages_whole_networks for phase in phases] == [False, True][-len(expected) :]


def test_whole_networks_at_the_end_follow_the_rounds_that_epochs_are() -> None:
    training = job(finish_whole=0.2, epochs=2).training.model_copy(update={"rounds": 20})
    assert [phase.rounds for phase in training.every_phase] == [16, 4]


def test_local_sgd_in_place_of_a_method_that_does_not_suit_has_no_copies_in_any_phase() -> None:
    assert not job(finish_whole=0.2).training.as_local_sgd().finish_whole
    training = job(phases=[{"rounds": 3, "copies": 2}, {"rounds": 1, "subnets": 2}]).training.as_local_sgd()
    assert (training.method, training.instead_of, training.rounds) == ("local-sgd", "ist", 4)
    assert [(phase.subnets, phase.copies) for phase in training.every_phase] == [(4, 1), (2, 1)]
