"""The width of each subnet."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.errors import RunError
from idletrain.phases import TrainingPhase
from idletrain.quantities import steady
from idletrain.rounds.widths import Capacity, OutOfCoreCosts, equal_shares, shares, shares_of_phase

MIB = 1 << 20
ROOMY = 1 << 40


def need(share: float) -> int:
    """100 MiB for the whole network and 1 MiB in any case."""
    return MIB + int(100 * MIB * share)


def test_equal_workers_get_equal_shares() -> None:
    assert shares([Capacity(ROOMY, 7.0)] * 4, 4, need, 64) == (0.25,) * 4


def test_a_worker_of_half_the_speed_gets_half_the_width() -> None:
    fast, slow = Capacity(ROOMY, 10.0), Capacity(ROOMY, 5.0)
    assert shares([fast, slow], 2, need, 64) == pytest.approx((2 / 3, 1 / 3))


def test_speeds_that_differ_by_noise_count_as_equal() -> None:
    assert shares([Capacity(ROOMY, 10.0), Capacity(ROOMY, 8.0)], 2, need, 64) == (0.5, 0.5)


def test_a_worker_with_two_turns_gets_half_the_width_twice() -> None:
    assert shares([Capacity(ROOMY, 1.0)] * 2, 3, need, 64) == pytest.approx((0.25, 0.5, 0.25))


def test_the_rest_of_a_small_worker_s_share_goes_to_the_others() -> None:
    result = shares([Capacity(ROOMY, 1.0), Capacity(ROOMY, 1.0), Capacity(12 * MIB, 1.0)], 3, need, 64)
    assert result == pytest.approx((0.45, 0.45, 0.1), abs=1e-6)  # 11 MiB of the 12 are planned with


def test_a_fleet_that_is_too_small_covers_part_of_the_network() -> None:
    result = shares([Capacity(12 * MIB, 1.0)] * 4, 4, need, 64)
    assert result == pytest.approx((0.1,) * 4, abs=1e-6)


@given(st.integers(1 << 20, 1 << 45))
def test_memory_is_rounded_down(memory: int) -> None:
    assert memory * 0.87 <= steady(memory) <= memory * 0.94


def test_a_worker_with_a_little_less_can_take_another_s_place_and_changes_nothing() -> None:
    had, has = 763 * MIB, 762 * MIB

    def large(share: float) -> int:
        return 50 * need(share)

    planned = shares([Capacity(had, 1.0)] * 4, 4, large, 64)
    assert planned == shares([Capacity(has, 1.0)] * 4, 4, large, 64)
    assert max(large(share) for share in planned) <= has


def test_a_worker_that_cannot_hold_the_narrowest_subnet_is_dealt_none() -> None:
    roomy = Capacity(ROOMY, 1.0)
    assert shares([roomy, Capacity(MIB, 9.0), roomy], 4, need, 64) == shares([roomy, roomy], 4, need, 64)


def test_a_fleet_that_cannot_hold_the_narrowest_subnet_is_refused_with_advice() -> None:
    with pytest.raises(RunError, match=r"narrowest subnet needs 2 MiB and the largest.* 1 MiB.*smaller training.batch"):
        shares([Capacity(MIB, 1.0)] * 2, 1, need, 64)


def test_local_sgd_needs_one_worker_that_holds_the_whole_network() -> None:
    assert shares([Capacity(MIB, 1.0), Capacity(101 * MIB, 1.0)], 2, need, 1) == (0.5, 0.5)
    with pytest.raises(RunError, match=r"whole network needs 101 MiB.*largest has 100 MiB.*use training.method: ist"):
        shares([Capacity(100 * MIB, 1.0)], 2, need, 1)


CAPACITIES = st.builds(Capacity, st.integers(4 * MIB, 200 * MIB), st.floats(0.1, 1e4))


@settings(deadline=None, max_examples=150)
@given(st.lists(CAPACITIES, min_size=1, max_size=6), st.integers(1, 12))
def test_shares_are_positive_fit_their_workers_and_add_up_to_at_most_one(workers: list[Capacity], subnets: int) -> None:
    result = shares(workers, subnets, need, 64)
    ranked = sorted(workers, key=lambda w: (-w.memory_bytes, -w.steps_per_second))
    assert len(result) == subnets
    assert sum(result) <= 1 + 1e-9
    for k, share in enumerate(result):
        assert share > 0
        assert need(share) <= ranked[k % len(ranked)].memory_bytes
    caps = sum(
        min(1.0, max(1 / 64, (steady(ranked[k % len(ranked)].memory_bytes) - MIB) / (100 * MIB)))
        for k in range(subnets)
    )
    assert sum(result) == pytest.approx(min(1.0, caps), abs=1e-5)
    assert shares(workers, subnets, need, 64) == result


def slower(share: float, memory_bytes: int) -> float:
    """A step takes a second for the whole network, and three times as long out of core."""
    return share * (1 if need(share) <= memory_bytes else 3)


HALF = OutOfCoreCosts(lambda share: need(share) // 2, slower)
SMALL = [Capacity(18 * MIB, 1.0)] * 4  # counts as 16 MiB: holds 15 % of the network in core, 31 % out of core


def test_narrower_subnets_are_taken_where_they_cover_the_network_sooner() -> None:
    assert shares(SMALL, 4, need, 64, HALF) == shares(SMALL, 4, need, 64)
    assert sum(shares(SMALL, 4, need, 64, HALF)) == pytest.approx(0.6, abs=1e-5)


def test_subnets_are_trained_out_of_core_where_that_is_sooner() -> None:
    quick = OutOfCoreCosts(HALF.least_bytes, lambda share, _memory: share**2)
    tiny = [Capacity(14 * MIB, 1.0)] * 4
    assert sum(shares(tiny, 4, need, 64)) == pytest.approx(0.48, abs=1e-5)
    assert shares(tiny, 4, need, 64, OutOfCoreCosts(HALF.least_bytes, lambda _share, _memory: 1.0)) == (0.25,) * 4
    assert shares(tiny, 4, need, 64, quick) != (0.25,) * 4  # a quarter of the width costs a sixteenth


def test_always_means_wherever_it_is_possible() -> None:
    always = OutOfCoreCosts(HALF.least_bytes, HALF.seconds, always=True)
    assert shares(SMALL, 4, need, 64, always) == (0.25,) * 4
    assert sum(shares([Capacity(8 * MIB, 1.0)] * 4, 4, need, 64, always)) < 1  # not even by plan


def test_what_fits_in_core_is_trained_there() -> None:
    assert shares([Capacity(ROOMY, 1.0)] * 4, 4, need, 64, HALF) == (0.25,) * 4


def test_a_worker_too_small_for_the_narrowest_in_core_may_do_out_of_core() -> None:
    odd = OutOfCoreCosts(lambda _share: 1, slower)
    assert shares([Capacity(MIB // 2, 1.0)] * 2, 2, need, 64, odd) == (0.5, 0.5)


def test_local_sgd_may_train_the_whole_network_out_of_core() -> None:
    assert shares([Capacity(60 * MIB, 1.0)] * 2, 2, need, 1, HALF) == (0.5, 0.5)
    with pytest.raises(RunError, match=r"needs 101 MiB, 50 MiB out of core, on a worker and the largest has 40 MiB"):
        shares([Capacity(40 * MIB, 1.0)] * 2, 2, need, 1, HALF)


def test_a_phase_gets_the_shares_of_its_subnets_and_copies() -> None:
    phase = TrainingPhase(2, 10, 5, subnets=4, copies=2, local_steps=50)
    assert shares_of_phase([Capacity(ROOMY, 1.0)] * 2, phase, need, 64) == (0.5,) * 4


@pytest.mark.parametrize(
    ("memory_mib", "reason"),
    [
        (60, r"phase 2 needs 101 MiB for a subnet with 100% of each layer, and the largest worker has 60 MiB free"),
        (1, r"phase 2: even the narrowest subnet needs 2 MiB"),
    ],
)
def test_a_phase_that_no_worker_can_hold_is_refused_by_its_number(memory_mib: int, reason: str) -> None:
    phase = TrainingPhase(2, 10, 5, subnets=1, copies=1, local_steps=50)
    with pytest.raises(RunError, match=rf"training.phases: {reason}"):
        shares_of_phase([Capacity(memory_mib * MIB, 1.0)] * 4, phase, need, 64)
    with pytest.raises(RunError, match=rf"training.finish_whole: {reason}"):
        shares_of_phase([Capacity(memory_mib * MIB, 1.0)] * 4, phase, need, 64, None, "training.finish_whole")


def test_subnets_by_depth_are_alike_whatever_their_workers_and_fit_the_largest() -> None:
    workers = [Capacity(60 * MIB, 1.0), Capacity(30 * MIB, 8.0)]
    assert equal_shares(workers, 4, need, 2) == (0.5,) * 4
    with pytest.raises(RunError, match=r"the largest subnet needs 76 MiB .* has 60 MiB; use more training.subnets"):
        equal_shares(workers, 4, need, 3)
