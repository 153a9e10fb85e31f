"""Test the simulated step: cases worked by hand, and properties of all steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.outofcore.planning.plan import legal
from idletrain.nn.outofcore.planning.profile import Held, SwapLink, Unit
from idletrain.nn.outofcore.planning.simulate import Footprint, SimulatedStep, simulate
from outofcore.made_up import made_up

# Three equal units: 1 s forward, 2 s backward, 100 bytes in, 100 out, 300 inner.
CHAIN = tuple(Unit(f"u{i}", 1.0, 2.0, 1.0, 100, 100, 300, saving_bytes=300) for i in range(3))
FAST, SLOW = SwapLink(1e9, 1e9), SwapLink(100.0, 100.0)
ROOMY = 10**6


def step(modes: str, budget: int = ROOMY, link: SwapLink = FAST, units: tuple[Unit, ...] = CHAIN) -> SimulatedStep:
    return simulate(Footprint(units, modes, budget, 0, streamed=False), link, trace=True)


def test_to_keep_all_takes_the_compute_and_all_the_bytes() -> None:
    outcome = step("KKK")
    assert outcome.seconds == pytest.approx(9.0)
    # u0 100 in + 300, u1 the same, u2 the same: its input is saved by it; at the end the gradient of the output
    assert outcome.peak_bytes == 3 * 400 + 100
    assert [span.kind for span in outcome.spans] == ["forward"] * 3 + ["backward"] * 3


def test_to_recompute_all_takes_a_forward_more_and_keeps_the_inputs() -> None:
    outcome = step("RRR")
    assert outcome.seconds == pytest.approx(12.0)
    assert outcome.peak_bytes == 3 * 100 + 300 + 100  # the inputs, one unit's inner tensors and the gradient


def test_a_merged_segment_keeps_one_input_and_recomputes_all_of_it_at_once() -> None:
    assert step("Rmm").seconds == pytest.approx(12.0)
    assert step("Rmm").peak_bytes == 100 + 3 * 300 + 2 * 100 + 100
    assert step("Rmm").compute_seconds == step("RRR").compute_seconds


def test_a_fast_link_hides_swapping_and_a_slow_one_does_not() -> None:
    assert step("SSS").seconds == pytest.approx(9.0, abs=0.01)
    # With room for all, what is not yet written is used as it is, and only u0 (written 1 s to 5 s) may have to come
    # back. Forward ends at 3 s: nothing is written by then.
    assert step("SSS", link=SLOW).seconds == pytest.approx(9.0)
    # With room for one unit beside its surroundings: u1 waits until u0 is written (1 + 4 = 5 s), u2 until u1 is
    # (6 + 4 = 10 s), backward of u2 begins at 11 s, u1 is read while it runs if there is room, which there is not.
    tight = step("SSS", budget=500, link=SLOW)
    assert tight.shortfall_bytes == 0
    assert tight.seconds == pytest.approx(11 + 2 + 4 + 2 + 4 + 2)


def test_a_budget_too_small_is_reported_by_how_much() -> None:
    assert step("KKK", budget=1000).shortfall_bytes == 300
    assert step("KKK", budget=1300).shortfall_bytes == 0


def test_the_first_to_save_a_tensor_stores_it() -> None:
    relu = tuple(Unit(f"u{i}", 1.0, 2.0, 1.0, 100, 100, 0, saves_input=True, saves_output=True) for i in range(3))
    stored = [s.stored_bytes for s in Footprint(relu, "KKK", ROOMY, 0, streamed=False).segments]
    assert stored == [200, 100, 100]
    stored = [s.stored_bytes for s in Footprint(relu, "KRK", ROOMY, 0, streamed=False).segments]
    assert stored == [200, 0, 200]
    swapped = Footprint(relu, "SRS", ROOMY, 0, streamed=False).segments
    assert [s.read_bytes for s in swapped] == [100, 100, 200]  # u1's input was stored by u0 and is needed before it


def test_streamed_parameters_are_read_twice_and_written_once() -> None:
    units = tuple(Unit(f"u{i}", 1.0, 2.0, 1.0, 0, 0, 0, parameter_bytes=100, state_bytes=200) for i in range(5))
    footprint = Footprint(units, "KKKKK", ROOMY, 0, streamed=False)
    streamed = Footprint(units, "KKKKK", ROOMY, 0, streamed=True)
    assert footprint.resident_bytes == 5 * 300
    assert streamed.resident_bytes == 3 * 400  # three buffers of values, gradients and state
    outcome = simulate(streamed, SwapLink(300.0, 300.0), trace=True)
    assert outcome.peak_bytes == 1200
    written = [span for span in outcome.spans if span.lane == "write"]
    assert len(written) == 5
    assert outcome.seconds == max(span.end for span in outcome.spans)
    assert simulate(streamed, FAST).seconds == pytest.approx(15.0, abs=0.01)


modes = st.lists(st.sampled_from("KSRQm"), min_size=6, max_size=6)


@settings(deadline=None, max_examples=60)
@given(modes, st.integers(0, 50), st.floats(10, 1000))
def test_a_step_is_never_quicker_than_its_compute_and_gives_all_its_memory_back(
    drawn: list[str], seed: int, mbs: float
) -> None:
    profile = made_up(6, seed, mbs)
    plan = legal(profile.units, drawn)
    footprint = Footprint(profile.units, plan, 10**12, 0, streamed=False)
    outcome = simulate(footprint, profile.link, trace=True)
    assert outcome.seconds >= outcome.compute_seconds - 1e-9
    assert outcome.compute_seconds >= profile.compute_seconds - 1e-9
    assert sum(s.stored_bytes for s in footprint.segments) == sum(s.freed_bytes for s in footprint.segments)
    for lane in ("compute", "write", "read"):
        spans = sorted((s.start, s.end) for s in outcome.spans if s.lane == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


@settings(deadline=None, max_examples=40)
@given(modes, st.integers(0, 50), st.floats(0.2, 1.0))
def test_what_fits_a_budget_stays_below_it(drawn: list[str], seed: int, part: float) -> None:
    profile = made_up(6, seed, 100)
    plan = legal(profile.units, drawn)
    whole = simulate(Footprint(profile.units, plan, 10**12, 0, streamed=False), profile.link).peak_bytes
    budget = int(whole * part)
    outcome = simulate(Footprint(profile.units, plan, budget, 0, streamed=False), profile.link)
    assert outcome.shortfall_bytes == max(0, outcome.peak_bytes - budget)


@pytest.mark.parametrize(("modes", "held"), [("KKK", 0), ("RKK", 0), ("SKK", 100), ("QKK", 100)])
def test_what_the_network_holds_counts_where_its_owner_is_not_kept(modes: str, held: int) -> None:
    units = (*CHAIN[:2], replace(CHAIN[2], held=(Held(0, 100),)))
    with_it, without = (Footprint(u, modes, 1 << 40, 0, streamed=False) for u in (units, CHAIN))
    assert with_it.segments[2].forward_bytes - without.segments[2].forward_bytes == held


def test_waiting_gradients_count_backward_and_while_a_unit_is_recomputed() -> None:
    waits = (CHAIN[0], replace(CHAIN[1], waiting_bytes=1000), CHAIN[2])
    for modes in ("KKK", "KRK", "RmK"):
        with_it, without = (Footprint(u, modes, 1 << 40, 0, streamed=False) for u in (waits, CHAIN))
        more = [a.backward_bytes - b.backward_bytes for a, b in zip(with_it.segments, without.segments, strict=True)]
        assert sum(more) == 1000
        assert all(a.forward_bytes == b.forward_bytes for a, b in zip(with_it.segments, without.segments, strict=True))


def test_a_swapped_tensor_takes_the_computing_thread_s_time() -> None:
    units = tuple(replace(unit, tensors=3) for unit in CHAIN)
    link = SwapLink(1e12, 1e12, 0.01)
    footprint, swapped = (
        simulate(Footprint(units, modes, 1 << 40, 0, streamed=False), link) for modes in ("KKK", "SSK")
    )
    assert swapped.seconds == pytest.approx(footprint.seconds + 2 * 3 * 0.01)
