"""Decide whether a command may run code: that of the working directory, and that of a run which somebody else started.

Only commands that train, plan or evaluate import from the working directory; all others are safe in a directory that
came from a stranger.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from idletrain.cli.printing import tell
from idletrain.errors import JobError
from idletrain.ownership import started_here

Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code of a run that you did not start, as if you had written it.")
]


def import_from_here() -> None:
    """Let a job's own factories be imported from the working directory, as Python does for a script."""
    sys.path.insert(0, "")


def allow_code(run_dir: Path, *, trusted: bool, instead: str = "") -> None:
    """Return if the code of a run may be executed, then with the working directory on the path; in a terminal, ask.

    Args:
        run_dir: The run's directory.
        trusted: Whether the command line says so.
        instead: What needs no trust, as the end of a sentence.

    Raises:
        JobError: this user did not start the run and does not trust it.
    """
    if not (trusted or started_here(run_dir)):
        from idletrain.rounds.durable.recovery import read_job

        read_job(run_dir)  # raises where its job is damaged, which is no question of trust
        why = f"{run_dir}: you did not start this run here, and whoever did chose the code that this command executes"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise JobError(f"{why}; add --trust if you trust them as you trust your own code{instead}")
        tell(f"{why}{instead}")
        typer.confirm("Execute it?", abort=True, err=True)
    import_from_here()
