"""`covey up`: coordinator, storage and diagnostics in one process on one port."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import JsonOption, example
from covey.cli._output import Out
from covey.context import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from covey.up import UpOptions

__all__ = ["add_to"]


def add_to(root: typer.Typer) -> None:
    """Adds the command."""
    root.command(
        "up", epilog=example("covey up", "covey up --listen 0.0.0.0:7654 --tls-cert c.pem --tls-key k.pem")
    )(up)


def up(
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="HOST:PORT", envvar="COVEY_LISTEN", help="Port 0 picks a free one."),
    ] = DEFAULT_ADDRESS,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Where state goes.  [env: COVEY_FOLDER; default: the user's data folder]",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", envvar="COVEY_TLS_CERT", help="PEM certificate chain."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", envvar="COVEY_TLS_KEY", help="PEM private key."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="COVEY_INSECURE", help="Allow plain text beyond loopback.")
    ] = False,
    no_remember: Annotated[
        bool,
        typer.Option("--no-remember", help="Don't make this the coordinator that other commands talk to."),
    ] = False,
    log_level: Annotated[
        str, typer.Option("--log-level", envvar="COVEY_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "warning",
    as_json: JsonOption = False,
) -> None:
    """Start a mesh here, until Ctrl-C.

    Coordinator, storage and diagnostics run in this process, on one port. What they were doing goes on at the
    next start. With --json one object is printed when it is ready: address, folder, token_file.
    """
    from covey.context import data_folder
    from covey.up import UpOptions
    from covey_kit.options import parse_listen

    host, port = parse_listen(listen)
    options = UpOptions(
        host=host,
        port=port,
        folder=(folder or data_folder()).absolute(),
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        remember=not no_remember,
    )
    _serve(options, Out(as_json=as_json), log_level)


def _serve(options: "UpOptions", out: Out, log_level: str) -> None:
    from covey.parent import tie_to_parent
    from covey.up import serve
    from covey_kit.logging import configure
    from covey_kit.memory import tune_malloc

    tie_to_parent()
    try:
        configure(log_level)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from error
    tune_malloc()

    def on_ready(address: str, token_file: Path) -> None:
        out.value({"address": address, "folder": str(options.folder), "token_file": str(token_file)})
        out.facts(
            [
                ("listening on", address),
                ("state in", options.folder),
                ("owner's token", token_file),
                ("join with", f"covey join {_told(options.host, address)}"),
            ]
        )
        out.line("Ctrl-C stops it; jobs go on where they were at the next start.")

    asyncio.run(serve(options, on_ready))


def _told(host: str, address: str) -> str:
    """Returns the address to tell others: this machine's name, when it listens on all interfaces."""
    import socket

    unspecified = host in {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound
    return f"{socket.gethostname()}:{address.rpartition(':')[2]}" if unspecified else address
