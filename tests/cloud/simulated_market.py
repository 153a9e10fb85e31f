"""A cloud whose capacity follows a trace, on a clock that jumps from event to event: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from idletrain.cloud import controller
from idletrain.cloud.machines import (
    SPOT_INTERRUPTION,
    TAG,
    Instance,
    LaunchedMachine,
    LaunchOutcome,
    LaunchSite,
    NodeRequest,
    Pool,
)
from idletrain.cloud.record import RunRecord
from idletrain.cloud.sandbox.capacity import CapacityOffer, CapacityPool, Limit, grant_capacity
from idletrain.errors import RunError

CapacityTrace = Sequence[
    tuple[float, int]
]  # seconds since the beginning, and the machines that there may be from then on


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, and whose threads' calls take `call_seconds` of it."""

    def __init__(self, call_seconds: Callable[[Any], float]) -> None:
        self.now, self._call_seconds = 1e6, call_seconds
        super().__init__(selectors.DefaultSelector())
        real_select = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None = None) -> Any:
            assert timeout is not None, "everything waits for nothing"
            self.now += timeout
            return real_select(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Call at once, and answer when the call has taken its time."""
        answer = self.create_future()
        name = func.args[0].__name__  # type: ignore[attr-defined]  # of `asyncio.to_thread`
        try:
            settle = answer.set_result, func(*args)
        except Exception as error:
            settle = answer.set_exception, error
        self.call_later(self._call_seconds(name), lambda: answer.cancelled() or settle[0](settle[1]))
        return answer


@dataclass(frozen=True)
class Pace:
    """How long things take, in seconds, and which calls get no answer.

    Attributes:
        calls: Calls of the cloud, by the account's method.
        boot: From a launch to the machine's worker; None where none ever boots and all end at once.
        silent: Numbers of the lists and launches, from 0 on, that the cloud does not answer.
    """

    calls: Mapping[str, float] = field(default_factory=dict)
    boot: float | None = 0.0
    silent: Collection[int] = ()


class SimulatedMarket:
    """An account whose pools have as many machines as their traces say; it takes machines where capacity falls.

    Attributes:
        longest: For how long a pool had capacity that a fleet lacked and nobody asked for, at most, in seconds.
        calls: Number of calls, by name.
    """

    def __init__(self, wanted: int, traces: Mapping[Pool, CapacityTrace], pace: Pace = Pace()) -> None:
        self._wanted, self._traces, self._pace = wanted, traces, pace
        self._counts = dict.fromkeys(traces, 0)
        self._alive: dict[str, Pool] = {}
        self._listed: dict[str, Instance] = {}
        self._joined: set[str] = set()
        self._unasked_since: dict[Pool, float] = {}
        self._loop = JumpingLoop(lambda name: pace.calls.get(name, 0.0))
        self._tell: Callable[[Mapping[str, Any]], None] = lambda _event: None
        self.longest = dict.fromkeys(traces, 0.0)
        self.calls: Counter[str] = Counter()

    def keep(self, record: RunRecord, seconds: float) -> None:
        """Let a controller keep a run's fleet for some seconds of the clock."""
        clock = SimpleNamespace(time=self._loop.time, monotonic=self._loop.time)
        with contextlib.closing(self._loop), pytest.MonkeyPatch.context() as patch:
            patch.setattr(controller, "time", clock)
            patch.setattr(controller, "random", SimpleNamespace(random=lambda: 0.999))  # the longest pauses
            self._tell = keeper = controller.FleetController(self, record, "tls://127.0.0.1:1")  # type: ignore[arg-type]
            begin = self._loop.now
            for pool, trace in self._traces.items():
                for at, count in trace:
                    self._loop.call_at(begin + at, self._change, pool, count)
            with contextlib.suppress(TimeoutError):
                self._loop.run_until_complete(asyncio.wait_for(self._upkeep(keeper), seconds))
            self._note()

    async def _upkeep(self, keeper: controller.FleetController) -> None:
        await asyncio.gather(keeper.run(), keeper.follow_prices())

    # --- what a controller calls --------------------------------------------------------------------------------

    def instances(self, _run: str, _states: Collection[str]) -> list[Instance]:
        self._count("instances")
        return list(self._listed.values())

    def start_nodes(self, _site: LaunchSite, request: NodeRequest) -> LaunchOutcome:
        now = self._loop.now
        try:
            self._count("start_nodes")
        except RunError as error:
            return LaunchOutcome(why=str(error), repeat=True)
        self._note(asked=request.pools)
        offers = [CapacityOffer(CapacityPool(pool.market, pool.type, pool.zone), 0.1) for pool in request.pools]
        limits = [Limit(pool.market, pool.type, pool.zone, count) for pool, count in self._counts.items()]
        running = [CapacityPool(pool.market, pool.type, pool.zone) for pool in self._alive.values()]
        grant = grant_capacity(request.count, offers, limits, running, spread=True)
        machines = []
        for pool, count in zip(request.pools, grant.counts, strict=True):
            for _ in range(count):
                id_ = f"i{len(self._listed)}"
                machines.append(LaunchedMachine(id_, pool))
                self._alive[id_] = pool
                tags = {TAG + "role": "worker", TAG + "attempt": request.attempt}
                self._listed[id_] = Instance(id_, "running", pool, now, "", tags, "")
                self._start(id_)
        self._note()
        return LaunchOutcome(tuple(machines), frozenset(request.pools[n] for n, _ in grant.errors))

    def terminate(self, ids: Collection[str]) -> None:
        self._count("terminate")
        for id_ in ids:
            self._end(id_, "Client.UserInitiatedShutdown")

    def spot_prices(self, _types: Collection[str]) -> dict[tuple[str, str], float]:
        self._count("spot_prices")
        return {}

    # --- what happens by itself -----------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        number = self.calls.total()
        self.calls[name] += 1
        if number in self._pace.silent:
            self._note(asked=tuple(self._counts))
            raise RunError("no answer")

    def _change(self, pool: Pool, count: int) -> None:
        self._counts[pool] = count
        for id_ in [id_ for id_, its in self._alive.items() if its == pool][count:]:
            self._end(id_, SPOT_INTERRUPTION)
        self._note()

    def _end(self, id_: str, reason: str) -> None:
        if not self._alive.pop(id_, None):
            return
        self._listed[id_] = replace(self._listed[id_], state="terminated", reason=reason)
        self._note()
        if id_ in self._joined:
            self._loop.call_soon(self._tell, {"kind": "worker_left", "worker": id_})

    def _start(self, id_: str) -> None:
        if self._pace.boot is None:
            self._loop.call_later(0.1, self._end, id_, "Client.InstanceInitiatedShutdown")
        else:
            self._loop.call_later(self._pace.boot, self._join, id_)

    def _join(self, id_: str) -> None:
        if id_ in self._alive:
            self._joined.add(id_)
            self._tell({"kind": "worker_joined", "worker": id_, "name": f"{id_}-1-0"})

    def _note(self, asked: tuple[Pool, ...] = ()) -> None:
        """Keep account of how long each pool has waited to be asked."""
        now, short = self._loop.now, len(self._alive) < self._wanted
        for pool, count in self._counts.items():
            since = self._unasked_since.get(pool)
            if since is not None:
                self.longest[pool] = max(self.longest[pool], now - since)
            if not short or count <= sum(its == pool for its in self._alive.values()):
                self._unasked_since.pop(pool, None)
            elif since is None or pool in asked:
                self._unasked_since[pool] = now
