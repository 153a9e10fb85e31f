"""Faults, deaths and hangs: which worker, or the job, is to blame."""

from __future__ import annotations

import pytest

from idletrain.exchange.messages import Reply
from idletrain.rounds.protocol import ClockTick, Finish, Heartbeat, NoticeReceived, Pushed, WorkerLeft, WorkerSick
from idletrain.rounds.table import Phase
from tests.rounds.world import LARGE, SMALL, STEPS, World


def test_a_subnet_whose_attempts_end_in_three_errors_of_the_code_ends_the_run() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    for nth in range(3):
        assert world.finished is None
        world.end(world.lease_of(0), failed=True)
        assert world.finished == (None if nth < 2 else "failed")


def test_a_worker_on_which_attempts_fail_twice_is_passed_over() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("a", "b")
    for _ in range(2):
        world.end(world.lease_of(0), failed=True)
    assert [c.worker for c in world.running] == ["b"]
    world.finish_subnet(1)
    assert [(c.worker, c.lease.subnet) for c in world.running] == [("b", 0)]
    world.finish_subnet(0)
    assert world.commit_due


def test_errors_after_the_update_is_stored_do_not_count() -> None:
    world = World(needs=(SMALL,), rounds=9)
    world.join("a")
    for _ in range(4):
        lease = world.lease_of(0)
        assert world.send(Pushed, lease, steps=STEPS) is Reply.ACCEPTED
        world.end(lease, failed=True)
        world.store(0)
        world.commit()
        if world.evaluation_due:
            world.evaluate()
    assert world.finished is None


def test_three_attempts_at_a_subnet_that_end_in_nan_end_the_run() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    for nth in range(3):
        assert world.finished is None
        assert world.send(Pushed, world.lease_of(0), steps=STEPS, fault=Reply.NOT_FINITE) is Reply.NOT_FINITE
        if nth < 2:
            world.end(world.lease_of(0))
    assert world.finished == "diverged"


def nan(world: World, subnet: int = 0) -> str:
    """Refuse a subnet's update for NaN and end its attempt; return its worker."""
    lease = world.lease_of(subnet)
    (worker,) = (c.worker for c in world.leases if c.lease == lease)
    assert world.send(Pushed, lease, steps=STEPS, fault=Reply.NOT_FINITE) is Reply.NOT_FINITE
    if not world.finished:
        world.end(lease)
    return worker


def test_nan_of_one_worker_does_not_end_a_run_in_which_another_computes_well() -> None:
    world = World(needs=(SMALL, SMALL), rounds=4)
    world.join("m1:1", "m2:1")
    sick = next(c.worker for c in world.leases if c.lease.subnet == 0)
    while not world.finished:
        for held in list(world.running):
            if held.worker == sick:
                nan(world, held.lease.subnet)
            else:
                world.finish_subnet(held.lease.subnet)
        if world.commit_due:
            world.commit()
        if world.evaluation_due:
            world.evaluate()
    assert world.finished == "completed"
    assert [c for c in world.log if isinstance(c, WorkerSick)] == [WorkerSick(sick, "faults")]


def test_nan_on_two_machines_is_the_job_s_fault() -> None:
    world = World(needs=(SMALL,))
    world.join("m1:1", "m2:1")
    first = nan(world)
    assert world.finished is None
    second = nan(world)
    assert (world.finished, {first, second}) == ("diverged", {"m1:1", "m2:1"})
    assert world.log[-1] == Finish("diverged", 0, (first, second))


def test_two_workers_of_one_machine_are_not_a_second_opinion_where_another_machine_is_there() -> None:
    world = World(needs=(SMALL,))
    world.join("m1:1", "m1:2", "m2:1")
    workers = [nan(world), nan(world)]
    while world.finished is None and "m2:1" not in workers:
        workers.append(nan(world))
    assert world.finished == "diverged"
    assert workers[-1] == "m2:1"


def test_a_second_opinion_that_never_comes_is_not_waited_for_without_end() -> None:
    world = World(needs=(LARGE,))
    world.join("m1:1")
    world.join("m2:1", memory_bytes=SMALL)  # too small for the subnet
    for _ in range(3):
        nan(world)
    assert world.finished == "diverged"


def test_an_error_of_the_code_on_one_machine_alone_is_that_machine_s() -> None:
    world = World(needs=(SMALL,))
    world.join("m1:1", "m2:1")
    (first,) = (c.worker for c in world.running)
    world.end(world.lease_of(0), failed=True)
    (second,) = (c.worker for c in world.running)
    assert first != second
    world.finish_subnet(0)
    assert world.commit_due


def die(world: World, subnet: int, steps: int = 0) -> None:
    """Let the worker of a subnet die; a new one joins on the same machine."""
    lease = world.lease_of(subnet)
    (worker,) = (c.worker for c in world.leases if c.lease == lease)
    if steps:
        world.send(Heartbeat, lease, steps=steps)
    world.running = [c for c in world.running if c.lease != lease]
    world.do(WorkerLeft, worker=worker)
    if not world.finished:
        machine, _, number = worker.partition(":")
        world.join(f"{machine}:{int(number) + 1}")


