"""Lend this machine to a run: `idletrain worker`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from idletrain.cli.arguments import bytes_option, run_dir_of
from idletrain.cli.trust import import_from_here
from idletrain.errors import RunError

app = typer.Typer()
BEGAN_WITH = Path(
    "/proc/self/environ"
)  # the variables of a process as it began, or as the one that it is a fork of did
C_LIBRARY = "GLIBC_TUNABLES"


@app.command(rich_help_panel="Cluster")
def worker(
    run: Annotated[
        str,
        typer.Argument(
            help="A run on this machine, by its directory or its name below runs/; or a scheduler's address.",
            metavar="RUN|ADDRESS",
            show_default=False,
        ),
    ],
    memory: Annotated[
        int | None, typer.Option(parser=bytes_option, metavar="2GiB", help="RAM to use (2GiB); all free RAM otherwise.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name to show in logs and on the dashboard.")] = None,
    tls_ca_file: Annotated[Path | None, typer.Option(help="The cluster's CA.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This worker's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    when_idle: Annotated[
        float | None,
        typer.Option(
            parser=_share, metavar="20%", help="Work only while others use less than this share of the machine (20%)."
        ),
    ] = None,
) -> None:
    """Lend this machine to a run until the run ends or a SIGTERM says that the machine is needed."""
    _begin_with_memory_settings()
    import_from_here()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if when_idle is not None:
        from idletrain.worker import idle

        arguments: dict[str, object] = {"--memory": memory, "--name": name}
        arguments |= {"--tls-ca-file": tls_ca_file, "--tls-cert": tls_cert, "--tls-key": tls_key}
        options = [str(part) for option in arguments.items() if option[1] is not None for part in option]
        raise typer.Exit(idle.lend_while_idle(["worker", run, *options], when_idle))

    from idletrain.worker import process

    files, scheduler = (tls_ca_file, tls_cert, tls_key), run
    if "://" not in run:
        from idletrain.cluster import access

        connection = access.find(run_dir_of(run))
        scheduler, files = connection.scheduler, (connection.ca_file, connection.cert, connection.key)
    try:
        asyncio.run(process.serve(scheduler, memory, name, process.security_from(*files)))
    except TimeoutError:  # Dask's
        raise RunError(
            f"scheduler {scheduler} cannot be reached (it answered once and not again); check that it runs"
        ) from None


def _begin_with_memory_settings() -> None:
    """Restart this process with the allocator settings of a launch's workers, unless it began with some."""
    if not BEGAN_WITH.exists() or f"{C_LIBRARY}=".encode() in BEGAN_WITH.read_bytes():
        return
    from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT

    variables = {**os.environ, C_LIBRARY: WORKER_ENVIRONMENT[C_LIBRARY]}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)  # noqa: S606 (this very program)


def _share(text: str) -> float:
    from idletrain.worker.idle import parse_share

    try:
        return parse_share(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
