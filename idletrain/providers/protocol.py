"""Define what a provider of workers or machines must offer; a second cloud implements one of the two protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from distributed.security import Security

    from idletrain.job import Job
    from idletrain.machine_settings import CloudSettings
    from idletrain.observe.records import Record
    from idletrain.schedules.cron import Execution, Schedule


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A launch's settings for its provider, beside the job.

    Attributes:
        scheduler: Address of an existing Dask scheduler.
        churn_seconds: Take a worker this often, or never.
        trace: A recorded trace by which nodes are taken.
        speed: How much faster than recorded the trace is played.
        detach: Start the run and return.
        resume: Go on with a run.
        rehearsal: The process whose sandbox is meant; None for the newest one.
    """

    scheduler: str | None = None
    churn_seconds: float | None = None
    trace: Path | None = None
    speed: float = 1.0
    detach: bool = False
    resume: bool = False
    rehearsal: int | None = None

    @property
    def cloud_faults(self) -> list[str]:
        """A sentence for each thing that only a run in a cloud can do."""
        rehearsed = self.trace is not None or self.speed != 1.0
        return [
            *(["--detach: is for runs in a cloud (--spot); leave it out"] if self.detach else []),
            *(["--trace, --speed: are for the rehearsal cloud (--cloud sandbox); leave them out"] if rehearsed else []),
        ]


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


@dataclass(frozen=True)
class CheckResult:
    """One check's result; `passed` is None if the check could not be made."""

    what: str
    passed: bool | None
    text: str


class CloudSchedules(Protocol):
    """A service of a cloud that starts scheduled runs while no machine of the user's is on."""

    def faults(self, schedule: Schedule, image: str | None) -> list[str]:
        """Return why it cannot start a schedule's runs, one sentence each.

        Args:
            schedule: The schedule.
            image: The container image that machines run, if the job names one.
        """
        ...

    def resolved(self, schedule: Schedule, job: Job) -> tuple[Schedule, Job]:
        """Return both with the account and the region that hold from now on, whatever is configured later.

        Raises:
            JobError: something that the job names is missing there, or another schedule has the name.
        """
        ...

    def install(self, schedule: Schedule, job: Job, packed: bytes | None, version: str) -> None:
        """Install a schedule that is resolved, replacing what an earlier try has left.

        Args:
            schedule: When the job starts.
            job: The job, in its present version: later changes of its file do not count.
            packed: Archive of the user's code, for a job with a workdir.
            version: Version of idletrain.
        """
        ...

    def remove(self, schedule: Schedule, job: Job) -> None:
        """Delete everything that `install` created; what is gone is no error, and another's schedule stays."""
        ...

    def history(self, schedule: Schedule, job: Job, count: int) -> list[tuple[Execution, bool]]:
        """Return a schedule's last executions, the oldest first, each with whether its run is still running."""
        ...

    def start_run(self, machine: Any, directory: Path) -> None:
        """Start the run that is due, on the machine that the service has started for that.

        Args:
            machine: This machine.
            directory: An empty directory to work in.
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

    def pinned_image(self, account: Any, image: str) -> str:
        """Return the image by its digest, so that all machines of a run run the same bytes, where it can be known."""
        ...

    def bucket_fault(self, account: Any, bucket: str) -> str | None:
        """Return a sentence if the account lacks the bucket of a run."""
        ...

    def examine(self, account: Any, settings: CloudSettings, gpu: bool) -> Sequence[CheckResult]:
        """Check what the account lacks, in the order in which a launch would fail.

        Args:
            account: The account.
            settings: A job's settings of the cloud.
            gpu: True if nodes have GPUs.
        """
        ...

    def launcher_policy(self, account: Any) -> Mapping[str, Any]:
        """Return the least rights that a launch needs, in the cloud's own form."""
        ...

    def machine(self) -> Any:
        """Return the machine of the cloud that this process runs on (`idletrain.cloud.account.CloudMachine`)."""
        ...

    def schedules(self) -> CloudSchedules | None:
        """Return what starts scheduled runs in the cloud itself; None if it has no such service."""
        ...

    def interrupted_text(self, run: str, address: str) -> str:
        """Return what to print when the user interrupts a launch; how to go on with a rehearsal is added behind it.

        Args:
            run: The run's name.
            address: The run's name or prefix, with the options that other commands need to find it; of a rehearsal the
                directory that keeps it, empty if there is none.
        """
        ...

    def seen_from_here(self, event: Record, account: Any) -> Record:
        """Return an event of a run with the dashboard's link as the launching machine opens it."""
        ...

    def tunnel_command(self, account: Any, head: str, port: str) -> list[str] | None:
        """Return a command that forwards a port of the head to this machine; None if it can be reached directly."""
        ...
