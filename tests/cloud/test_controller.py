"""The fleet's keeper against a rehearsal cloud whose machines only sleep, and on markets with a clock of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from botocore.exceptions import NoCredentialsError
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsal import RECORD, SPOT_POOLS, Sandbox, sleeping

from idletrain.cloud import controller, reconcile
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.errors import explained
from idletrain.cloud.controller import PRICE_CHECK_SECONDS, UNSEEN_SECONDS, FleetController
from idletrain.cloud.machines import Pool
from idletrain.cloud.reconcile import CHECK_SECONDS, DesiredFleet, FleetMachine

from .simulated_market import CapacityTrace, Pace, SimulatedMarket

SECONDS = 20.0
SPOT = tuple(Pool("spot", name, "a") for name in ("c7i", "m7i", "r7i"))
DEAR = tuple(Pool("on-demand", name, "a") for name in ("c7i", "m7i"))
ASKED_SECONDS = 10.0  # at most from the return of capacity to the request for it
HOUR = 3600.0
Policy = Literal["spot", "on-demand", "auto"]
POOLS: Mapping[Policy, Sequence[Pool]] = {"spot": SPOT, "on-demand": DEAR, "auto": (*SPOT, *DEAR)}
TRACES = st.lists(st.tuples(st.floats(0.0, 40.0) | st.floats(0.0, 300.0), st.integers(0, 3)), min_size=1, max_size=8)


class ControlledFleet:
    """A fleet that is kept while the context lasts."""

    def __init__(self, account: Account, **wanted: Any) -> None:
        self.account, self.record = account, sleeping(account, **wanted)
        self.records: list[dict[str, Any]] = []

    async def __aenter__(self) -> ControlledFleet:
        self.keeper = FleetController(self.account, self.record, "tls://127.0.0.1:1")
        self.keeper.attach(lambda **event: self.records.append(event))
        self._keeping = asyncio.ensure_future(self.keeper.run())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._keeping.cancel()

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline, f"waited {SECONDS} s for {what}"
            if self._keeping.done():
                self._keeping.result()
            await asyncio.sleep(0.05)

    def alive(self) -> list[str]:
        return sorted(instance.id for instance in self.account.instances(self.record.run, ("pending", "running")))

    def ever(self) -> list[str]:
        states = ("pending", "running", "shutting-down", "terminated")
        return sorted(instance.id for instance in self.account.instances(self.record.run, states))


def calls(cloud: Sandbox, action: str) -> int:
    count: int = cloud.ask("GET", "calls").get("ec2", {}).get(action, 0)
    return count


def joined(worker: str, instance: str) -> dict[str, str]:
    return {"kind": "worker_joined", "worker": worker, "name": f"{instance}-1-0"}


def test_a_lost_reply_launches_nothing_twice(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        cloud.ask("POST", "fault", action="CreateFleet", mode="drop-reply", times=1)
        async with ControlledFleet(account) as fleet:
            await fleet.until("the fault", lambda: cloud.ask("GET", "faults") == [])
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            for _ in range(2):
                await fleet.keeper.check()
            assert len(fleet.ever()) == 2

    asyncio.run(check())
    assert cloud.ask("GET", "faults") == []


def test_a_request_that_is_listed_in_part_is_not_replaced_by_a_new_one(
    cloud: Sandbox, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.ask("POST", "fault", action="CreateFleet", mode="drop-reply", times=1)
    keeper = FleetController(account, sleeping(account, count=4), "tls://127.0.0.1:1")
    whole, counts = account.instances, []

    def in_part(*arguments: Any) -> list[Any]:
        listed = sorted(whole(*arguments), key=lambda instance: instance.id)
        counts.append(len(listed))
        return listed[:1] if len(counts) < 4 else listed

    monkeypatch.setattr(account, "instances", in_part)

    async def check() -> None:
        for _ in range(6):
            await asyncio.sleep(min(await keeper.check(), 3.0))

    asyncio.run(check())
    assert counts[0] == 0
    assert set(counts[1:]) == {4}
    assert keeper._attempts == 1


def test_a_request_whose_reply_was_lost_is_not_sent_again_once_its_machine_is_listed(
    cloud: Sandbox, account: Account
) -> None:
    async def check() -> None:
        unanswered: tuple[dict[str, Any], ...] = (*({"mode": "empty", "status": 503},) * 2, {"mode": "drop-reply"})
        for fault in unanswered:
            cloud.ask("POST", "fault", action="CreateFleet", **fault)
        async with ControlledFleet(account, count=1) as fleet:
            await fleet.until("a machine", lambda: len(fleet.alive()) == 1)
            (first,) = fleet.alive()  # taken before the request is due again
            fleet.keeper(joined(f"tls://{first}", first))
            cloud.ask("POST", "take", instance=first)
            fleet.keeper({"kind": "worker_left", "worker": f"tls://{first}"})
            await fleet.until("a replacement", lambda: len(fleet.ever()) == 2 and len(fleet.alive()) == 1)
        assert cloud.ask("GET", "faults") == []
        assert calls(cloud, "CreateFleet") == len(unanswered) + 1

    asyncio.run(check())


def test_a_part_of_what_was_asked_for_is_kept_and_only_the_rest_asked_for_again(
    cloud: Sandbox, account: Account
) -> None:
    async def check() -> None:
        for pool in SPOT_POOLS:
            cloud.ask(
                "POST", "capacity", market="spot", type=pool.type, zone=pool.zone, count=int(pool is SPOT_POOLS[0])
            )
        async with ControlledFleet(account, policy="auto", count=3) as fleet:
            await fleet.until("three machines", lambda: len(fleet.alive()) == 3)
            markets = sorted(instance.pool.market for instance in account.instances(fleet.record.run))
            assert markets == ["on-demand", "on-demand", "spot"]
            assert len(fleet.ever()) == 3

    asyncio.run(check())


def test_without_capacity_it_waits_and_does_not_ask_all_the_time(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        cloud.ask("POST", "capacity", market="spot", count=0)
        async with ControlledFleet(account) as fleet:
            await fleet.until("a request", lambda: calls(cloud, "CreateFleet") == 1)
            asked = time.monotonic()
            await fleet.until("another one", lambda: calls(cloud, "CreateFleet") > 1)
            assert time.monotonic() - asked > reconcile.CHECK_SECONDS - 1
            assert calls(cloud, "CreateFleet") == 2
            assert fleet.ever() == []
            assert waits(fleet) == ["no capacity for a node in 4 pools; the cloud is asked again"]

    asyncio.run(check())


def test_a_taken_node_is_replaced_and_the_reason_recorded(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        async with ControlledFleet(account) as fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            first, second = fleet.alive()
            for instance in (first, second):
                fleet.keeper(joined(f"tls://{instance}", instance))
            cloud.ask("POST", "take", instance=first)
            fleet.keeper({"kind": "worker_left", "worker": f"tls://{first}"})
            await fleet.until("a replacement", lambda: len(fleet.ever()) == 3 and len(fleet.alive()) == 2)
            await fleet.until("its account", lambda: any(e["kind"] == "instance_ended" for e in fleet.records))
            ends = [event for event in fleet.records if event["kind"] == "instance_ended"]
            assert [(e["instance"], e["reason"]) for e in ends] == [(first, "Server.SpotInstanceTermination")]
            launched = {event["instance"] for event in fleet.records if event["kind"] == "instance_launched"}
            assert {first, second} <= launched <= set(fleet.ever())

    asyncio.run(check())


def test_spending_follows_the_market(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        fleet = ControlledFleet(account)  # whose record has other prices than the cloud
        async with fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
        cloud.ask("POST", "calls/reset")
        await fleet.keeper.check()
        await fleet.keeper.update_prices()
        assert cloud.ask("GET", "calls")["ec2"] == {"DescribeInstances": 1, "DescribeSpotPriceHistory": 1}
        pools = {instance.pool for instance in account.instances(fleet.record.run)}
        prices = account.spot_prices({pool.type for pool in pools})
        records = {(e["type"], e["zone"]): e["usd_per_hour"] for e in fleet.records if e["kind"] == "spot_price"}
        assert records == {(pool.type, pool.zone): prices[pool.type, pool.zone] for pool in pools}

    asyncio.run(check())


def test_what_earlier_sittings_cost_is_spent(cloud: Sandbox, account: Account) -> None:
    before = replace(sleeping(account), spent_usd=1.25)
    assert FleetController(account, before, "tls://127.0.0.1:1").spent_usd == 1.25


def test_workers_that_left_between_two_trials_are_not_thought_to_be_there(account: Account) -> None:
    fleet = FleetController(account, sleeping(account), "tls://127.0.0.1:1")
    fleet(joined("tls://w", "i-1"))
    assert fleet.idle_since is None
    began = time.monotonic()
    fleet({"kind": "run_started"})  # the next trial, whose workers join now
    assert fleet.idle_since is not None
    assert fleet.idle_since >= began
    fleet(joined("tls://w", "i-1"))
    assert fleet.idle_since is None


def test_a_machine_that_lost_its_worker_is_ended_and_replaced(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        async with ControlledFleet(account, count=1) as fleet:
            await fleet.until("a machine", lambda: len(fleet.alive()) == 1)
            (first,) = fleet.alive()
            fleet.keeper(joined("tls://w", first))
            fleet.keeper({"kind": "worker_left", "worker": "tls://w"})
            await fleet.until("its end", lambda: bool(fleet.alive()) and first not in fleet.alive())
            assert len(fleet.ever()) == 2

    asyncio.run(check())


def test_a_machine_that_cannot_be_ended_now_is_ended_later(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        async with ControlledFleet(account, count=1) as fleet:
            await fleet.until("a machine", lambda: len(fleet.alive()) == 1)
            (first,) = fleet.alive()
            cloud.ask("POST", "fault", action="TerminateInstances", code="UnauthorizedOperation", status=403, times=2)
            fleet.keeper(joined("tls://w", first))
            fleet.keeper({"kind": "worker_left", "worker": "tls://w"})
            await fleet.until("its end", lambda: first not in fleet.alive())
        assert cloud.ask("GET", "faults") == []

    asyncio.run(check())


def waits(fleet: ControlledFleet) -> list[str]:
    return [event["reason"] for event in fleet.records if event["kind"] == "waiting"]


def test_what_the_cloud_refuses_is_reported_in_its_words_and_asked_for_again(
    cloud: Sandbox, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "CHECK_SECONDS", 0.5)

    async def check() -> None:
        cloud.ask("POST", "fault", action="CreateFleet", code="UnauthorizedOperation", message="No", status=403)
        async with ControlledFleet(account) as fleet:
            await fleet.until("a refusal", lambda: bool(waits(fleet)))
            assert fleet.ever() == []
            why = "AWS refuses CreateFleet: UnauthorizedOperation: No"
            assert fleet.keeper.waiting_for == why
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            await fleet.until("its end", lambda: not fleet.keeper.waiting_for)
            assert waits(fleet) == [f"{why}; the cloud is asked again"]

    asyncio.run(check())
    assert cloud.ask("GET", "faults") == []


@pytest.mark.parametrize(
    "fault",
    [
        {"mode": "empty", "status": 503},
        {"mode": "html", "status": 500},
        {"mode": "html", "status": 200},
        {"code": "RequestExpired"},
        {"code": "ExpiredToken", "status": 403},
        {"code": "NobodyKnowsThisError", "status": 500},
    ],
)
def test_what_is_no_answer_is_asked_again_with_the_same_request(
    cloud: Sandbox, account: Account, fault: dict[str, Any]
) -> None:
    async def check() -> None:
        cloud.ask("POST", "fault", action="CreateFleet", times=2, **fault)
        async with ControlledFleet(account) as fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            assert calls(cloud, "CreateFleet") == 3
            (why,) = waits(fleet)
            assert why.startswith("AWS ")
            assert fleet.keeper._attempts == 1

    asyncio.run(check())
    assert cloud.ask("GET", "faults") == []


def test_late_credentials_end_no_run(account: Account) -> None:
    async def check() -> None:
        fleet = ControlledFleet(account)
        async with fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
        broken = SimpleNamespace(instances=refused_for_lack_of_credentials)
        keeper = FleetController(broken, fleet.record, "tls://127.0.0.1:1")  # type: ignore[arg-type]
        assert await keeper.check() > 0
        assert "there are no credentials" in keeper.waiting_for

    asyncio.run(check())


def refused_for_lack_of_credentials(*_: Any) -> None:
    with explained():
        raise NoCredentialsError


def test_a_machine_that_is_not_listed_yet_is_not_launched_again(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        fleet = ControlledFleet(account)
        async with fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
        unlisted = FleetController(account, replace(fleet.record, generation=1), "tls://127.0.0.1:1")
        unlisted._expected = {id_: FleetMachine(id_, SPOT_POOLS[0], time.monotonic()) for id_ in ("i-1", "i-2")}
        account.terminate(fleet.alive())
        await unlisted.check()
        assert fleet.alive() == []
        unlisted._expected = {
            id_: FleetMachine(id_, SPOT_POOLS[0], time.monotonic() - UNSEEN_SECONDS) for id_ in ("i-1", "i-2")
        }
        await unlisted.check()
        assert len(fleet.alive()) == 2

    asyncio.run(check())


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_wrong_clock_ends_no_machine(account: Account, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """The clock says when machines cost something, and nothing else: the cloud's own clock tells when one began."""
    wrong = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    monkeypatch.setattr(controller, "time", wrong)

    async def check() -> None:
        async with ControlledFleet(account) as fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            for _ in range(3):
                await fleet.keeper.check()
            assert len(fleet.ever()) == 2
            (launched, _) = (record["t"] for record in fleet.records if record["kind"] == "instance_launched")
            assert abs(launched - time.time()) < 600  # as the cloud says

    asyncio.run(check())


