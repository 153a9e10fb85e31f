"""The workers of a Dask cluster as numbered nodes that run a task, one node or all at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from idletrain.errors import RefusedError, RunError
from idletrain.worker.lease_spec import version

NODE_ANSWER_SECONDS = 60.0  # for a short task: the first one imports torch, which is slow from a cold disk
NODE_WAIT_POLL_SECONDS = 2.0  # between checks that a node with a task is still connected
_numbers = itertools.count()


class NodeSilentError(RunError):
    """A node does not answer, or its task fails; the message is a sentence that names the node."""


@dataclass(frozen=True)
class MeasuredNodes:
    """The nodes of a cluster, in the order of their names.

    Attributes:
        client: An asynchronous client of the cluster.
        addresses: The workers' Dask addresses.
        names: The workers' names, for messages and tables.
    """

    client: Client
    addresses: Sequence[str]
    names: Sequence[str] = field(default=())

    @classmethod
    async def of(cls, client: Client) -> MeasuredNodes:
        """Return all workers of the cluster.

        Raises:
            RunError: There is none.
            RefusedError: Some run another version of idletrain, or none.
        """
        workers = (await client.scheduler.identity())["workers"]
        if not workers:
            raise RunError("the cluster has no worker; start some (idletrain worker ADDRESS) and measure again")
        ranked = sorted((_natural(str(info["name"])), str(info["name"]), address) for address, info in workers.items())
        nodes = cls(client, [address for *_, address in ranked], [name for _, name, _ in ranked])
        await nodes._check_versions()
        return nodes

    def __len__(self) -> int:
        return len(self.addresses)

    async def call(self, node: int, task: Callable[..., Any], *args: Any, seconds: float = NODE_ANSWER_SECONDS) -> Any:
        """Run a task on a node and return its result.

        Raises:
            NodeSilentError: It fails, does not end in `seconds`, or the node is gone: Dask's scheduler would wait for
                the node to come back.
        """
        what = getattr(task, "__name__", "task")
        key = f"fabric-{what}-{next(_numbers)}-{self.client.id}"
        future = self.client.submit(
            task, *args, key=key, workers=[self.addresses[node]], allow_other_workers=False, pure=False, retries=0
        )
        answer, left = asyncio.ensure_future(future), asyncio.ensure_future(self._wait_until_gone(node))
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

    async def _wait_until_gone(self, node: int) -> None:
        """Return once a node has left the cluster."""
        connected = True
        while connected:
            await asyncio.sleep(NODE_WAIT_POLL_SECONDS)
            connected = bool(await self.client.scheduler.ncores(workers=[self.addresses[node]]))

    async def call_each(
        self,
        task: Callable[..., Any],
        orders: Iterable[tuple[int, Sequence[Any]]],
        seconds: float = NODE_ANSWER_SECONDS,
    ) -> list[Any]:
        """Run a task on some nodes at once; return the results in order, a `NodeSilentError` for each that failed.

        Args:
            task: The function.
            orders: Pairs of a node and the task's arguments there.
            seconds: Time limit of each.
        """
        calls = (self.call(node, task, *args, seconds=seconds) for node, args in orders)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, NodeSilentError):
                raise result
        return list(results)

    async def call_all(self, task: Callable[..., Any], *args: Any, seconds: float = NODE_ANSWER_SECONDS) -> list[Any]:
        """Run a task on every node at once; return the results in the nodes' order.

        Raises:
            NodeSilentError: It fails on one, or does not end in time.
        """
        results = await self.call_each(task, [(node, args) for node in range(len(self))], seconds)
        for result in results:
            if isinstance(result, NodeSilentError):
                raise result
        return results

    async def _check_versions(self) -> None:
        versions = await self.client.run(version, workers=list(self.addresses), on_error="return")
        wrong = {
            self.names[n]: "none" if isinstance(versions.get(address), Exception) else str(versions.get(address))
            for n, address in enumerate(self.addresses)
            if versions.get(address) != version()
        }
        if wrong:
            which = ", ".join(f"{name} runs {other}" for name, other in wrong.items())
            raise RefusedError(f"not all workers run idletrain {version()}: {which}; install the same everywhere")


async def occupied(client: Client) -> str | None:
    """Return a phrase for what keeps the cluster busy, or None if it is idle."""
    run = await client.get_metadata(["idletrain"], None)
    # The metadata of a killed head stays on the scheduler; its connection does not.
    if run and run["client"] in await client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients)):
        return f"a run of idletrain {run['version']} is using these workers"
    tasks = sum(len(keys) for keys in (await client.processing()).values())
    return f"the workers have {tasks} tasks to do" if tasks else None


def _natural(name: str) -> tuple[Any, ...]:
    """Return a sort key that puts names in counting order: n2 before n10."""
    parts = ["".join(part) for _, part in itertools.groupby(name, str.isdecimal)]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
