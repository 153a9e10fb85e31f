"""Define the arguments and options that several commands share, and parse their text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idletrain.errors import JobError
from idletrain.quantities import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from idletrain.job import Job

RUNS = Path("runs")  # where a job without `checkpoint.to` writes its run
JobFile = Annotated[Path, typer.Argument(help="The job file.", metavar="JOB", show_default=False)]
FoundRun = Annotated[
    str,
    typer.Argument(help="The run's name, directory or s3:// prefix.", metavar="RUN", show_default=False),
]
Region = Annotated[str | None, typer.Option(help="The region; the one in AWS' own configuration otherwise.")]
LaunchRegion = Annotated[
    str | None, typer.Option(help="The region; the job's otherwise, else the one in AWS' own configuration.")
]
FoundCloud = Annotated[
    str | None, typer.Option(help="The cloud that the run is in (aws, sandbox, ...), where its name does not say it.")
]


def seconds_option(text: str) -> float:
    """Parse an option's duration, such as 15s."""
    try:
        return float(parse_seconds(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def interval_option(text: str) -> float:
    """Parse the time between two of what an option repeats; more than 0."""
    seconds = seconds_option(text)
    if seconds <= 0:
        raise typer.BadParameter("should be more than 0")
    return seconds


def bytes_option(text: str) -> int:
    """Parse an option's size, such as 2GiB."""
    try:
        size = int(parse_bytes(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size <= 0:
        raise typer.BadParameter("should be more than 0")
    return size


def read_job_file(path: Path, nodes: int | None, name: str | None = None) -> Job:
    """Read a job file; replace its name and number of nodes by those of the command line."""
    from idletrain.job_file import load_job, parse_job

    tree = load_job(path, name).model_dump(exclude_unset=True)
    tree |= {"nodes": {**tree.get("nodes", {}), "count": nodes}} if nodes else {}
    return parse_job(tree)


def check_writable(path: Path, option: str) -> None:
    """Open a file for writing before the work whose result it gets, so that a fault shows at once.

    Raises:
        JobError: it cannot be written.
    """
    is_new = not path.exists()
    write_output(path, None, option)
    if is_new:
        path.unlink()


def write_output(path: Path, content: str | None, option: str) -> None:
    """Write the file that an option names; with None, only open it.

    Raises:
        JobError: it cannot be written.
    """
    try:
        with path.open("a" if content is None else "w") as file:
            file.write(content or "")
    except OSError as error:
        raise JobError(f"{option}: {path} cannot be written ({error.strerror}); name another") from None


def run_dir_of(run: str) -> Path:
    """Find a run's directory by its path, or by its name below runs/."""
    return Path(run) if "/" in run or Path(run, "wal").exists() else RUNS / run