def test_three_deaths_in_one_subnet_without_a_stored_step_end_the_run() -> None:
    world = World(needs=(SMALL,))
    world.join("m1:1")
    for _ in range(2):
        die(world, 0)
        assert world.finished is None
    die(world, 0)
    assert world.finished == "deadly"
    assert world.log[-1] == Finish("deadly", 0, ("m1:1", "m1:2", "m1:3"))


def test_three_deaths_on_one_machine_are_that_machine_s_where_another_is_there() -> None:
    world = World(needs=(SMALL,))
    world.join("m1:1")
    die(world, 0)
    die(world, 0)
    world.join("m2:1")
    die(world, 0)
    assert world.finished is None


def test_deaths_after_a_stored_step_or_a_notice_or_at_ever_later_steps_are_preemptions() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("m1:1")
    for n in range(5):
        assert world.send(Pushed, world.lease_of(0), steps=n + 1, update=False) is Reply.ACCEPTED
        die(world, 0)
    for n in range(10, 14):
        die(world, 0, steps=n)
    for _ in range(4):
        world.do(NoticeReceived, worker=world.running[-1].worker)
        die(world, 0)
    assert world.finished is None


def test_deaths_at_the_same_late_step_end_the_run_too() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("m1:1")
    for steps in (40, 41, 40, 41):
        assert world.finished is None
        die(world, 0, steps=steps)
    assert world.finished == "deadly"


def test_where_other_workers_die_that_no_subnet_ends_they_are_taken_away() -> None:
    """Somebody kills whoever is there, in the first step of one subnet again and again."""
    world = World(needs=(SMALL, SMALL), local_steps=100)
    world.join("m1:1", "m1:11")
    for n in range(6):
        die(world, 0)
        world.send(Pushed, world.lease_of(1), steps=n + 1, update=False)
        die(world, 1)  # after a stored step
        die(world, 0)
        world.join("m1:99")
        world.do(WorkerLeft, worker="m1:99")  # idle
    assert world.finished is None
    die(world, 0)
    die(world, 0)
    world.send(Pushed, world.lease_of(1), steps=100, update=True)
    world.store(1)
    world.end(world.lease_of(1))
    die(world, 0)
    assert world.finished == "deadly"


def worker_of(world: World, subnet: int) -> str:
    return next(c.worker for c in reversed(world.leases) if c.lease.subnet == subnet)


def test_a_worker_that_comes_back_and_ends_again_does_not_end_the_run_while_others_are_busy() -> None:
    world = World(needs=(SMALL, SMALL, SMALL))
    world.join("m1:1", "m1:11", "m1:21")
    die(world, 0)
    die(world, 0)
    assert "m1:3" in world.state.workers
    assert world.state.subnets[0].phase is Phase.WAITING, "who was there before is to try it"
    world.finish_subnet(1)
    assert worker_of(world, 0) == "m1:11"
    world.finish_subnet(0)
    assert world.finished is None


def test_a_subnet_in_which_one_who_was_there_before_ends_too_is_deadly() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("m1:1", "m1:11")
    die(world, 0)
    die(world, 0)
    world.finish_subnet(1)
    assert worker_of(world, 0) == "m1:11"
    die(world, 0)
    assert world.finished == "deadly"


def test_two_deaths_leave_a_subnet_to_anybody_once_all_who_were_there_before_have_left() -> None:
    world = World(needs=(SMALL, SMALL))
    world.join("m1:1", "m1:11")
    die(world, 0)
    die(world, 0)
    world.do(WorkerLeft, worker="m1:11")
    assert worker_of(world, 0) == "m1:3"
    die(world, 0)
    assert world.finished == "deadly"


def test_two_deaths_at_ever_later_steps_leave_a_subnet_to_anybody() -> None:
    world = World(needs=(SMALL, SMALL), local_steps=100)
    world.join("m1:1", "m1:11")
    for steps in (1, 2, 3):
        die(world, 0, steps=steps)
        assert world.state.subnets[0].phase is Phase.LEASED


def beat(world: World, subnet: int, steps: int, doing: str = "train") -> Reply:
    return world.send(Heartbeat, world.lease_of(subnet), steps=steps, doing=doing)


def wait(world: World, seconds: int, *beats: tuple[int, int, str]) -> None:
    """Let time pass, with a beat of these subnets every second."""
    for _ in range(seconds):
        world.now += 1
        for subnet, steps, doing in beats:
            beat(world, subnet, steps, doing)
        world.do(ClockTick)


def test_a_worker_that_beats_without_a_step_hangs_and_gets_nothing_until_its_attempt_ends() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    for step in range(1, 5):
        wait(world, 1, (0, step, "train"))
    hung = world.lease_of(0)
    wait(world, 10, (0, 4, "train"))
    assert world.lost == []
    wait(world, 1, (0, 4, "train"))
    assert [(c.cause, c.lost_steps) for c in world.lost] == [("hang", 4)]
    (sick,) = (c for c in world.log if isinstance(c, WorkerSick))
    assert (sick.worker, sick.cause, sick.seconds) == ("a", "hang", 11.0)
    assert world.running == [c for c in world.leases if c.lease == hung]  # nothing new for it
    assert world.send(Heartbeat, hung, steps=4) is Reply.HUNG
    world.end(hung)
    assert world.leases[-1].worker == "a"


