"""Begin: write a job or files for machines, explain a job's fields, and show a fleet that shrinks."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from idletrain.cli.arguments import interval_option
from idletrain.cli.printing import show
from idletrain.cli.spot import SpotOptions, launch_spot
from idletrain.errors import JobError
from idletrain.providers.protocol import CloudProvider, LaunchRequest
from idletrain.providers.table import provider_named

TEMPLATES = Path(__file__).parent / "templates"
INFRA = Path(__file__).parent / "infra"
app = typer.Typer()


class Template(StrEnum):
    """A folder of `templates`."""

    IMAGE = "image"
    TEXT = "text"
    TABULAR = "tabular"
    WIDE = "wide"
    SPOT = "spot"


class Infra(StrEnum):
    """A folder of `infra`, or certificates, which are new each time."""

    AWS = "aws"
    GRAFANA = "grafana"
    IDLE = "idle"
    IMAGE = "image"
    TLS = "tls"


@app.command(rich_help_panel="Start")
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.", metavar="DIR")] = Path(),
    template: Annotated[Template, typer.Option(help="What it trains; tabular: regression, too.")] = Template.IMAGE,
) -> None:
    """Write a job that trains at once, with a network and data of its own to change."""
    typer.echo(f"{folder} has {', '.join(_write(TEMPLATES / template, folder))}; README.md says how to train it")
    typer.echo("`idletrain fields` explains what a job file may say")


@app.command(rich_help_panel="Start")
def fields(
    path: Annotated[
        str | None,
        typer.Argument(help="A section, such as training, or a field.", metavar="PATH", show_default=False),
    ] = None,
) -> None:
    """Show the fields of a job file: what each takes, its default and what it does."""
    from idletrain.cli.job_fields import named

    for field in named(path or ""):
        default = field.default if field.default in ("", "required") else f"default {field.default}"
        show(", ".join(filter(None, (f"{field.path}: {field.kind}", default))))
        show(f"    {field.meaning}")
    if not path:
        show("\n`idletrain fields training` shows that section's, and so on")


@app.command(rich_help_panel="Start")
def infra(
    kind: Annotated[
        Infra,
        typer.Argument(
            help="For an AWS account, the image of its machines, Grafana, an idle machine, or TLS between machines."
        ),
    ],
    to: Annotated[Path, typer.Option(help="Where to write it.", metavar="DIR")] = Path(),
) -> None:
    """Write the files that prepare an AWS account, make its image, show runs in Grafana, lend an idle machine, or
    certificates for machines that talk by TLS.
    """
    if kind is Infra.TLS:
        from idletrain.cli.machine_certificates import write_certificates

        typer.echo(f"{to} has {', '.join(write_certificates(to))}, valid for a year")
        return
    typer.echo(f"{to} has {', '.join(_write(INFRA / kind, to, with_wheel=kind is Infra.IMAGE))}")


def _write(source: Path, folder: Path, *, with_wheel: bool = False) -> list[str]:
    """Copy a folder's files into another one, and idletrain's wheel if that is wanted; return their names.

    Raises:
        JobError: one of them is there already, or cannot be written.
    """
    files = sorted(path.name for path in source.iterdir() if path.is_file())
    if there := [name for name in files if (folder / name).exists()]:
        raise JobError(f"{folder}: has {', '.join(there)} already; name an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            shutil.copyfile(source / name, folder / name)
        if with_wheel:
            from idletrain.cli.package_wheel import write_wheel  # and with it what packs and hashes

            files.append(write_wheel(folder))
    except OSError as error:
        raise JobError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    return files


@app.command(rich_help_panel="Start")
def demo(
    churn: Annotated[
        float, typer.Option(parser=interval_option, metavar="15s", help="Take a node this often.", show_default="15s")
    ] = "15s",  # type: ignore[assignment]
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train Fashion-MNIST on a rehearsed spot fleet from which nodes are taken, for nothing and without an account."""
    from idletrain.job_file import load_job
    from idletrain.observe.sinks import WatchSettings

    provider = provider_named("sandbox", LaunchRequest(churn_seconds=churn))
    assert isinstance(provider, CloudProvider)
    job_file = TEMPLATES / "demo.yaml"
    options = SpotOptions(
        job_file=job_file,
        cloud="sandbox",
        resume=False,
        yes=True,
        detach=False,
        as_json=as_json,
        watch=WatchSettings(),
        allow_control=False,
    )
    launch_spot(load_job(job_file), provider, options)
