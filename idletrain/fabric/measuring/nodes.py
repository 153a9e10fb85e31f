"""The workers of a Dask cluster as numbered nodes that are asked to do things, one or all at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from idletrain.errors import RefusedError, RunError
from idletrain.worker.lease_spec import version

NODE_ANSWER_SECONDS = 60.0  # for what takes no time itself: a first task imports torch, which a cold disk can draw out
NODE_WAIT_POLL_SECONDS = 2.0  # between looks at whether a node that is asked something is still there
_numbers = itertools.count()


class NodeSilentError(RunError):
    """A node does not answer, or fails at what it is asked; the text is a sentence that names it."""


@dataclass(frozen=True)
class MeasuredNodes:
    """Nodes in the order of their names.

    Attributes:
        client: An asynchronous client.
        addresses: Of the workers.
        names: Theirs, for people.
    """

    client: Client
    addresses: Sequence[str]
    names: Sequence[str] = field(default=())

    @classmethod
    async def of(cls, client: Client) -> MeasuredNodes:
        """All workers that are there.

        Raises:
            RunError: there is none.
            RefusedError: some run another version of idletrain, or none.
        """
        workers = (await client.scheduler.identity())["workers"]
        if not workers:
            raise RunError("the cluster has no worker; start some (idletrain worker ADDRESS) and measure again")
        ranked = sorted((_natural(str(told["name"])), str(told["name"]), address) for address, told in workers.items())
        team = cls(client, [address for *_, address in ranked], [name for _, name, _ in ranked])
        await team._check_versions()
        return team

    def __len__(self) -> int:
        return len(self.addresses)

    async def call(self, node: int, task: Callable[..., Any], *args: Any, seconds: float = NODE_ANSWER_SECONDS) -> Any:
        """What a task returns that runs on a node.

        Raises:
            SilentError: it fails, does not end in time, or the node is gone: a scheduler that thinks it may come back
                would wait for it.
        """
        what = getattr(task, "__name__", "task")
        key = f"fabric-{what}-{next(_numbers)}-{self.client.id}"
        future = self.client.submit(
            task, *args, key=key, workers=[self.addresses[node]], allow_other_workers=False, pure=False, retries=0
        )
        answer, left = asyncio.ensure_future(future), asyncio.ensure_future(self._check_left(node))
        try:
            done, _ = await asyncio.wait((answer, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise NodeSilentError(f"{self.names[node]} did not end '{what}' in {seconds:.0f} s; see its log")
            if answer in done:
                return answer.result()
            left.result()
            raise NodeSilentError(f"{self.names[node]} was gone before '{what}' ended; see its log")
        except NodeSilentError:
            raise
        except Exception as error:  # whatever a worker dies of, or a task on it
            raise NodeSilentError(f"{self.names[node]} failed at '{what}' ({error!r}); see its log") from error
        finally:
            answer.cancel()
            left.cancel()
            future.release()

    async def _check_left(self, node: int) -> None:
        """Return when a node is gone."""
        there = True
        while there:
            await asyncio.sleep(NODE_WAIT_POLL_SECONDS)
            there = bool(await self.client.scheduler.ncores(workers=[self.addresses[node]]))

    async def call_each(
        self,
        task: Callable[..., Any],
        orders: Iterable[tuple[int, Sequence[Any]]],
        seconds: float = NODE_ANSWER_SECONDS,
    ) -> list[Any]:
        """What a task returns on each of some nodes, begun at once; a `SilentError` in the place of what failed."""
        asked = (self.call(node, task, *args, seconds=seconds) for node, args in orders)
        found = await asyncio.gather(*asked, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, NodeSilentError):
                raise one
        return list(found)

    async def call_all(self, task: Callable[..., Any], *args: Any, seconds: float = NODE_ANSWER_SECONDS) -> list[Any]:
        """What a task returns on every node, begun at once.

        Raises:
            SilentError: it fails on one, or does not end in time.
        """
        told = await self.call_each(task, [(node, args) for node in range(len(self))], seconds)
        for answer in told:
            if isinstance(answer, NodeSilentError):
                raise answer
        return told

    async def _check_versions(self) -> None:
        told = await self.client.run(version, workers=list(self.addresses), on_error="return")
        wrong = {
            self.names[n]: "none" if isinstance(told.get(address), Exception) else str(told.get(address))
            for n, address in enumerate(self.addresses)
            if told.get(address) != version()
        }
        if wrong:
            which = ", ".join(f"{name} runs {theirs}" for name, theirs in wrong.items())
            raise RefusedError(f"not all workers run idletrain {version()}: {which}; install the same everywhere")


async def occupied(client: Client) -> str | None:
    """What the cluster is busy with, in words, or None."""
    run = await client.get_metadata(["idletrain"], None)
    # Of a head that was killed the words stay, and its connection does not.
    if run and run["client"] in await client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients)):
        return f"a run of idletrain {run['version']} is using these workers"
    tasks = sum(len(keys) for keys in (await client.processing()).values())
    return f"the workers have {tasks} tasks to do" if tasks else None


def _natural(name: str) -> tuple[Any, ...]:
    """Names in the order that people count in: n2 before n10."""
    parts = ["".join(part) for _, part in itertools.groupby(name, str.isdigit)]
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
