"""The command line: reads arguments, builds what a command needs, prints, and turns errors into exit codes."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

import typer

from idletrain.cli import cloud, cloud_runs, fabric, runs, schedule, simulate, start, sweep, train, watch, worker
from idletrain.cli.output import drop_unwritten, flush_output, guard_streams, is_unread
from idletrain.cli.printing import tell
from idletrain.errors import IdletrainError, JobError, RunError, is_interrupt, own_traceback
from idletrain.held_interrupts import INTERRUPTED_EXIT, lost_interrupts_repeated

BUG_EXIT = 3
# This machine, and EC2's metadata service: no proxy knows them. Names, as libraries know no address ranges here.
NEVER_BY_PROXY = ("localhost", "127.0.0.1", "::1", "169.254.169.254")
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 the run cannot go on, 2 a wrong job or argument, 3 a bug, 130 stopped.",
)
for group in (start, train, sweep, simulate, watch, runs, cloud, cloud_runs, fabric, worker):
    app.add_typer(group.app)
app.add_typer(schedule.app, name="schedule", rich_help_panel="Schedule")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"idletrain {importlib.metadata.version('idletrain')}")
        raise typer.Exit


# What helps where the machine, and no bug, is why a file cannot be used.
_MAY_NOT = "ask its owner to let you use it, or name another"
_ROOM = "make room there"
FILE_REMEDIES = {
    errno.EACCES: _MAY_NOT, errno.EPERM: _MAY_NOT, errno.EROFS: _MAY_NOT,
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EFBIG: _ROOM,
}  # fmt: skip


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train one neural network on machines that nobody uses: spot instances and idle computers."""


def main() -> None:
    """Run the command line; the one place where errors become exit codes."""
    bypass_proxies(os.environ)
    guard_streams()
    try:
        with lost_interrupts_repeated():
            code = app(standalone_mode=False)
        flush_output()
        sys.exit(code)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the one place for bugs)
        sys.exit(_tell(error))
    finally:
        drop_unwritten()
        # else `python -m` ends by SIGINT after Ctrl-C inside a string that exec runs, as dataclasses do on import
        exec("")  # noqa: S102


def _tell(error: BaseException) -> int:
    """Print what ended a command, in sentences; return its exit code."""
    if isinstance(error, typer.Abort) or is_interrupt(error):
        return INTERRUPTED_EXIT
    if is_unread(error):
        return RunError.exit_code
    if isinstance(error, IdletrainError):
        for fault in error.faults if isinstance(error, JobError) else (str(error),):
            tell(fault)
        typer.echo(own_traceback(error), err=True, nl=False)
        return error.exit_code
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # usage errors of the parser
        command = _command_of(getattr(error, "ctx", None))
        if message := " ".join(error.format_message().replace("Value error, ", "").split()).rstrip("."):
            tell(f"{message}; see {command} --help")  # without one, the help was printed
        return int(error.exit_code)
    if fault := file_fault(error):
        tell(fault)
        return RunError.exit_code
    tell(f"a bug, not your fault: {error!r}; please send {_bug_report()}")
    return BUG_EXIT


def file_fault(error: BaseException) -> str:
    """Return a sentence on a file that the machine does not let this user use; "" for any other error."""
    remedy = FILE_REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    if remedy is None:
        return ""
    assert isinstance(error, OSError)
    place = f"{error.filename}: " if error.filename is not None else ""
    return f"{place}{error.strerror}; {remedy}"


def _command_of(context: Any) -> str:
    """Return the command line, without arguments, that a usage error is of."""
    names: list[str] = []
    while context and context.parent:
        names.append(context.info_name)
        context = context.parent
    return " ".join(("idletrain", *reversed(names)))


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Extend NO_PROXY, which every HTTP library reads, by the addresses that a proxy cannot reach."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if given.strip() != "*":  # nothing goes by a proxy
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join(filter(None, (given, *NEVER_BY_PROXY)))


def _bug_report() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="idletrain-bug-", suffix=".txt", delete=False) as file:
        file.write(f"{platform.platform()} Python {sys.version}\n{sys.argv}\n\n{traceback.format_exc()}")
    return Path(file.name)
