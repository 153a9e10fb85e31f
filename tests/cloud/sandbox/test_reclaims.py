"""Nodes are taken back by the clock or as recorded; the same market takes the same ones every time."""

from __future__ import annotations

import pytest

from idletrain.cloud.sandbox.reclaims import (
    PeriodicReclaims,
    Reclaim,
    ReclaimPolicy,
    Tenure,
    next_reclaims,
    nodes_present,
    periodic_reclaims,
    trace_reclaims,
)
from idletrain.errors import JobError
from idletrain.simulation.trace import TraceChange, read_trace

TRACE = "0,add,n1\n0,add,n2\n2000,remove,n1\n3000,add,n3\n"


def test_the_oldest_goes_at_its_time_in_turn_with_a_notice_and_without() -> None:
    turns = PeriodicReclaims(every_seconds=20, next_at=20)
    assert periodic_reclaims(turns, 19.9, ["a", "b"]) == (turns, ())
    turns, first = periodic_reclaims(turns, 20, ["a", "b"])
    turns, second = periodic_reclaims(turns, 41, ["b"])
    assert first == (Reclaim("a", notice=True),)
    assert second == (Reclaim("b", notice=False),)
    assert turns.reclaimed == 2


def test_with_nothing_to_take_the_time_passes_and_the_turn_stays() -> None:
    turns, reclaimed_ids = periodic_reclaims(PeriodicReclaims(every_seconds=20, next_at=20), 20, [])
    assert reclaimed_ids == ()
    assert periodic_reclaims(turns, 40, ["a"])[1] == (Reclaim("a", notice=True),)


def test_late_turns_are_not_made_up_for_at_once() -> None:
    turns, reclaimed_ids = periodic_reclaims(PeriodicReclaims(every_seconds=1, next_at=1), 100, ["a", "b", "c"])
    assert len(reclaimed_ids) == 1
    assert turns.next_at == 100


def test_a_trace_is_read_in_order_of_time() -> None:
    assert read_trace("20,remove,n1\n\n10,add,n1\n") == (
        TraceChange(10, "n1", present=True),
        TraceChange(20, "n1", present=False),
    )


@pytest.mark.parametrize("line", ["soon,add,n1", "10,take,n1", "10,add", "10,add,", "-5,add,n1"])
def test_a_line_that_is_no_change_is_refused_by_number(line: str) -> None:
    with pytest.raises(JobError, match=r"line 2 .*write lines such as"):
        read_trace(f"1,add,n1\n{line}\n")


def test_the_nodes_of_a_time_are_those_that_came_and_did_not_go() -> None:
    trace = read_trace(TRACE)
    assert [nodes_present(trace, at) for at in (0, 1999, 2000, 3000)] == [
        ("n1", "n2"),
        ("n1", "n2"),
        ("n2",),
        ("n2", "n3"),
    ]
    assert nodes_present(trace[2:], 0) == ()


def test_instances_stand_for_nodes_in_order_of_start_and_go_with_them() -> None:
    tenure, reclaimed_ids = trace_reclaims(Tenure({}), ("n1", "n2"), ["a", "b"])
    assert (tenure.held, reclaimed_ids) == ({"n1": "a", "n2": "b"}, ())
    tenure, reclaimed_ids = trace_reclaims(tenure, ("n2",), ["a", "b"])
    assert (tenure.held, reclaimed_ids) == ({"n2": "b"}, (Reclaim("a", notice=True),))
    tenure, reclaimed_ids = trace_reclaims(tenure, ("n2", "n3"), ["b", "c"])
    assert (tenure.held, reclaimed_ids) == ({"n2": "b", "n3": "c"}, ())


def test_an_instance_without_a_node_goes() -> None:
    _, reclaimed_ids = trace_reclaims(Tenure({}, reclaimed=1), ("n1",), ["a", "b"])
    assert reclaimed_ids == (Reclaim("b", notice=False),)


def test_an_instance_whose_node_went_does_not_get_another() -> None:
    _, reclaimed_ids = trace_reclaims(Tenure({"n1": "a"}), ("n3",), ["a"])
    assert reclaimed_ids == (Reclaim("a", notice=True),)


def test_a_node_is_free_again_once_its_instance_has_ended() -> None:
    tenure, reclaimed_ids = trace_reclaims(Tenure({"n1": "a"}), ("n1",), ["b"])
    assert (tenure.held, reclaimed_ids) == ({"n1": "b"}, ())


def test_a_market_follows_its_trace_at_its_speed() -> None:
    market = ReclaimPolicy(trace=read_trace(TRACE), speed=100)
    market, move = next_reclaims(market, 0.0, ["a", "b"])
    assert (move.capacity, move.reclaims) == (2, ())
    market, move = next_reclaims(market, 0.02, ["a", "b"])
    assert (move.capacity, move.reclaims) == (1, (Reclaim("a", notice=True),))


def test_a_trace_begins_with_its_first_node() -> None:
    market = ReclaimPolicy(trace=read_trace("480000,add,n1\n480100,add,n2\n"), speed=10)
    market, move = next_reclaims(market, 0.0, [])
    assert move.capacity == 1
    _, move = next_reclaims(market, 0.011, [])
    assert move.capacity == 2


def test_a_market_without_clock_and_trace_takes_nothing_and_limits_nothing() -> None:
    market, move = next_reclaims(ReclaimPolicy(), 1e6, ["a"])
    assert (market, move.reclaims, move.capacity) == (ReclaimPolicy(), (), None)


def test_an_instance_is_taken_once_also_where_clock_and_trace_agree() -> None:
    market = ReclaimPolicy(
        periodic=PeriodicReclaims(every_seconds=9, next_at=0), trace=read_trace("0,add,n1\n0,remove,n1\n")
    )
    _, move = next_reclaims(market, 0.0, ["a"])
    assert move.reclaims == (Reclaim("a", notice=True),)
