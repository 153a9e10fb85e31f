"""Keeps a run's nodes: looks what is there, asks `reconcile` what is missing, and carries it out.

Lives in the head. The truth is the cloud's list of machines by tag, never the answer to a request, which may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from idletrain.cloud import machine_log, reconcile
from idletrain.cloud.aws import requests
from idletrain.cloud.aws.account import RUNNING_STATES, Account, Instance
from idletrain.cloud.aws.requests import TAG, LaunchOutcome, Pool
from idletrain.cloud.reconcile import FleetMachine, Launch, Terminate
from idletrain.cloud.record import RunRecord
from idletrain.errors import RunError
from idletrain.observe import cost

logger = logging.getLogger(__name__)
PRICE_CHECK_SECONDS = 600.0  # spot prices move by the hour; one call
RECONCILE_SECONDS = 10.0  # six descriptions a minute, whatever the number of nodes
LAUNCH_RETRY_SECONDS = 1.0
UNSEEN_SECONDS = 60.0  # for a launched machine to be listed; EC2 promises no time
COUNTED_STATES = ("pending", "running", "stopping", "stopped", "shutting-down", "terminated")
INTERRUPTED = "Server.SpotInstanceTermination"


class FleetController:
    """One run's fleet; also a sink of the run's events, from which it learns which machines have workers.

    Args:
        account: The account.
        record: The run.
        scheduler: The address that nodes join.
    """

    def __init__(self, account: Account, record: RunRecord, scheduler: str) -> None:
        self._account, self._record = account, record
        self._tags = {**record.tags, TAG + "scheduler": scheduler, TAG + "slots": f"{record.most_slots}"}
        self._tags[TAG + "slot-bytes"] = f"{record.need_bytes}"
        self._prices = dict(record.prices)
        self._workers: dict[str, str] = {}
        self._joined: set[str] = set()
        self._workerless: dict[str, float] = {}
        self._leaving: set[str] = set()
        self._at_risk: set[str] = set()
        self._dry: dict[Pool, float] = {}
        self._unanswered: tuple[Launch, dict[str, Any]] | None = None
        self._attempts = 0
        self._prices_due = time.monotonic() + PRICE_CHECK_SECONDS
        self._expected: dict[str, FleetMachine] = {}
        self._news: list[Mapping[str, Any]] = []
        self._told = 0
        self._tell: Callable[..., None] | None = None
        self._over = False
        self._changed = asyncio.Event()
        self.idle_since: float | None = time.monotonic()

    def attach(self, report: Callable[..., None]) -> None:
        """Record what happens from here on, and what has happened."""
        self._tell = report
        self._flush()

    def detach(self) -> None:
        """Leave the fleet as it is and tell nobody: the run is over, and who takes it down closes its books."""
        self._tell, self._over = None, True

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one of the run's events."""
        worker = event.get("worker", "")
        match event["kind"]:
            case "worker_joined":
                self._workers[worker] = machine = event["name"].rsplit("-", 2)[0]
                self._joined.add(machine)
                self._workerless.pop(machine, None)
                self.idle_since = None
            case "worker_left" if worker in self._workers:
                machine = self._workers.pop(worker)
                if machine not in self._workers.values():
                    self._workerless[machine] = time.time()
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
    def spent_usd(self) -> float:
        """What the machines have cost so far, those of earlier sittings included."""
        return self._record.spent_usd + cost.accrued(self._news, time.time()).spent_usd

    async def run(self) -> None:
        """Keep the fleet until cancelled.

        Raises:
            RunError: the cloud refuses machines for a reason that waiting does not mend.
        """
        while True:
            self._changed.clear()
            pause = await self.check()
            try:
                await asyncio.wait_for(self._changed.wait(), pause)
            except TimeoutError:
                continue

    async def check(self) -> float:
        """Look, decide, act; returns the seconds until the next look, unless something happens before."""
        try:
            found = await asyncio.to_thread(self._account.instances, self._record.run, COUNTED_STATES)
        except RunError as error:  # training goes on; what is missing can be seen to when the cloud answers again
            logger.warning("%s", error)
            return RECONCILE_SECONDS
        self._account_for(found)
        if self._over:
            return RECONCILE_SECONDS
        if time.monotonic() >= self._prices_due:
            await self._follow_prices(found)
        budget = self._record.job["nodes"]["budget_usd"]
        allowed = cost.launches_allowed(self.spent_usd, budget)
        now, acted = time.time(), False
        machines = [self._machine(i) for i in found if i.role == "worker" and i.state in RUNNING_STATES]
        machines += self._unseen(found, now)
        if self._unanswered:
            await self._launch(*self._unanswered)
            return LAUNCH_RETRY_SECONDS
        for command in reconcile.decide(self._record.wanted, machines, self._dry, allowed, now):
            match command:
                case Terminate(ids, why):
                    logger.info("terminating %s: %s", ", ".join(ids), why)
                    try:
                        await asyncio.to_thread(self._account.terminate, ids)
                    except RunError as error:  # they are looked for again, and end at their deadline
                        logger.warning("%s", error)
                case Launch():
                    self._attempts += 1
                    await self._launch(command, self._body(command))
            acted = True
        soon = acted or any(m.workerless_since is not None for m in machines)
        return LAUNCH_RETRY_SECONDS if soon else RECONCILE_SECONDS

    def _body(self, launch: Launch) -> dict[str, Any]:
        """A request of its own: another head, or another attempt, has another token."""
        record = self._record
        attempt = f"{record.run}/{record.created}/{record.generation}/{self._attempts}"
        price = record.job["nodes"]["max_price"]
        return requests.fleet(record.site, launch.pools, launch.count, attempt, self._tags, price)

    async def _launch(self, launch: Launch, body: dict[str, Any]) -> None:
        calling = asyncio.to_thread(self._account.start_nodes, self._record.site, body, launch.pools)
        outcome = await _to_its_end(asyncio.ensure_future(calling))
        self._unanswered = (launch, body) if outcome.retry else None
        if outcome.retry:
            return
        requests.refuse_fatal(outcome, "nodes")
        now = time.time()
        self._expected |= {made.id: FleetMachine(made.id, made.pool, now) for made in outcome.machines}
        self._dry |= reconcile.after_launch(launch, len(outcome.machines), outcome.without_capacity, now)
        if outcome.quota:
            self._note("waiting", reason=f"the account's quota is used up ({outcome.quota}); ask AWS for more")

    def _unseen(self, instances: list[Instance], now: float) -> list[FleetMachine]:
        """Machines that were launched and are not in the cloud's list yet, as it is consistent after a while only."""
        seen = {instance.id for instance in instances}
        self._expected = {
            id_: machine
            for id_, machine in self._expected.items()
            if id_ not in seen and now - machine.launched_at < UNSEEN_SECONDS
        }
        return list(self._expected.values())

    def _machine(self, instance: Instance) -> FleetMachine:
        return FleetMachine(
            id=instance.id,
            pool=instance.pool,
            launched_at=instance.launched_at,
            joined=instance.id in self._joined,
            workerless_since=self._workerless.get(instance.id),
            leaving=instance.id in self._leaving,
            at_risk=instance.id in self._at_risk,
        )

    def _account_for(self, instances: list[Instance]) -> None:
        """Note machines that are new and machines that have ended; a pool that takes back is dry for a while."""
        news = machine_log.new_records(self._news, instances, self._record, self._prices, time.time())
        taken = {event["instance"] for event in news if event.get("reason") == INTERRUPTED}
        self._dry |= {i.pool: time.time() + reconcile.CAPACITY_RETRY_SECONDS for i in instances if i.id in taken}
        self._news += news
        self._flush()

    async def _follow_prices(self, instances: list[Instance]) -> None:
        """Note which spot machines cost more or less than they did."""
        self._prices_due = time.monotonic() + PRICE_CHECK_SECONDS
        pools = {i.pool for i in instances if i.pool.market == "spot" and i.state in RUNNING_STATES}
        if not pools:
            return
        try:
            now = await asyncio.to_thread(self._account.spot_prices, {pool.type for pool in pools})
        except RunError as error:
            logger.warning("spot prices are those of before: %s", error)
            return
        changed = {
            p: now[p.type, p.zone] for p in pools if now.get((p.type, p.zone)) not in (None, self._prices.get(p))
        }
        for pool, price in changed.items():
            self._note("spot_price", type=pool.type, zone=pool.zone, usd_per_hour=price)
        self._prices |= changed

    def _note(self, kind: str, **fields: Any) -> None:
        self._news.append({"kind": kind, "t": time.time(), **fields})
        self._flush()

    def _flush(self) -> None:
        if self._tell is not None:
            for event in self._news[self._told :]:
                self._tell(**event)
            self._told = len(self._news)


async def _to_its_end(calling: asyncio.Future[LaunchOutcome]) -> LaunchOutcome:
    """Await a request that makes machines; who cancels us waits until they are made, so that they can be ended."""
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait((calling,))
        raise
