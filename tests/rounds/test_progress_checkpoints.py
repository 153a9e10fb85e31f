"""Which progress checkpoints are held."""

from __future__ import annotations

from idletrain.rounds.durable.run_directory import Payload
from idletrain.rounds.progress_checkpoints import ProgressCheckpoints


def checkpoint(steps: int) -> Payload:
    return Payload([memoryview(bytes(4 * steps))], float(steps), 0)


def test_a_subnet_that_rolls_back_for_itself_has_its_latest_checkpoint_alone() -> None:
    checkpoints = ProgressCheckpoints()
    for steps in (10, 20):
        checkpoints.keep(0, steps, checkpoint(steps))
    assert list(checkpoints.steps(0)) == [20]
    assert checkpoints.latest(0) == checkpoint(20)
    assert list(checkpoints.steps(1)) == []


def test_in_lockstep_a_checkpoint_is_held_until_all_subnets_have_a_newer_one() -> None:
    checkpoints = ProgressCheckpoints(together=2)
    checkpoints.keep(0, 10, checkpoint(10))
    checkpoints.keep(0, 20, checkpoint(20))
    checkpoints.keep(1, 10, checkpoint(10))
    assert sorted(checkpoints.steps(0)) == [10, 20]  # 10 is the latest that both have
    assert checkpoints.at(0, 10) == checkpoint(10)
    checkpoints.keep(1, 20, checkpoint(20))
    assert [list(checkpoints.steps(k)) for k in (0, 1)] == [[20], [20]]
    assert checkpoints.at(0, 10) is None


def test_a_checkpoint_that_only_one_has_leaves_the_common_one_where_it_is() -> None:
    checkpoints = ProgressCheckpoints(together=2)
    for k in (0, 1):
        checkpoints.keep(k, 10, checkpoint(10))
    checkpoints.keep(0, 13, checkpoint(13))
    checkpoints.keep(1, 17, checkpoint(17))
    assert sorted(checkpoints.steps(0)) == [10, 13]
    assert sorted(checkpoints.steps(1)) == [10, 17]
    assert checkpoints.latest(1) == checkpoint(17)


def test_checkpoints_of_more_steps_are_forgotten() -> None:
    checkpoints = ProgressCheckpoints(2)
    for k, steps in ((0, 3), (0, 5), (1, 3)):
        checkpoints.keep(k, steps, checkpoint(steps))
    checkpoints.forget_above(3)
    assert [sorted(checkpoints.steps(k)) for k in (0, 1)] == [[3], [3]]
    checkpoints.forget_above(0)
    assert [sorted(checkpoints.steps(k)) for k in (0, 1)] == [[], []]


def test_a_round_of_fewer_subnets_in_lockstep_waits_for_those_alone() -> None:
    checkpoints = ProgressCheckpoints(together=3)
    checkpoints.keep(0, 10, checkpoint(10))
    checkpoints.open_round(together=2)
    assert list(checkpoints.steps(0)) == []
    for k in (0, 1):
        for steps in (10, 20):
            checkpoints.keep(k, steps, checkpoint(steps))
    assert [list(checkpoints.steps(k)) for k in (0, 1)] == [[20], [20]]
