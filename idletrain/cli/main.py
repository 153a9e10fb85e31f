"""The command line: reads arguments, builds what a command needs, prints, and turns errors into exit codes."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import MutableMapping
from pathlib import Path

import typer

from idletrain.cli import cloud, fabric, schedule, simulate, train, watch, worker
from idletrain.cli.train import INTERRUPTED_EXIT
from idletrain.errors import IdletrainError, JobError

BUG_EXIT = 3
# This machine, and EC2's metadata service: no proxy knows them. Names, as libraries know no address ranges here.
NEVER_BY_PROXY = ("localhost", "127.0.0.1", "::1", "169.254.169.254")
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
for group in (train, simulate, watch, worker, cloud, fabric):
    app.add_typer(group.app)
app.add_typer(schedule.app, name="schedule")


def main() -> None:
    """Run the command line; the one place where errors become exit codes."""
    bypass_proxies(os.environ)
    try:
        sys.exit(app(standalone_mode=False))
    except IdletrainError as error:
        faults = error.faults if isinstance(error, JobError) else (str(error),)
        for fault in faults:
            typer.echo(f"idletrain: {fault}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED_EXIT)
    except Exception as error:  # noqa: BLE001 (the one place for bugs)
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # usage errors of the parser
            typer.echo(f"idletrain: {error.format_message().rstrip('.')}; see idletrain --help", err=True)
            sys.exit(error.exit_code)
        typer.echo(f"idletrain: a bug, not your fault: {error!r}; please send {_bug_report()}", err=True)
        sys.exit(BUG_EXIT)
    finally:  # else `python -m` ends by SIGINT after Ctrl-C inside a string that exec runs, as dataclasses do on import
        exec("")  # noqa: S102


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Extend NO_PROXY, which every HTTP library reads, by the addresses that a proxy cannot reach."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if given.strip() != "*":  # nothing goes by a proxy
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join(filter(None, (given, *NEVER_BY_PROXY)))


def _bug_report() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="idletrain-bug-", suffix=".txt", delete=False) as file:
        file.write(f"{platform.platform()} Python {sys.version}\n{sys.argv}\n\n{traceback.format_exc()}")
    return Path(file.name)
