"""`covey join`: let this device take part in a mesh."""

from pathlib import Path
from typing import Annotated

import typer

from covey.cli._command import example

__all__ = ["add_to"]


def add_to(root: typer.Typer) -> None:
    """Adds the command."""
    root.command("join", epilog=example("covey join 127.0.0.1:7654 --name laptop --accept-all"))(join)


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The coordinator's HOST:PORT.")],
    name: Annotated[str, typer.Option("--name", help="What people will call this device.")] = "",
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where its state and its cache go.")
    ] = None,
    accept_all: Annotated[
        bool,
        typer.Option("--accept-all/--ask", help="Accept every invitation, or wait for an answer to each."),
    ] = False,
) -> None:
    """Take part in a mesh with this device, until Ctrl-C."""
    raise NotImplementedError
