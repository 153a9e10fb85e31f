"""What is chosen of what a job leaves open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from idletrain.autotune import choose, forecast
from idletrain.errors import JobError
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.memory import subnet_need
from idletrain.nn.prepare import Prepared, from_settings, prepare_job

from .test_forecast import FLEET, LOOPBACK


def job(**training: Any) -> Job:
    return parse_job(
        {
            "name": "t",
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
            "data": {"name": "digits"},
            "training": training,
        }
    )


def test_what_the_job_says_stays_and_its_rounds_are_foreseen() -> None:
    given_job = job(method="ist", subnets=2, local_steps=7)
    decided, choice = choose.choose_settings(given_job, FLEET)
    assert decided == given_job
    assert (choice.option.subnets, choice.local_steps) == (2, 7)
    assert choice.expected.round > 0


def test_steps_that_nodes_were_timed_at_are_taken() -> None:
    timed = replace(FLEET, step_seconds={forecast.option_key("ist", 2): 123.0})
    _, choice = choose.choose_settings(job(method="ist", subnets=2, local_steps=7), timed)
    assert choice.expected.compute == 7 * 123.0


def test_a_network_is_prepared_once_for_each_settings_of_training() -> None:
    calls: list[str] = []

    def prepare(of: Job) -> Prepared:
        calls.append(of.training.method)
        return prepare_job(of)

    remembered = choose.remembering(prepare)
    first = remembered(job(method="ist", subnets=2))
    assert remembered(job(method="ist", subnets=2)) is first
    assert remembered(job(method="local-sgd", subnets=2)).program.training.method == "local-sgd"
    assert calls == ["ist", "local-sgd"]
    choose.choose_settings(job(), FLEET, None, remembered)
    tried = len(calls)
    choose.choose_settings(job(), FLEET, None, remembered)
    assert len(calls) == tried > 2


def test_what_it_leaves_open_is_chosen_for_the_fleet() -> None:
    decided, choice = choose.choose_settings(job(), FLEET)
    training = decided.training
    assert (training.method, training.subnets) == (choice.option.method, choice.option.subnets)
    assert training.local_steps == choice.local_steps
    assert (training.exchange.pull, training.exchange.push) == (choice.option.pull, choice.option.push)
    assert {"method", "subnets", "local_steps", "exchange"} <= training.model_fields_set


def test_part_of_it_may_be_said() -> None:
    decided, _ = choose.choose_settings(job(method="ist", exchange={"pull": "bf16"}), LOOPBACK)
    assert decided.training.method == "ist"
    assert decided.training.subnets in (8, 16)
    assert (decided.training.exchange.pull, decided.training.exchange.push) == ("bf16", "fp32")


def test_a_job_that_went_to_another_machine_as_plain_values_leaves_the_same_open() -> None:
    keys = {variant.key for variant in choose.variants(job(), 2, 1 << 30)}
    assert {variant.key for variant in choose.variants(parse_job(job().as_tree()), 2, 1 << 30)} == keys
    assert len({key.split()[0] for key in keys}) == 2


def test_a_network_that_is_to_be_cut_by_depth_is_not_trained_whole() -> None:
    model = {"factory": "tests.chaos.residual_network:build", "split": "blocks"}
    by_depth = parse_job({"name": "t", "model": model, "data": {"name": "digits"}})
    programs = [variant.prepared.program for variant in choose.variants(by_depth, 2, 1 << 30)]
    assert [(len(p.layout.skippable), p.training.method, p.training.subnets) for p in programs] == [
        (5, "ist", 2),
        (5, "ist", 4),
    ]


def test_very_wide_outputs_and_lockstep_are_left_alone() -> None:
    assert not choose.leaves_open(job(loss="sampled_softmax"))
    assert not choose.leaves_open(job(mode="lockstep", subnets=2))
    assert choose.leaves_open(job(method="ist", subnets=2))
    assert not choose.leaves_open(job(method="ist", subnets=2, local_steps=3))


def test_a_network_too_large_for_a_node_is_cut() -> None:
    decided, _ = choose.choose_settings(job(), replace(FLEET, memory_bytes=1))
    assert decided.training.method == "ist"


def test_what_has_no_room_for_codes_travels_as_it_is() -> None:
    given_job = job(method="ist", subnets=2)
    wide = given_job.model.model_copy(update={"args": {"widths": [64, 512, 512, 10]}})
    given_job = given_job.model_copy(update={"model": wide})
    slow = replace(FLEET, down=1e3, up=1e3, down_all=1e3, up_all=1e3)
    assert choose.choose_settings(given_job, slow)[0].training.exchange.push != "fp32"
    program = from_settings(given_job.model, given_job.data, given_job.training).program
    assert (
        choose.choose_settings(given_job, replace(slow, memory_bytes=subnet_need(program)(0.5)))[
            0
        ].training.exchange.push
        == "fp32"
    )


def test_a_job_that_fits_in_no_way_is_a_sentence() -> None:
    with pytest.raises(JobError, match=r"training\.copies: 3 is more than training\.subnets: 2"):
        choose.choose_settings(job(method="ist", subnets=2, copies=3), FLEET)


def test_a_choice_is_reported_in_lines() -> None:
    _, choice = choose.choose_settings(job(), FLEET)
    first, *why = choose.choice_lines(choice)
    assert first.startswith("expected ")
    for part in ("pull", "compute", "push", "commit"):
        assert f"s {part}" in first
    assert len(why) >= 3


def test_ist_is_no_choice_for_a_model_that_has_nothing_to_split() -> None:
    one_layer = job().model_copy(update={"model": job().model.model_copy(update={"args": {"widths": [64, 10]}})})
    assert {variant.key for variant in choose.variants(one_layer, 2, 1 << 30)} == {forecast.option_key("local-sgd", 2)}
    decided, _ = choose.choose_settings(one_layer, FLEET)
    assert decided.training.method == "local-sgd"
