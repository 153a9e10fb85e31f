"""Keep a rehearsal's run below runs/, like one of this machine: its cloud and its bucket end with the launch."""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idletrain.cli.arguments import RUNS
from idletrain.errors import IdletrainError

if TYPE_CHECKING:
    from idletrain.job import Job
    from idletrain.storage import S3Prefix


def free_directory(name: str) -> Path:
    """Return where a rehearsal of that name is kept: with a number added where runs/ has one of that name."""
    names = itertools.chain((name,), (f"{name}-{number}" for number in itertools.count(2)))
    return next(RUNS / free for free in names if not (RUNS / free).exists())


def further(job: Job, job_file: Path, directory: Path) -> str:
    """Return how to go on with a kept run on this machine; "" if the job's runs are not below runs/."""
    if Path(job.checkpoint.to) != RUNS:
        return ""
    command = f"idletrain launch {shlex.quote(str(job_file))} --name {directory.name} --resume"
    return f"; go on with it on this machine: {command}"


def keep(account: Any, prefix: S3Prefix, directory: Path) -> bool:
    """Copy a run from a rehearsal's bucket; return False if there is nothing of it, or it cannot be copied.

    Args:
        account: The rehearsal's account.
        prefix: The run's prefix.
        directory: A directory that does not exist.
    """
    from idletrain.cloud.record import MODEL_KEY, REPORT_KEY
    from idletrain.ownership import write_signed
    from idletrain.rounds.durable import s3_mirror

    part = directory.with_name(f".{directory.name}.part")
    try:
        with account.explained():
            shutil.rmtree(part, ignore_errors=True)
            if not s3_mirror.restore(prefix, part):
                return False
            write_signed(part / "job.json", (part / "job.json").read_bytes())
            for key in (MODEL_KEY, REPORT_KEY):
                if key in prefix.names(key):
                    prefix.get_file(key, part / key)
            part.rename(directory)  # whole, or not at all
    except KeyboardInterrupt:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except (OSError, IdletrainError) as error:  # the launch's own end is what the user is to see
        sys.stderr.write(f"idletrain: {directory} cannot keep the rehearsal ({error})\n")
        return False
    return True
