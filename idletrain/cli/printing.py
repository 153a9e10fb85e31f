"""Print sentences: on a terminal, lines break between words."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

import typer

COMMAND = ": idletrain "  # what follows is to be copied
UNBROKEN = "\N{NO-BREAK SPACE}"


def tell(text: str) -> None:
    """Print a sentence on what happens, to stderr."""
    typer.echo(in_lines(f"idletrain: {text}", sys.stderr), err=True)


def show(text: str) -> None:
    """Print a sentence of a command's result, to stdout."""
    typer.echo(in_lines(text, sys.stdout))


def in_lines(text: str, out: TextIO) -> str:
    """Return a text in lines that a terminal's width holds, each indented as its own; elsewhere as it is.

    What has no spaces, such as a link, stays whole, and so does a command at the end, which may be copied.
    """
    return "\n".join(map(_broken, text.split("\n"))) if out.isatty() else text


def _broken(line: str) -> str:
    before, colon, command = line.partition(COMMAND)
    whole = before + (colon[:2] + (colon[2:] + command).replace(" ", UNBROKEN))
    indent = " " * (len(line) - len(line.lstrip()))
    width = shutil.get_terminal_size().columns
    lines = textwrap.wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(UNBROKEN, " ")
