"""Refused workers are told by name, once, however often they come back."""

from __future__ import annotations

from idletrain.rounds.refusals import ENDED_WHILE_JOINING, MOST_KEPT, MOST_SHOWN, Refusals

SMALL = "it has 1 MiB free and the narrowest subnet needs 2 MiB"


def test_a_worker_that_comes_back_is_one_and_counted() -> None:
    refusals = Refusals()
    assert [refusals.add("w0", ENDED_WHILE_JOINING) for _ in range(3)] == [1, 2, 3]
    assert refusals.text() == f"1 refused: w0 (3 times): {ENDED_WHILE_JOINING}"


def test_the_last_reason_counts() -> None:
    refusals = Refusals()
    assert [refusals.add("w0", reason) for reason in (SMALL, SMALL, ENDED_WHILE_JOINING, SMALL)] == [1, 2, 1, 1]
    assert refusals.text() == f"1 refused: w0: {SMALL}"
    assert refusals.reason_for("w0") == SMALL


def test_a_worker_that_can_be_used_now_is_not_told_of() -> None:
    refusals = Refusals()
    refusals.add("w0", SMALL)
    refusals.lift("w0")
    assert (refusals.text(), refusals.reason_for("w0")) == ("", None)


def test_of_many_some_are_told_and_all_are_counted() -> None:
    refusals = Refusals()
    for n in range(MOST_SHOWN + 4):
        refusals.add(f"w{n}", SMALL)
    assert refusals.text().startswith(f"7 refused: w0: {SMALL}; w1: ")
    assert refusals.text().endswith(f"w2: {SMALL}; and 4 more")


def test_names_that_are_new_each_time_do_not_grow_without_end() -> None:
    refusals = Refusals()
    for n in range(MOST_KEPT + 5):
        refusals.add(f"local-{n}", ENDED_WHILE_JOINING)
    assert refusals.text().startswith(f"{MOST_KEPT} refused: local-5: ")
