"""Read a job's model and data in a process of its own, before anything costs money: python -m idletrain.cli.job_check.

It takes seconds, and importing torch holds the interpreter: meanwhile the launching process talks to the cloud. The
process reads the job as JSON and prints its faults as JSON; it ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from idletrain.cluster import forked_processes
from idletrain.cluster.forked_processes import Piped
from idletrain.errors import JobError, RunError

if TYPE_CHECKING:
    from idletrain.job import Job


STDERR = 2


class JobCheck:
    """The check of a job, under way.

    Args:
        check: The process that reads the model and the data.
    """

    def __init__(self, check: Piped) -> None:
        self._check = check

    def faults(self) -> tuple[str, ...]:
        """Wait for the check's end and return the job's faults.

        Raises:
            RunError: the check itself failed, as it does where memory is short.
        """
        printed = self._check.stdout.read()
        if code := self._check.process.wait():
            why = f"was killed by signal {-code}; is there memory enough?" if code < 0 else "failed; see above"
            raise RunError(f"the check of the model and the data {why}")
        return tuple(json.loads(printed))


@contextlib.contextmanager
def checking(job: Job) -> Iterator[JobCheck]:
    """Check a job meanwhile; the check ends with the context, whether or not anybody has waited for it."""
    check = forked_processes.piped(__name__, STDERR)
    try:
        with contextlib.suppress(BrokenPipeError):  # its exit code says more
            check.stdin.write(job.model_dump_json().encode() + b"\n")
            check.stdin.close()
        yield JobCheck(check)
    finally:
        check.process.kill()
        check.process.wait()
        check.stdout.close()


def check_jobs(jobs: Iterable[Job]) -> None:
    """Check several jobs, one after the other.

    Raises:
        JobError: one has faults; it is named before each.
        RunError: a check failed.
    """
    for job in jobs:
        with checking(job) as check:
            if faults := check.faults():
                raise JobError([f"{job.name}: {fault}" for fault in faults])


def find_faults(job: Job) -> tuple[str, ...]:
    """Read the model and the data as the machines will, and return their faults."""
    from idletrain.nn.prepare import from_settings

    try:
        from_settings(job.model, job.data, job.training, job.memory)
    except JobError as error:
        return error.faults
    return ()


if __name__ == "__main__":
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's code prints is no result
    sys.path.insert(0, "")
    with result:
        from idletrain.job import Job

        json.dump(find_faults(Job.model_validate_json(sys.stdin.readline())), result)
