"""Payloads in parts: what is there from the beginning on."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from idletrain.exchange.parts import PAYLOADS_KEPT, Parts

MOST = 40


def part(values: str) -> list[memoryview]:
    return [memoryview("".join(4 * value for value in values).encode())]


def joined(frames: list[memoryview]) -> bytes:
    return b"".join(frames)


def test_parts_are_joined_in_order_whenever_they_arrive() -> None:
    parts = Parts()
    assert parts.hold(1, (9, True), 8, part("cd"), MOST)
    assert parts.hold(1, (9, True), 0, part("ab"), MOST)
    assert joined(parts.payload(1, (9, True))) == b"aaaabbbbccccdddd"
    assert joined(parts.payload(1, (9, True))) == b"aaaabbbbccccdddd"  # a push may be sent again


def test_a_part_that_is_sent_again_replaces_the_first_send() -> None:
    parts = Parts()
    assert parts.hold(1, (9, True), 0, part("ab"), 8)
    assert parts.hold(1, (9, True), 0, part("ab"), 8)
    assert joined(parts.payload(1, (9, True))) == b"aaaabbbb"


def test_a_payload_ends_at_a_gap() -> None:
    parts = Parts()
    parts.hold(1, (9, True), 12, part("d"), MOST)
    assert parts.payload(1, (9, True)) == []
    parts.hold(1, (9, True), 0, part("ab"), MOST)
    assert joined(parts.payload(1, (9, True))) == b"aaaabbbb"


CONTENT = bytes(range(40))


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40), st.integers(1, 40)), max_size=12))
def test_parts_of_several_sends_add_up_to_what_came_of_any_of_them(sent: list[tuple[int, int, int]]) -> None:
    parts, there = Parts(), set[int]()
    for start, size, frame in sent:
        stop = min(40, start + size)
        frames = [memoryview(CONTENT[at : min(stop, at + frame)]) for at in range(start, stop, frame)]
        assert parts.hold(1, (9, True), start, frames, 40)
        there |= set(range(start, stop))
    whole = next((at for at in range(41) if at not in there), 40)
    assert joined(parts.payload(1, (9, True))) == CONTENT[:whole]
    if there:  # it holds no more than is allowed
        assert not parts.hold(1, (9, True), 40, [memoryview(b"more")], len(there))


def test_what_is_sent_again_in_other_parts_is_in_place_of_the_first_send() -> None:
    parts = Parts()
    for start, values in ((0, "ab"), (8, "cd"), (16, "ef")):
        assert parts.hold(1, (9, True), start, part(values), 24)
    assert parts.hold(1, (9, True), 12, part("DE"), 24)
    assert joined(parts.payload(1, (9, True))) == b"aaaabbbbccccDDDDEEEEffff"
    assert parts.hold(1, (9, True), 0, part("ABC"), 24)
    assert joined(parts.payload(1, (9, True))) == b"AAAABBBBCCCCDDDDEEEEffff"
    assert parts.hold(1, (9, True), 4, part("b"), 24)
    assert joined(parts.payload(1, (9, True))) == b"AAAAbbbbCCCCDDDDEEEEffff"


def test_a_part_takes_as_long_to_hold_however_many_there_are() -> None:
    parts, byte = Parts(), [memoryview(b"a")]
    begun = time.thread_time()
    for at in range(20_000):
        assert parts.hold(1, (9, True), at, byte, 20_000)
    assert time.thread_time() - begun < 2  # it was a minute when each looked at all before
    assert joined(parts.payload(1, (9, True))) == 20_000 * b"a"


def test_train_seconds_are_those_of_the_last_part() -> None:
    parts = Parts()
    parts.hold(1, (9, True), 0, part("a"), MOST, 2.0)
    parts.hold(1, (9, True), 4, part("b"), MOST, 2.5)
    assert parts.train_seconds(1, (9, True)) == 2.5
    assert parts.train_seconds(1, (8, True)) == 0


def test_no_attempt_holds_more_than_its_subnet() -> None:
    parts = Parts()
    assert parts.hold(1, (9, True), 0, part("ab"), 12)
    assert not parts.hold(1, (9, True), 8, part("cd"), 12)
    assert joined(parts.payload(1, (9, True))) == b"aaaabbbb"


def test_a_checkpoint_and_the_update_behind_it_do_not_mix_and_older_ones_are_dropped() -> None:
    parts = Parts()
    parts.hold(1, (5, True), 0, part("a"), MOST)
    parts.hold(1, (6, True), 0, part("b"), MOST)
    assert PAYLOADS_KEPT == 2
    parts.hold(1, (7, True), 0, part("c"), MOST)
    assert parts.payload(1, (5, True)) == []
    assert [joined(parts.payload(1, (steps, True))) for steps in (6, 7)] == [b"bbbb", b"cccc"]


def test_a_checkpoint_and_an_update_of_as_many_steps_do_not_mix() -> None:
    parts = Parts()
    parts.hold(1, (5, False), 0, part("a"), MOST)
    parts.hold(1, (5, True), 0, part("b"), MOST)
    assert joined(parts.payload(1, (5, False))) == b"aaaa"
    assert joined(parts.payload(1, (5, True))) == b"bbbb"


def test_attempts_do_not_mix_and_are_forgotten_when_they_end() -> None:
    parts = Parts()
    parts.hold(1, (5, True), 0, part("a"), MOST)
    parts.hold(2, (5, True), 0, part("b"), MOST)
    parts.drop(1)
    assert parts.payload(1, (5, True)) == []
    assert joined(parts.payload(2, (5, True))) == b"bbbb"
    parts.drop(3)