def test_a_cloud_that_does_not_answer_ends_no_run(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        async with ControlledFleet(account) as fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            described = calls(cloud, "DescribeInstances")
            cloud.ask("POST", "fault", action="DescribeInstances", code="UnauthorizedOperation", status=403, times=1)
            assert await fleet.keeper.check() > 0
            assert calls(cloud, "DescribeInstances") > described
            assert "UnauthorizedOperation" in waits(fleet)[0]
        assert len(fleet.alive()) == 2

    asyncio.run(check())


def test_throttling_is_waited_out_with_the_same_request(cloud: Sandbox, account: Account) -> None:
    async def check() -> None:
        cloud.ask("POST", "fault", action="CreateFleet", code="RequestLimitExceeded", status=503, times=2)
        async with ControlledFleet(account) as fleet:
            await fleet.until("two machines", lambda: len(fleet.alive()) == 2)
            assert calls(cloud, "CreateFleet") == 3

    asyncio.run(check())


def test_a_look_at_a_whole_fleet_is_one_call_so_that_there_are_at_most_twelve_a_minute(
    cloud: Sandbox, account: Account
) -> None:
    async def check() -> None:
        fleet = ControlledFleet(account, count=100)
        async with fleet:
            await fleet.until("a hundred machines", lambda: len(fleet.alive()) == 100)
        for instance in fleet.alive():
            fleet.keeper(joined(f"tls://{instance}", instance))
        cloud.ask("POST", "calls/reset")
        pauses = [await fleet.keeper.check() for _ in range(3)]
        assert cloud.ask("GET", "calls") == {"ec2": {"DescribeInstances": 3}}
        assert all(60 / pause <= 12 for pause in pauses)

    asyncio.run(check())


# --- on a clock of its own --------------------------------------------------------------------------------------------


def kept(
    policy: Policy, count: int, traces: Mapping[Pool, CapacityTrace], pace: Pace, seconds: float
) -> SimulatedMarket:
    """A market on which a fleet was kept for some seconds."""
    market = SimulatedMarket(count, traces, pace)
    job = {"nodes": {"budget_usd": None, "max_price": None}}
    wanted = DesiredFleet(count, policy, tuple(traces))
    logging.disable()  # each refusal is logged, of which there are thousands here
    try:
        market.keep(replace(RECORD, job=job, wanted=wanted, prices=dict.fromkeys(traces, 0.1)), seconds)
    finally:
        logging.disable(logging.NOTSET)
    return market


def after(spans: CapacityTrace) -> CapacityTrace:
    """The trace of (seconds, machines) after one another."""
    begins = [sum(seconds for seconds, _ in spans[: n + 1]) for n in range(len(spans))]
    return [(begin, count) for begin, (_, count) in zip(begins, spans, strict=True)]


@settings(max_examples=50)
@given(st.data(), st.sampled_from(("spot", "on-demand", "auto")), st.integers(1, 4))
def test_capacity_that_is_there_is_asked_for_within_ten_seconds(
    data: st.DataObject, policy: Policy, count: int
) -> None:
    """Also with calls that take seconds, machines that are taken while they boot, and a cloud that falls silent: the
    time counts from its next answer.
    """
    pools = data.draw(st.lists(st.sampled_from(POOLS[policy]), min_size=1, unique=True), "pools")
    traces = {pool: after(data.draw(TRACES, f"{pool}")) for pool in pools}
    silences = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), max_size=3), "silences")
    calls = {"instances": data.draw(st.floats(0.0, 0.9)), "start_nodes": data.draw(st.floats(0.0, 2.0))}
    silent = {first + n for first, length in silences for n in range(length)}
    pace = Pace({**calls, "terminate": 0.5}, data.draw(st.sampled_from((0.0, 5.0, 60.0)), "boot"), silent)
    market = kept(policy, count, traces, pace, 400.0)
    assert max(market.longest.values()) <= ASKED_SECONDS


