"""A table of workers knows who is idle and who has room, whatever changed before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.rounds.worker_table import HeldSubnet, WorkerState, WorkerTable

NAMES = ("a", "b", "c", "d")


@st.composite
def workers(draw: st.DrawFn) -> WorkerState:
    due = draw(st.lists(st.integers(0, 3), max_size=3))
    attempts = {n: HeldSubnet(n, 1, exclusive=False, due=float(at)) for n, at in enumerate(due)}
    unwanted = dict.fromkeys(draw(st.sets(st.sampled_from(range(len(due))))) if due else (), 0.0)
    leases = draw(st.integers(1, 3))
    return WorkerState(
        memory_bytes=9,
        leases=leases,
        attempts=attempts,
        unwanted=unwanted,
        draining=draw(st.booleans()),
        hung=draw(st.booleans()),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.one_of(st.none(), workers())), max_size=30))
def test_who_is_idle_and_who_has_room_follows_from_the_workers(changes: list[tuple[str, WorkerState | None]]) -> None:
    table, expected = WorkerTable(), dict[str, WorkerState]()
    for name, worker in changes:
        if worker is None:
            table = table.drop(name)
            expected.pop(name, None)
        else:
            table = table.put(name, worker)
            expected[name] = worker
    assert table == expected
    assert table == WorkerTable.of(expected)
    staying = {name: worker for name, worker in expected.items() if not (worker.draining or worker.hung)}
    assert set(table.idle) == {name for name, worker in staying.items() if not worker.attempts}
    assert set(table.queueing) == {name for name, w in expected.items() if {*w.attempts} - {*w.unwanted, 0}}
    roomy = [(w.attempts[0].due, name) for name, w in staying.items() if 0 < len(w.attempts) < w.leases]
    assert list(table.roomy) == [name for _, name in sorted(roomy)]
