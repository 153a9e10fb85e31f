"""Read the arguments of `idletrain-testbed`, call the package, and print."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from idletrain_testbed import lifecycle, network, processes, rights
from idletrain_testbed.instance import Instance, chosen, recorded
from idletrain_testbed.settings import Settings, TestbedError, parse_settings, rate

app = typer.Typer(no_args_is_help=True, help="A slow cluster on one machine: namespaces, shaped links, cgroups.")

Node = Annotated[str, typer.Argument(help="head, n0, n1, ...", show_default=False)]
Name = Annotated[str | None, typer.Option(help="The instance, where more than one is up.", show_default=False)]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="Nodes beside the head.")] = 8,
    link: Annotated[
        str | None, typer.Option(help="Each link's rate in each direction: 100mbit.", show_default=False)
    ] = None,
    head_link: Annotated[
        str | None, typer.Option(help="The rate of the head's link: 1gbit.", show_default="--link")
    ] = None,
    cpus: Annotated[float | None, typer.Option(help="CPUs of each node: 0.25.", show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each node: 1GiB.", show_default=False)] = None,
    delay: Annotated[
        str | None, typer.Option(help="Delay from node to node, one way: 2ms.", show_default=False)
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Share of packets lost from node to node, one way: 1%.", show_default=False)
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="The most bytes that wait for a link: 64KiB.", show_default="50 ms")
    ] = None,
    congestion: Annotated[str, typer.Option(help="TCP's congestion control: cubic, bbr.")] = "cubic",
    name: Annotated[str | None, typer.Option(help="The instance's name.", show_default="a free one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Create a head and nodes, which exist until `down`."""
    settings = parse_settings(
        nodes=nodes,
        link=link,
        head_link=head_link,
        cpus=cpus,
        memory=memory,
        delay=delay,
        loss=loss,
        queue=queue,
        congestion=congestion,
    )
    signal.signal(signal.SIGTERM, lifecycle.leave)
    instance = lifecycle.up(settings, name)
    dataclasses.replace(instance, owner=None).record()
    if as_json:
        nodes_json = {node: {"address": instance.address(node), "link": settings.rate(node)} for node in instance.nodes}
        typer.echo(json.dumps({"name": instance.name, "nodes": nodes_json}))
    else:
        _show(instance, settings)


@app.command(
    name="exec",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def exec_(
    context: typer.Context,
    node: Node,
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", show_default=False)],
    name: Name = None,
) -> NoReturn:
    """Run a command on a node; its input, output, signals and exit code are the command's own."""
    instance = _reached(name)
    argv = [*processes.into(instance, instance.known(node)), *command, *context.args]
    sys.stdout.flush()
    os.execv(argv[0], argv)  # noqa: S606 - the command takes this process's place


@app.command()
def cut(node: Node, name: Name = None) -> None:
    """Drop all packets of a node's link."""
    network.cut(_reached(name), node)


@app.command()
def heal(node: Node, name: Name = None) -> None:
    """Let a cut link carry traffic again."""
    network.heal(_reached(name), node)


@app.command()
def link(
    node: Node,
    to: Annotated[str, typer.Argument(metavar="RATE", help="10mbit, 1gbit.", show_default=False)],
    name: Name = None,
) -> None:
    """Change the rate of a node's link in both directions."""
    network.shape(_reached(name), node, rate(to))


@app.command()
def down(name: Name = None) -> None:
    """End the processes on an instance's nodes, and remove it."""
    lifecycle.down(_reached(name))


@app.command(name="list")
def list_() -> None:
    """Show the instances that are up, and remove those whose owner died."""
    from rich.console import Console
    from rich.table import Table

    if not rights.missing_capabilities():
        lifecycle.sweep()
    table = Table("instance", "nodes", "owner")
    for instance in recorded():
        table.add_row(instance.name, str(len(instance.nodes) - 1), str(instance.owner.pid) if instance.owner else "-")
    Console().print(table)


def main() -> None:
    """Run a command; print a user's error as one line and exit with 1."""
    try:
        app()
    except TestbedError as fault:
        typer.echo(f"idletrain-testbed: {fault}", err=True)
        raise SystemExit(1) from None


def _reached(name: str | None) -> Instance:
    if faults := rights.missing_capabilities():
        raise TestbedError("\n".join(faults))
    return chosen(name)


def _show(instance: Instance, settings: Settings) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("node", "address", "link", title=instance.name, title_justify="left")
    for node in instance.nodes:
        bits = settings.rate(node)
        table.add_row(node, instance.address(node), f"{bits / 1e6:g} Mbit/s" if bits else "not shaped")
    Console().print(table)
