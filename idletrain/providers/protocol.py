"""Define what a provider of workers or machines must offer; a second cloud implements one of the two protocols."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from distributed.security import Security

    from idletrain.job import Job
    from idletrain.observe.records import Record


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A launch's settings for its provider, beside the job.

    Attributes:
        scheduler: Address of an existing Dask scheduler.
        churn_seconds: Take a worker this often, or never.
        trace: A recorded trace by which nodes are taken.
        speed: How much faster than recorded the trace is played.
        detach: Start the run and return.
    """

    scheduler: str | None = None
    churn_seconds: float | None = None
    trace: Path | None = None
    speed: float = 1.0
    detach: bool = False


class Provider(Protocol):
    """A source of a run's workers or machines."""

    def faults(self, job: Job) -> list[str]:
        """Return a sentence for each thing in the job or the request that this provider cannot do."""
        ...


@runtime_checkable
class WorkerProvider(Provider, Protocol):
    """A provider of workers for a run whose head is the calling process.

    Attributes:
        scheduler: Address of an existing scheduler whose workers can be measured before a launch; None if the workers
            are started on this machine.
        measurable: True if a launch may measure the workers to choose settings that the job leaves open.
        dashboard_port: First port to try for the dashboard; None if the scheduler has a dashboard of its own.
    """

    scheduler: str | None
    measurable: bool
    dashboard_port: int | None

    async def check(self) -> None:
        """Raise JobError if the workers cannot be reached; called before anything is written."""

    def cluster(self, job: Job, record: Callable[..., None]) -> AbstractAsyncContextManager[tuple[str, Security]]:
        """Keep a Dask cluster while the context lasts; yield its scheduler's address and how to connect to it.

        Args:
            job: The job; `nodes` says how many workers of what size it wants.
            record: Writes an event, such as `record("waiting", reason=...)`.
        """
        ...


@runtime_checkable
class CloudProvider(Provider, Protocol):
    """A provider of machines: the run's head is one of them, and the launching process only follows it.

    Attributes:
        costs_money: True if a launch must be confirmed first.
        outlives_command: True if a run goes on when the launching process ends.
        boot_reason: Why a run waits at first, as a phrase behind "waiting".
    """

    costs_money: bool
    outlives_command: bool
    boot_reason: str

    def opened(self) -> AbstractContextManager[None]:
        """Keep the cloud available to a launch while the context lasts."""
        ...

    def account(self, region: str | None) -> AbstractContextManager[Any]:
        """Yield the account that a command is about; turn the cloud's own errors into sentences.

        Args:
            region: The region; None for the one that the cloud's own configuration names.
        """
        ...

    def launch_region(self, job: Job) -> str | None:
        """Return the region in which a job's machines start; None for the configured one."""
        ...

    def image(self, job: Job) -> str:
        """Return the container image that the machines run."""
        ...

    def image_fault(self, account: Any, image: str) -> str | None:
        """Return a sentence if the account lacks the image."""
        ...

    def interrupted_text(self, run: str, address: str) -> str:
        """Return what to print when the user interrupts a launch.

        Args:
            run: The run's name.
            address: The run's name or prefix, with the options that other commands need to find it.
        """
        ...

    def seen_from_here(self, event: Record) -> Record:
        """Return an event of a run with the dashboard's address as the launching machine reaches it."""
        ...

    def tunnel_command(self, account: Any, head: str, port: str) -> list[str] | None:
        """Return a command that forwards a port of the head to this machine; None if it can be reached directly."""
        ...
