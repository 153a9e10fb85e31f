"""Ask a scheduler for the workers that it knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from distributed.security import Security

from idletrain.cluster import contact

STEPS_METRIC = "idletrain_steps"  # that a worker sends its scheduler with every sign of life


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker as its scheduler knows it, its last sign of life by the scheduler's clock, and the steps it has done."""

    name: str
    address: str
    last_seen: float
    steps: int = 0


async def known_workers(address: str, security: Security) -> list[SeenWorker]:
    """Return the workers that a scheduler knows.

    Raises:
        UnreachableError: it does not answer.
    """
    identity = await contact.ask(address, security, "client", lambda remote: remote.identity())
    return [
        SeenWorker(str(w["name"]), where, w["last_seen"], w["metrics"].get(STEPS_METRIC, 0))
        for where, w in identity["workers"].items()
    ]


async def trained_workers(workers: Callable[[], Awaitable[Sequence[SeenWorker]]]) -> frozenset[str]:
    """Return the names of the workers that have trained a step; none while their scheduler does not answer."""
    try:
        return frozenset(worker.name for worker in await workers() if worker.steps)
    except contact.UnreachableError:
        return frozenset()
