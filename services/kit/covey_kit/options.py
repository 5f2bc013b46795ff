"""Settings of the service commands: flag > environment > file > default.

The file is TOML with the flags' names; `--config FILE` (or `COVEY_CONFIG`) names it:

    listen = "127.0.0.1:7654"
    log-json = true
"""

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from covey_kit.addresses import split
from covey_kit.errors import CoveyError
from covey_kit.logging import configure
from covey_kit.memory import tune_malloc

__all__ = [
    "ConfigOption",
    "InsecureOption",
    "ListenOption",
    "LogJsonOption",
    "LogLevelOption",
    "TlsCertOption",
    "TlsKeyOption",
    "parse_listen",
    "run_service",
]


def _load(context: typer.Context, value: Path | None) -> Path | None:
    if value is None:
        return None
    try:
        with value.open("rb") as file:
            found: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise typer.BadParameter(f"can't read {value}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{value} isn't TOML: {error}") from error
    known = {str(p.name): p for p in context.command.params}
    unknown = sorted(key for key in found if key.replace("-", "_") not in known)
    if unknown:
        names = ", ".join(sorted(name.replace("_", "-") for name in known if name != "config"))
        raise typer.BadParameter(f"{value}: unknown keys {', '.join(unknown)}; known are {names}")
    context.default_map = {key.replace("-", "_"): entry for key, entry in found.items()}
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="COVEY_CONFIG",
        help="TOML file with any of these settings.",
        callback=_load,
        is_eager=True,
    ),
]
ListenOption = Annotated[
    str,
    typer.Option("--listen", envvar="COVEY_LISTEN", help="HOST:PORT to listen on; port 0 picks a free one."),
]
TlsCertOption = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="COVEY_TLS_CERT", help="PEM certificate chain.")
]
TlsKeyOption = Annotated[
    Path | None, typer.Option("--tls-key", envvar="COVEY_TLS_KEY", help="PEM private key.")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", envvar="COVEY_INSECURE", help="Allow plain text beyond loopback.")
]
LogLevelOption = Annotated[
    str, typer.Option("--log-level", envvar="COVEY_LOG_LEVEL", help="debug, info, warning or error.")
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", envvar="COVEY_LOG_JSON", help="Log one JSON object a line.")
]


def parse_listen(value: str) -> tuple[str, int]:
    """Returns host and port of `--listen`; a wrong value is wrong usage (exit 2)."""
    try:
        return split(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from error


def run_service(main: Callable[[], Awaitable[None]], *, log_level: str, log_json: bool) -> None:
    """Runs a service's main coroutine with logging and memory set up.

    What people can mend (a taken port, a locked folder) is printed in a line and exits with 1.
    """
    try:
        configure(log_level, json=log_json)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from error
    tune_malloc()

    async def run() -> None:
        await main()

    try:
        asyncio.run(run())
    except (CoveyError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
