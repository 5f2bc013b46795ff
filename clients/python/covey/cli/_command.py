"""What commands that talk to a coordinator have in common: their options, and running a coroutine."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from covey.cli._output import Out

__all__ = ["JsonOption", "checked_address", "client_command", "example", "group", "run_async"]

T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else, on stdout.")]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Whom to talk to.  [env: COVEY_COORDINATOR; default: the last `covey up` on this machine]",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the owner's token.  [env: COVEY_TOKEN_FILE; default: what `covey up` remembered]",
    ),
]
RootCertOption = Annotated[
    Path | None,
    typer.Option(
        "--root-cert",
        metavar="FILE",
        envvar="COVEY_ROOT_CERT",
        help="PEM certificates to trust: the coordinator speaks TLS.",
    ),
]

_CONNECTION: dict[str, tuple[Any, Any]] = {
    "coordinator": (CoordinatorOption, None),
    "token_file": (TokenFileOption, None),
    "root_cert": (RootCertOption, None),
    "as_json": (JsonOption, False),
}


def example(*lines: str) -> str:
    """Returns the epilog of a command's help."""
    return ("Example: " if len(lines) == 1 else "Examples: ") + "   or   ".join(lines)


def group(name: str, help: str) -> typer.Typer:
    """Returns an empty group of commands."""
    return typer.Typer(name=name, help=help, no_args_is_help=True, rich_markup_mode=None)


def checked_address(address: str, name: str) -> None:
    """Makes an address that isn't one a matter of wrong usage (exit 2)."""
    from covey.context import check_address
    from covey_kit.errors import InvalidArgument

    try:
        check_address(address)
    except InvalidArgument as error:
        raise typer.BadParameter(error.message, param_hint=name) from error


def run_async(body: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; Ctrl-C cancels it, lets it clean up, and raises KeyboardInterrupt."""
    return asyncio.run(body)


def client_command(
    app: typer.Typer, name: str, *examples: str
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes `async def command(client, out, ...)` a command of `app`.

    It gets the options `--coordinator`, `--token-file`, `--root-cert` and `--json` besides its own
    parameters, and is called with a connected client.
    """

    def decorate(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        own = list(inspect.signature(body).parameters.values())[2:]
        added = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, (annotation, default) in _CONNECTION.items()
        ]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        @functools.wraps(body)
        def command(**arguments: Any) -> None:
            chosen = {key: arguments.pop(key) for key in _CONNECTION}
            out = Out(as_json=chosen["as_json"])
            if chosen["coordinator"] is not None:
                checked_address(chosen["coordinator"], "--coordinator")

            async def connected() -> None:
                from covey.client import connect

                client = connect(
                    chosen["coordinator"], token_file=chosen["token_file"], root_cert=chosen["root_cert"]
                )
                async with client:
                    await body(client, out, **arguments)

            run_async(connected())

        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *added]} | {"return": None}
        del command.__wrapped__
        return app.command(name, epilog=example(*examples))(command)

    return decorate
