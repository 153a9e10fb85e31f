"""What a round will take, and which settings get on fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.autotune import forecast
from idletrain.autotune.forecast import FleetFigures, TrainingOption
from idletrain.observe import record_fields

FLEET = FleetFigures(
    nodes=8,
    down=12e6,
    up=12e6,
    down_all=12e6,
    up_all=12e6,
    call_seconds=0.01,
    commit_bytes_per_second=5e8,
    memory_bytes=1 << 30,
)
LOOPBACK = replace(FLEET, down=2e9, up=2e9, down_all=2e9, up_all=2e9)
fleets = st.builds(
    FleetFigures,
    st.integers(1, 64),
    *(st.floats(1e4, 1e10) for _ in range(4)),
    st.floats(1e-4, 1),
    st.floats(1e6, 1e10),
    st.just(1 << 30),
)
sizes = st.integers(4, 10**9)


@st.composite
def options(draw: st.DrawFn) -> TrainingOption:
    plain = draw(sizes)
    kinds = draw(st.sampled_from(forecast.WIRES))
    return TrainingOption(
        draw(st.sampled_from(["ist", "local-sgd"])),
        draw(st.integers(1, 128)),
        *kinds,
        draw(st.integers(1, plain)),
        draw(st.integers(1, plain)),
        plain,
        draw(st.floats(1e-5, 10)),
    )


def ist(subnets: int = 8, size: int = 2_640_000, step: float = 0.02) -> TrainingOption:
    return TrainingOption("ist", subnets, "fp32", "fp32", size, size, size, step)


def whole(size: int = 80_000_000, step: float = 0.2, nodes: int = 8) -> TrainingOption:
    return TrainingOption("local-sgd", nodes, "fp32", "fp32", size, size, size, step)


def test_a_round_by_hand() -> None:
    round_forecast = forecast.forecast_round(ist(size=1_200_000, step=0.01), 50, FLEET)
    assert round_forecast.compute == pytest.approx(0.5)
    assert round_forecast.pull == round_forecast.push == pytest.approx((8 * 0.1 + 2 * 0.1 + 0.01) / 2)  # two at once
    assert round_forecast.commit == pytest.approx(8 * 1.2e6 / 5e8 + 0.01)
    assert round_forecast.round == pytest.approx(1.01 + 0.5 + 0.0292)
    assert round_forecast.as_record().keys() == {"pull", "compute", "push", "commit"}


def test_nodes_with_slow_links_move_all_at_once() -> None:
    slow = forecast.forecast_round(ist(size=1_200_000), 50, replace(FLEET, down=1.5e6, up=1.5e6))
    assert slow.pull + slow.push == pytest.approx(0.8 + 0.8 + 0.01)


def test_nodes_that_share_a_processor_end_together_and_others_wait_for_the_slowest() -> None:
    assert forecast.slowest([("mine", 0.1), ("yours", 0.3)]) == 0.3
    # Of 1,000 steps each, the one is done after 100 s and the other has 667 left: 50 s at 13.3 a second.
    assert forecast.slowest([("ours", 0.1), ("ours", 0.3)]) == pytest.approx(0.15)
    assert forecast.slowest([("ours", 0.1), ("ours", 0.3), ("theirs", 0.2)]) == 0.2


def test_nodes_that_share_a_machine_make_each_other_slow() -> None:
    measured = replace(FLEET, step_seconds={forecast.option_key("ist", 8): 0.02})
    assert measured.sharing_cores(2.0) == replace(measured, step_seconds={"ist 8": 0.04})


def test_with_twice_as_many_subnets_pulls_and_pushes_hide_behind_compute() -> None:
    once, twice = (forecast.forecast_round(ist(n, size=120_000, step=0.02), 50, FLEET) for n in (8, 16))
    assert twice.compute == 2 * once.compute
    assert (twice.pull, twice.push) == (once.pull, once.push)


def test_what_does_not_hide_counts() -> None:
    once, twice = (forecast.forecast_round(ist(n, size=12_000_000, step=0.001), 10, FLEET) for n in (8, 16))
    assert twice.pull + twice.push == pytest.approx(once.pull + once.push + 8 * 12e6 / 12e6 - once.compute)


@given(options(), st.integers(1, 200), fleets)
def test_a_round_takes_time_and_a_quicker_link_never_more(
    option: TrainingOption, steps: int, fleet: FleetFigures
) -> None:
    slow = forecast.forecast_round(option, steps, fleet)
    links = {name: 2 * getattr(fleet, name) for name in ("down", "up", "down_all", "up_all")}
    quick = forecast.forecast_round(option, steps, replace(fleet, **links))
    assert all(getattr(slow, part) > 0 for part in record_fields.ROUND_PARTS)
    assert quick.round <= slow.round * (1 + 1e-9)


@given(options(), fleets)
def test_the_fewest_steps_that_are_enough_are_taken(option: TrainingOption, fleet: FleetFigures) -> None:
    steps = forecast.min_steps(option, fleet, forecast.TRIED_STEPS)
    share = forecast.forecast_round(option, steps, fleet).exchange_share
    least, most = forecast.LEAST_STEPS[option.method], forecast.MOST_STEPS[option.method]
    assert least <= steps <= most
    assert share <= forecast.AMORTISED or steps == most
    fewer = [s for s in forecast.TRIED_STEPS if least <= s < steps]
    assert all(forecast.forecast_round(option, s, fleet).exchange_share > forecast.AMORTISED for s in fewer)


@given(st.lists(options(), min_size=1, max_size=5), fleets)
def test_nothing_left_out_is_worth_much_more_than_the_choice(
    several: list[TrainingOption], fleet: FleetFigures
) -> None:
    choice = forecast.choose_option(several, fleet)
    mine = forecast.progress(choice.option, choice.local_steps, fleet)
    best = max(forecast.progress(o, forecast.min_steps(o, fleet, forecast.TRIED_STEPS), fleet) for o in several)
    assert best <= forecast.WORTH * mine * (1 + 1e-9)
    assert choice.why


def test_wide_layers_over_slow_links_are_cut() -> None:
    choice = forecast.choose_option([whole(), ist()], FLEET)
    assert choice.option.method == "ist"
    assert choice.local_steps == 100
    assert any("local-sgd 0." in reason for reason in choice.why)


def test_more_subnets_than_nodes_have_to_be_worth_the_rounds_that_they_take() -> None:
    """A step of half the width takes half the time at best: then a round is as long, and learns less."""
    eight, sixteen = ist(8, 2_640_000, 0.02), ist(16, 1_000_000, 0.01)
    assert forecast.forecast_round(sixteen, 100, FLEET).round < forecast.forecast_round(eight, 100, FLEET).round
    assert forecast.choose_option([eight, sixteen], FLEET).option.subnets == 8


def test_over_fast_links_whole_networks_are_averaged() -> None:
    choice = forecast.choose_option([whole(8_000_000, 0.08), ist(8, 260_000, 0.02)], LOOPBACK)
    assert choice.option.method == "local-sgd"
    assert choice.local_steps <= 10


def test_the_more_local_steps_that_subnets_take_let_them_win_where_both_are_about_as_good() -> None:
    """Whole networks exchange after 10 steps here, subnets after 25, so that their exchange is a smaller part."""
    choice = forecast.choose_option([whole(8_000_000, 0.1), ist(8, 260_000, 0.02)], LOOPBACK)
    assert (choice.option.method, choice.local_steps) == ("ist", 25)


def test_where_the_exchange_is_next_to_nothing_it_happens_at_every_step() -> None:
    choice = forecast.choose_option([whole(40_000, 1.0)], LOOPBACK)
    assert (choice.name, choice.local_steps) == ("data parallel", 1)


def test_subnets_settle_before_they_are_cut_again_however_fast_the_link_is() -> None:
    assert forecast.choose_option([ist(size=40_000, step=1.0)], LOOPBACK).local_steps == forecast.LEAST_STEPS["ist"]
    assert forecast.choose_option([ist(size=40_000, step=1.0)], LOOPBACK, (7,)).local_steps == 7


def test_codes_are_taken_where_the_link_is_what_counts() -> None:
    plain = ist(8, 24_000_000, 0.005)
    coded = replace(plain, pull="int8", push="int4", down_bytes=6_100_000, up_bytes=3_100_000)
    assert forecast.choose_option([plain, coded], FLEET).option.push == "int4"
    assert forecast.choose_option([plain, coded], LOOPBACK).option.push == "fp32"


def test_reasons_are_of_what_was_compared() -> None:
    plain = ist(8, 24_000_000, 0.005)
    coded = replace(plain, pull="int8", push="int4", down_bytes=6_100_000, up_bytes=3_100_000)
    assert forecast.choose_option([plain, coded], LOOPBACK).why[-1].endswith("encoding them would save too little")
    assert forecast.choose_option([plain, coded], FLEET).why[-1].endswith("fewer bytes on a slow link")
    for only in (plain, coded):
        assert forecast.choose_option([only], FLEET).why[-1].endswith("the job or the memory allows no other")


def test_what_the_job_says_of_local_steps_is_kept() -> None:
    assert forecast.choose_option([ist()], FLEET, (7,)).local_steps == 7
    assert forecast.choose_option([whole()], FLEET, (500,)).local_steps == 500


def test_a_choice_is_settings_of_a_job() -> None:
    choice = forecast.choose_option([ist()], FLEET)
    assert forecast.training_settings(choice) == {
        "method": "ist",
        "subnets": 8,
        "copies": 1,
        "local_steps": choice.local_steps,
        "finish_whole": 0.0,
        "exchange": {"pull": "fp32", "push": "fp32"},
    }
