"""Keep a run's nodes at the requested count: list the machines, let `reconcile` decide, and carry out its commands.

Runs on the head node. The cloud's list of machines by tag is the truth, never the answer to a request, which may be
lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from idletrain.cloud import machine_log, reconcile
from idletrain.cloud.account import CloudAccount
from idletrain.cloud.machines import (
    ALIVE_STATES,
    ENDED_STATES,
    RUNNING_STATES,
    SPOT_INTERRUPTION,
    TAG,
    Instance,
    LaunchOutcome,
    NodeRequest,
    Pool,
)
from idletrain.cloud.reconcile import FleetMachine, Launch, PoolTimes, Terminate
from idletrain.cloud.record import RunRecord
from idletrain.errors import IdletrainError
from idletrain.observe import cost

logger = logging.getLogger(__name__)
PRICE_CHECK_SECONDS = 600.0  # spot prices move by the hour; one call
UNSEEN_SECONDS = 60.0  # until a launched machine must be listed; EC2 promises no time
COUNTED_STATES = (*ALIVE_STATES, *ENDED_STATES)


@dataclass(frozen=True)
class UnansweredRequest:
    """A launch request that the cloud has not answered, and that is sent again as it was.

    Attributes:
        launch: What was decided.
        request: What is sent.
        tries: How often it was sent, less one.
        due: When it is sent again, in seconds of the monotonic clock.
    """

    launch: Launch
    request: NodeRequest
    tries: int
    due: float


class FleetController:
    """Launch and terminate one run's nodes; as a sink of the run's events, it learns which machines have workers.

    Decisions follow the monotonic clock: the wall clock may be set, and differ from the cloud's, which says when a
    machine was launched.

    Args:
        account: The account.
        record: The run's record.
        scheduler: Address of the Dask scheduler that nodes connect to.

    Attributes:
        waiting_for: Why nodes are missing, in the cloud's words, or empty.
        idle_since: Since when there is no worker, in seconds of the monotonic clock; None while there is one.
    """

    def __init__(self, account: CloudAccount, record: RunRecord, scheduler: str) -> None:
        self._account, self._record = account, record
        self._tags = {**record.tags, TAG + "scheduler": scheduler, TAG + "slots": f"{record.most_slots}"}
        self._tags[TAG + "slot-bytes"] = f"{record.need_bytes}"
        self._prices = dict(record.prices)
        self._workers: dict[str, str] = {}
        self._first_seen: dict[str, float] = {}
        self._joined: set[str] = set()
        self._workerless: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._at_risk: set[str] = set()
        self._ended: set[str] = set()
        self._times = PoolTimes()
        self._unanswered: UnansweredRequest | None = None
        self.waiting_for = ""
        self._attempts = self._failed_lists = 0
        self._pools_in_use: set[Pool] = set()
        self._expected: dict[str, FleetMachine] = {}
        self._events: list[Mapping[str, Any]] = []
        self._reported_count = 0
        self._report: Callable[..., None] | None = None
        self._detached = False
        self._changed = asyncio.Event()
        self.idle_since: float | None = time.monotonic()

    def attach(self, report: Callable[..., None]) -> None:
        """Pass all fleet events to `report`: those so far at once, later ones as they happen."""
        self._report = report
        self._flush()

    def detach(self) -> None:
        """Stop changing the fleet and reporting events: the run has ended, and teardown completes its machine log."""
        self._report, self._detached = None, True

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Update the state of machines from one of the run's events."""
        worker = event.get("worker", "")
        match event["kind"]:
            case "run_started":  # its workers join now; those of a sweep's trial before may have left unseen
                self._workers.clear()
                self.idle_since = time.monotonic()
            case "worker_joined":
                self._workers[worker] = machine = event["name"].rsplit("-", 2)[0]
                self._joined.add(machine)
                self._workerless.pop(machine, None)
                self.idle_since = None
            case "worker_left" if worker in self._workers:
                machine = self._workers.pop(worker)
                if machine not in self._workers.values():
                    self._workerless[machine] = time.monotonic()
                if not self._workers:
                    self.idle_since = time.monotonic()
                self._changed.set()
            case "worker_notice" if worker in self._workers:
                self._leaving.add(self._workers[worker])
                self._changed.set()
            case "worker_at_risk" if worker in self._workers:
                self._at_risk.add(self._workers[worker])
                self._changed.set()

    @property
    def idle_seconds(self) -> float:
        """Seconds since when there is no worker; 0 while there is one."""
        return time.monotonic() - self.idle_since if self.idle_since is not None else 0.0

    @property
    def spent_usd(self) -> float:
        """USD that the machines have cost so far, earlier sessions of the run included."""
        return self._record.spent_usd + cost.accrued(self._events, time.time()).spent_usd

    async def run(self) -> None:
        """Reconcile the fleet until cancelled; whatever the cloud answers, it is asked again."""
        while True:
            self._changed.clear()
            pause = await self.check()
            try:
                await asyncio.wait_for(self._changed.wait(), pause)
            except TimeoutError:
                continue

    async def check(self) -> float:
        """Reconcile the fleet once; return the seconds until the next check, unless an event comes before."""
        try:
            instances = await asyncio.to_thread(self._account.instances, self._record.run, COUNTED_STATES)
        except IdletrainError as error:  # training continues; missing nodes are launched once the cloud answers again
            self._wait_for(str(error))
            self._failed_lists += 1
            return _pause(self._failed_lists)
        self._failed_lists = 0
        self._log_machines(instances)
        self._forget_carried_out(instances)
        if self._detached:
            return reconcile.CHECK_SECONDS
        self._pools_in_use = {i.pool for i in instances if i.state in RUNNING_STATES}
        now = time.monotonic()
        machines = [self._machine(i, now) for i in instances if i.role == "worker" and i.state in RUNNING_STATES]
        return await self._keep(machines + self._unseen(instances, now), now)

    async def _keep(self, machines: list[FleetMachine], now: float) -> float:
        """Carry out what `reconcile` decides on these machines; return the seconds until the next check."""
        wanted, budget = self._record.wanted, self._record.job["nodes"]["budget_usd"]
        allowed = cost.launches_allowed(self.spent_usd, budget)
        may_launch = allowed and reconcile.missing_count(wanted, machines, now) > 0
        if not may_launch:
            self._unanswered = None
            self._forget_wait(machines)
        changed = any(machine.workerless_since is not None for machine in machines)
        commands = reconcile.decide(wanted, machines, self._times, allowed, now)
        launches = [command for command in commands if isinstance(command, Launch)]
        for launch in [self._unanswered.launch] if self._unanswered else launches:
            changed |= await self._launch(launch)
        for command in commands:
            if isinstance(command, Terminate):
                await self._terminate(command)
                changed = True
        if self._unanswered:
            return min(max(self._unanswered.due - time.monotonic(), 0.0), reconcile.CHECK_SECONDS)
        return reconcile.next_check_seconds(
            wanted, self._times, changed=changed, may_launch=may_launch, now=time.monotonic()
        )

    async def _terminate(self, command: Terminate) -> None:
        logger.info("terminating %s: %s", ", ".join(command.ids), command.why)
        self._ended.update(command.ids)
        try:
            await asyncio.to_thread(self._account.terminate, command.ids)
        except IdletrainError as error:  # the next check tries again, and they end at their deadline
            logger.warning("%s", error)

    def _new_request(self, launch: Launch) -> NodeRequest:
        """Return the request for a launch; every head node and every attempt has one of its own."""
        record = self._record
        self._attempts += 1
        attempt = f"{record.run}/{record.created}/{record.generation}/{self._attempts}"
        max_price = record.job["nodes"]["max_price"]
        return NodeRequest(
            pools=launch.pools, count=launch.count, attempt=attempt, tags=self._tags, max_price=max_price
        )

    async def _launch(self, launch: Launch) -> bool:
        """Request nodes and return whether there are any; a request without an answer is repeated as it was, as it may
        have been carried out.
        """
        sent = self._unanswered or UnansweredRequest(launch, self._new_request(launch), 0, 0.0)
        if sent.due > time.monotonic():
            return False
        self._times = self._times.after_request(launch.pools, time.monotonic())
        call = asyncio.to_thread(self._account.start_nodes, self._record.site, sent.request)
        outcome = await _finish_uncancelled(asyncio.ensure_future(call))
        now = time.monotonic()
        if outcome.repeat:
            self._unanswered = replace(sent, tries=sent.tries + 1, due=time.monotonic() + _pause(sent.tries + 1))
            self._wait_for(outcome.why)
            return False
        self._unanswered = None
        self._expected |= {machine.id: FleetMachine(machine.id, machine.pool, now) for machine in outcome.machines}
        self._times = reconcile.after_launch(self._times, launch, len(outcome.machines), outcome.unavailable, now)
        if len(outcome.machines) < launch.count:
            self._wait_for(outcome.why or f"no capacity for a node in {len(launch.pools)} pools")
        return bool(outcome.machines)

    def _forget_carried_out(self, instances: list[Instance]) -> None:
        """Forget a request without an answer once all of its machines are listed, also those that have ended.

        Of one that is listed in part, the rest may be there unlisted, or not at all: sent again, it says which.
        """
        if not self._unanswered:
            return
        attempt = self._unanswered.request.attempt
        if sum(i.attempt == attempt for i in instances) >= self._unanswered.launch.count:
            self._unanswered = None

    def _wait_for(self, why: str) -> None:
        """Report why nodes are missing, once for each reason; the cloud is asked again."""
        logger.warning("%s; asked again", why)
        if why != self.waiting_for:
            self.waiting_for = why
            self._log("waiting", reason=f"{why}; the cloud is asked again")

    def _forget_wait(self, machines: list[FleetMachine]) -> None:
        """Forget why nodes were missing once they are there."""
        if len(machines) >= self._record.wanted.count:
            self.waiting_for = ""

    def _unseen(self, instances: list[Instance], now: float) -> list[FleetMachine]:
        """Return launched machines that the cloud does not list yet: its list is only eventually consistent."""
        seen = {instance.id for instance in instances}
        self._expected = {
            id_: machine
            for id_, machine in self._expected.items()
            if id_ not in seen and now - machine.launched_at < UNSEEN_SECONDS
        }
        return list(self._expected.values())

    def _machine(self, instance: Instance, now: float) -> FleetMachine:
        return FleetMachine(
            id=instance.id,
            pool=instance.pool,
            launched_at=self._first_seen.setdefault(instance.id, now),
            joined=instance.id in self._joined,
            workerless_since=self._workerless.get(instance.id),
            leaving=instance.id in self._leaving,
            at_risk=instance.id in self._at_risk,
        )

    def _log_machines(self, instances: list[Instance]) -> None:
        """Log new and ended machines; a pool is dry that took a machine back, or whose machine ended before it had a
        worker and not by us: else one that gives machines that cannot boot would be asked every second.
        """
        events = machine_log.new_records(self._events, instances, self._record, self._prices, time.time())
        ended = {event["instance"]: event["reason"] for event in events if event["kind"] == "instance_ended"}
        ours = self._joined | self._ended
        failed = {i.pool for i in instances if ended.get(i.id) == SPOT_INTERRUPTION or i.id in ended.keys() - ours}
        self._times = self._times.after_failure(failed, time.monotonic())
        self._events += events
        self._flush()

    async def follow_prices(self) -> None:
        """Log the spot prices of the pools in use as they change, until cancelled; apart from `run`, as AWS may take a
        minute to answer.
        """
        while True:
            await asyncio.sleep(PRICE_CHECK_SECONDS)
            await self.update_prices()

    async def update_prices(self) -> None:
        """Fetch the spot prices of the pools in use and log those that changed."""
        pools = {pool for pool in self._pools_in_use if pool.market == "spot"}
        if not pools or self._detached:
            return
        try:
            now = await asyncio.to_thread(self._account.spot_prices, {pool.type for pool in pools})
        except IdletrainError as error:
            logger.warning("spot prices could not be updated, the earlier ones are used: %s", error)
            return
        changed = {
            p: now[p.type, p.zone] for p in pools if now.get((p.type, p.zone)) not in (None, self._prices.get(p))
        }
        for pool, price in changed.items():
            self._log("spot_price", type=pool.type, zone=pool.zone, usd_per_hour=price)
        self._prices |= changed

    def _log(self, kind: str, **fields: Any) -> None:
        self._events.append({"kind": kind, "t": time.time(), **fields})
        self._flush()

    def _flush(self) -> None:
        if self._report is not None:
            for event in self._events[self._reported_count :]:
                self._report(**event)
            self._reported_count = len(self._events)


def _pause(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return reconcile.pause_seconds(failures - 1, random.random())  # noqa: S311 (no secret)


async def _finish_uncancelled(call: asyncio.Future[LaunchOutcome]) -> LaunchOutcome:
    """Await a launch request; on cancellation, wait until it is answered first, so that its machines can be ended."""
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait((call,))
        raise
