"""A table's counts are what counting its subnets would give."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from idletrain.rounds.table import Phase, SubnetState, SubnetTable

SUBNETS = st.builds(SubnetState, need_bytes=st.integers(1, 3), phase=st.sampled_from(Phase), steps=st.integers(0, 2))
CHANGES = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(Phase), st.integers(0, 2)), max_size=30)


@given(st.lists(SUBNETS, min_size=1, max_size=9), CHANGES)
def test_any_order_of_changes_leaves_what_a_new_table_would_say(
    subnets: list[SubnetState], changes: list[tuple[int, Phase, int]]
) -> None:
    table = SubnetTable.of(subnets)
    for number, phase, steps in changes:
        k = number % len(subnets)
        subnets[k] = replace(subnets[k], phase=phase, steps=steps)
        table = table.put(k, subnets[k])
    anew = SubnetTable.of(subnets)
    assert (table.rows, table.waiting, table.started) == (anew.rows, anew.waiting, anew.started)
    assert all(table.count(phase) == sum(s.phase is phase for s in subnets) for phase in Phase)
    assert table == anew


def test_the_largest_waits_in_front_and_equals_by_number() -> None:
    needs = (1, 3, 2, 3)
    table = SubnetTable.of(SubnetState(need_bytes=need) for need in needs)
    assert tuple(table.waiting) == (1, 3, 2, 0)
    leased = table.put(3, replace(table[3], phase=Phase.LEASED))
    assert tuple(leased.waiting) == (1, 2, 0)
    assert leased.put(3, table[3]) == table