@pytest.mark.parametrize(("policy", "markets"), [("spot", 1), ("auto", 2)])
def test_an_hour_without_capacity_costs_a_call_of_each_kind_in_seven_seconds_and_market(
    policy: Policy, markets: int
) -> None:
    market = kept(policy, 2, {pool: [] for pool in POOLS[policy]}, Pace(), HOUR)
    most = HOUR / CHECK_SECONDS * markets + markets
    assert 0.9 * most < market.calls["start_nodes"] <= most
    assert market.calls["instances"] <= most


def test_an_hour_with_a_whole_fleet_costs_a_list_in_seven_seconds_and_its_prices() -> None:
    market = kept("spot", 2, {SPOT[0]: [(0.0, 2)]}, Pace(), HOUR + 1)
    assert market.calls["start_nodes"] <= 2  # one before there is capacity
    assert market.calls["instances"] <= HOUR / CHECK_SECONDS + 3
    assert market.calls["spot_prices"] == HOUR / PRICE_CHECK_SECONDS


def test_a_pool_whose_machines_do_not_boot_is_not_asked_all_the_time() -> None:
    seconds = 600.0
    market = kept("spot", 1, {SPOT[0]: [(0.0, 9)]}, Pace(boot=None), seconds)
    assert seconds / CHECK_SECONDS * 0.8 < market.calls["start_nodes"] <= seconds / CHECK_SECONDS + 2


def test_nothing_waits_for_prices() -> None:
    taken = PRICE_CHECK_SECONDS + 5.0  # while the cloud still looks the prices up
    traces = {SPOT[0]: [(0.0, 1), (taken, 0)], SPOT[1]: [(taken + 5.0, 1)]}
    market = kept("spot", 1, traces, Pace({"spot_prices": 90.0}), taken + 60.0)
    assert market.calls["spot_prices"] == 1
    assert max(market.longest.values()) <= ASKED_SECONDS


def test_pools_that_are_due_at_different_times_do_not_keep_the_other_market_waiting() -> None:
    """Each spot pool takes its machine back in another second, so that there is always one whose time has come."""
    spot = [Pool("spot", f"m{n}", "a") for n in range(12)]
    taken = {pool: [(0.0, 1), (20.0 + n, 0)] for n, pool in enumerate(spot)}
    market = kept("auto", 12, {**taken, DEAR[0]: [(20.0, 0), (40.0, 1), (60.0, 12)]}, Pace(), 200.0)
    assert market.calls["start_nodes"] > 10
    assert market.longest[DEAR[0]] <= ASKED_SECONDS
