"""The delay queue: in order, each packet after the delay and none before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from idletrain_testbed.delay import DelayQueue


def test_packets_go_after_the_delay_all_that_are_due_at_once() -> None:
    queue = DelayQueue(2.0)
    queue.add(3, now=10.0)
    queue.add(5, now=11.0)

    assert queue.due(11.9) is None
    assert queue.next() == 12.0
    assert queue.due(12.0) == 3
    assert queue.due(12.5) is None
    assert queue.due(20.0) == 5
    assert queue.next() is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0.001, 5))
def test_no_packet_is_early_late_or_left(gaps: list[float], delay: float) -> None:
    queue = DelayQueue(delay)
    arrived: list[float] = []
    released = 0
    for gap in gaps:
        now = (arrived[-1] if arrived else 0.0) + gap
        last = queue.due(now)
        released = released if last is None else last
        assert all(when + delay <= now for when in arrived[:released])
        assert all(when + delay > now for when in arrived[released:])
        arrived.append(now)
        queue.add(len(arrived), now)
    assert queue.due(arrived[-1] + delay) == len(arrived)
