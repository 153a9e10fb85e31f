"""Keep a rehearsal's run below runs/, like one of this machine: its cloud and its bucket end with the launch."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from idletrain.cli.arguments import RUNS

if TYPE_CHECKING:
    from idletrain.storage import S3Prefix


def free_directory(name: str) -> Path:
    """Return where a rehearsal of that name is kept: with a number added where runs/ has one of that name."""
    names = itertools.chain((name,), (f"{name}-{number}" for number in itertools.count(2)))
    return next(RUNS / free for free in names if not (RUNS / free).exists())


def keep(prefix: S3Prefix, directory: Path) -> bool:
    """Copy a run from a rehearsal's bucket; return False if there is nothing of it, or nothing can be written.

    Args:
        prefix: The run's prefix.
        directory: A directory that does not exist.
    """
    from idletrain.cloud.record import MODEL_KEY, REPORT_KEY
    from idletrain.ownership import write_signed
    from idletrain.rounds.durable import s3_mirror

    try:
        if not s3_mirror.restore(prefix, directory):
            return False
        write_signed(directory / "job.json", (directory / "job.json").read_bytes())
        for key in (MODEL_KEY, REPORT_KEY):
            if key in prefix.names(key):
                prefix.get_file(key, directory / key)
    except OSError as error:
        sys.stderr.write(f"idletrain: {directory} cannot keep the rehearsal ({error.strerror})\n")
        return False
    return True
