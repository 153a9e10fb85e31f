"""Lend this machine to a run: `idletrain worker`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from idletrain.cli.arguments import bytes_option

app = typer.Typer()


@app.command()
def worker(
    scheduler: Annotated[str, typer.Argument(help="The scheduler's address.", show_default=False)],
    memory: Annotated[
        int | None, typer.Option(parser=bytes_option, help="RAM to use (2GiB); all free RAM otherwise.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name to show in logs and on the dashboard.")] = None,
    tls_ca_file: Annotated[Path | None, typer.Option(help="The cluster's CA.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This worker's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    when_idle: Annotated[
        float | None,
        typer.Option(parser=_share, help="Work only while others use less than this share of the machine (20%)."),
    ] = None,
) -> None:
    """Lend this machine to a run until the run ends or a SIGTERM says that the machine is needed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if when_idle is not None:
        from idletrain.worker import idle

        arguments: dict[str, object] = {"--memory": memory, "--name": name}
        arguments |= {"--tls-ca-file": tls_ca_file, "--tls-cert": tls_cert, "--tls-key": tls_key}
        options = [str(word) for pair in arguments.items() if pair[1] is not None for word in pair]
        raise typer.Exit(idle.lend_while_idle(["worker", scheduler, *options], when_idle))

    from idletrain.worker import process

    security = process.security_from(tls_ca_file, tls_cert, tls_key)
    asyncio.run(process.serve(scheduler, memory, name, security))


def _share(text: str) -> float:
    from idletrain.worker.idle import parse_share

    try:
        return parse_share(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
