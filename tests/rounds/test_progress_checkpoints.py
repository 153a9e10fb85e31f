"""Which marks are held at home."""

from __future__ import annotations

from idletrain.rounds.durable.run_directory import Payload
from idletrain.rounds.progress_checkpoints import ProgressCheckpoints


def mark(steps: int) -> Payload:
    return Payload([memoryview(bytes(4 * steps))], float(steps), 0)


def test_a_subnet_that_goes_back_for_itself_has_its_latest_mark_alone() -> None:
    marks = ProgressCheckpoints()
    for steps in (10, 20):
        marks.keep(0, steps, mark(steps))
    assert list(marks.steps(0)) == [20]
    assert marks.latest(0) == mark(20)
    assert list(marks.steps(1)) == []


def test_in_lockstep_a_mark_is_held_until_all_subnets_have_a_newer_one() -> None:
    marks = ProgressCheckpoints(together=2)
    marks.keep(0, 10, mark(10))
    marks.keep(0, 20, mark(20))
    marks.keep(1, 10, mark(10))
    assert sorted(marks.steps(0)) == [10, 20]  # 10 is the latest that both have
    assert marks.at(0, 10) == mark(10)
    marks.keep(1, 20, mark(20))
    assert [list(marks.steps(k)) for k in (0, 1)] == [[20], [20]]
    assert marks.at(0, 10) is None


def test_a_mark_that_only_one_has_leaves_the_common_one_where_it_is() -> None:
    marks = ProgressCheckpoints(together=2)
    for k in (0, 1):
        marks.keep(k, 10, mark(10))
    marks.keep(0, 13, mark(13))
    marks.keep(1, 17, mark(17))
    assert sorted(marks.steps(0)) == [10, 13]
    assert sorted(marks.steps(1)) == [10, 17]
    assert marks.latest(1) == mark(17)


def test_marks_of_more_steps_are_forgotten() -> None:
    marks = ProgressCheckpoints(2)
    for k, steps in ((0, 3), (0, 5), (1, 3)):
        marks.keep(k, steps, mark(steps))
    marks.forget_above(3)
    assert [sorted(marks.steps(k)) for k in (0, 1)] == [[3], [3]]
    marks.forget_above(0)
    assert [sorted(marks.steps(k)) for k in (0, 1)] == [[], []]