def test_a_slow_pull_and_a_slow_load_do_not_hang() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    wait(world, 500, (0, 0, "load"))
    wait(world, 3000, (0, 0, "move"))
    assert world.lost == []
    wait(world, 50, (0, 0, "train"))  # a first step may take long before anybody has measured one
    assert world.lost == []


def test_a_load_that_never_ends_hangs() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    wait(world, 602, (0, 0, "load"))
    assert [c.cause for c in world.lost] == ["hang"]


def test_in_lockstep_who_waits_for_a_missing_member_or_its_first_step_does_not_hang() -> None:
    world = World(needs=(SMALL, SMALL), local_steps=100, lockstep=True)
    world.join("a", "b")
    for step in range(1, 5):
        wait(world, 1, (0, step, "train"), (1, step, "train"))
    world.do(WorkerLeft, worker="b")
    wait(world, 100, (0, 4, "train"))  # nobody can take a step until another joins
    world.join("c")
    wait(world, 100, (0, 4, "train"), (1, 0, "load"))
    wait(world, 50, (0, 4, "train"), (1, 0, "train"))
    assert [c.cause for c in world.lost] == ["kill"]
    for step in range(5, 9):
        wait(world, 1, (0, step, "train"), (1, step, "train"))
    wait(world, 11, (0, 8, "train"), (1, 8, "train"))
    assert [c.cause for c in world.lost] == ["kill", "hang", "hang"]


@pytest.mark.parametrize("report", ["heartbeat", "checkpoint"])
def test_what_a_worker_trains_first_hangs_though_it_was_leased_second(report: str) -> None:
    world = World(needs=(SMALL, SMALL), local_steps=100, workers=("a",))
    world.do(ClockTick)
    wait(world, 5, (0, 0, "wait"))
    for step in (1, 2):
        if report == "heartbeat":
            wait(world, 1, (0, 0, "wait"), (1, step, "train"))
        else:
            wait(world, 1, (0, 0, "wait"))
            world.send(Pushed, world.lease_of(1), steps=step, update=False)
    assert [world.state.subnets[k].lease.queued for k in (0, 1)] == [True, False]
    wait(world, 12, (0, 0, "wait"), (1, 2, "train"))
    assert (1, "hang") in [(c.subnet, c.cause) for c in world.lost]
    assert [(c.worker, c.cause) for c in world.log if isinstance(c, WorkerSick)] == [("a", "hang")]


def test_what_waits_behind_one_that_was_leased_later_goes_to_a_worker_that_joins() -> None:
    """Also where it says that it waits only after the other has begun."""
    world = World(needs=(SMALL, SMALL), local_steps=100, workers=("a",))
    world.do(ClockTick)
    wait(world, 1, (0, 0, "move"), (1, 1, "train"))
    assert [world.state.subnets[k].lease.queued for k in (0, 1)] == [False, False]
    wait(world, 1, (0, 0, "wait"), (1, 2, "train"))
    assert [world.state.subnets[k].lease.queued for k in (0, 1)] == [True, False]
    world.join("b")
    assert (world.running[-1].worker, world.running[-1].lease.subnet) == ("b", 0)


def test_a_slow_worker_s_steps_are_judged_by_its_own_pace() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    for step in range(1, 6):
        wait(world, 9, (0, step - 1, "train"))
        wait(world, 1, (0, step, "train"))
    wait(world, 90, (0, 5, "train"))
    assert world.lost == []
    wait(world, 12, (0, 5, "train"))
    assert [c.cause for c in world.lost] == ["hang"]


def test_a_lease_that_is_over_while_its_task_goes_on_for_ever_hangs() -> None:
    world = World(needs=(SMALL,), local_steps=100)
    world.join("a")
    for step in range(1, 5):
        wait(world, 1, (0, step, "train"))
    lease = world.lease_of(0)
    world.now += 11
    world.do(ClockTick)  # the worker was silent
    assert [c.cause for c in world.lost] == ["lease"]
    world.now += 61
    world.do(ClockTick)
    assert world.send(Heartbeat, lease, steps=4) is Reply.HUNG


def damage_twice(world: World) -> None:
    for fault in (Reply.CORRUPT, Reply.WRONG_SHAPE):
        assert world.leases[-1].worker == "a"
        assert world.send(Pushed, world.lease_of(0), steps=STEPS, fault=fault) is fault
        world.end(world.lease_of(0))


def test_after_two_damaged_pushes_a_worker_is_leased_nothing_that_another_can_take() -> None:
    world = World(needs=(SMALL,))
    world.join("a")
    damage_twice(world)
    assert world.leases[-1].worker == "a"  # nobody else is there
    world.join("b")
    world.send(Pushed, world.lease_of(0), steps=STEPS, fault=Reply.CORRUPT)
    assert world.leases[-1].worker == "b"
    world.end(world.leases[-2].lease)
    world.do(WorkerLeft, worker="b")
    assert world.leases[-1].worker == "a"
