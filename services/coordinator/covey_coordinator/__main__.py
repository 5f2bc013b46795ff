"""`covey-coordinator`: serves the coordinator by itself."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from covey_coordinator.app import CoordinatorApp, CoordinatorSettings
from covey_kit.caller import Role
from covey_kit.options import (
    ConfigOption,
    InsecureOption,
    ListenOption,
    LogJsonOption,
    LogLevelOption,
    TlsCertOption,
    TlsKeyOption,
    parse_listen,
    run_service,
)
from covey_kit.serve import Host, ServeOptions, run_until_signal
from covey_kit.tokens import SigningKey, Verifier, write_secret

__all__ = ["OWNER_TOKEN_SECONDS", "main"]

OWNER_TOKEN_SECONDS = 365 * 86400.0

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

FolderOption = Annotated[
    Path,
    typer.Option("--folder", envvar="COVEY_COORDINATOR_FOLDER", help="Folder for everything that must last."),
]
StorageOption = Annotated[
    str, typer.Option("--storage", envvar="COVEY_STORAGE", help="HOST:PORT of storage.")
]
DiagnosticsOption = Annotated[
    str,
    typer.Option(
        "--diagnostics", envvar="COVEY_DIAGNOSTICS", help="HOST:PORT of diagnostics, told to participants."
    ),
]
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="COVEY_COORDINATOR_DATABASE_URL",
        help="SQLAlchemy URL with an async driver. Default: SQLite in the folder.",
    ),
]
RootCertOption = Annotated[
    Path | None,
    typer.Option(
        "--storage-root-cert", envvar="COVEY_STORAGE_ROOT_CERT", help="PEM to verify storage's TLS with."
    ),
]


@cli.callback()
def _root() -> None:
    """The coordinator of a Covey mesh."""


@cli.command()
def serve(
    folder: FolderOption,
    storage: StorageOption,
    listen: ListenOption = "127.0.0.1:7654",
    diagnostics: DiagnosticsOption = "",
    database_url: DatabaseOption = "",
    storage_root_cert: RootCertOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    insecure: InsecureOption = False,
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
    config: ConfigOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Serves until SIGINT or SIGTERM. The owner's token is in FOLDER/owner.token."""
    host, port = parse_listen(listen)
    options = ServeOptions(
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        storage_address=storage,
        diagnostics_address=diagnostics,
    )

    async def run() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key = await asyncio.to_thread(SigningKey.load_or_create, folder / "signing-key.pem")
        token = key.issue("owner", Role.OWNER, OWNER_TOKEN_SECONDS)
        app = await CoordinatorApp.open(
            CoordinatorSettings(
                folder=folder,
                database_url=database_url or None,
                storage_address=storage,
                told_storage_address=storage,
                told_diagnostics_address=diagnostics,
                root_cert=storage_root_cert,
            ),
            key,
        )
        await asyncio.to_thread(write_secret, folder / "owner.token", token.encode())
        served = Host([app], Verifier([key.public_pem]), options)
        try:
            await run_until_signal(served, lambda address: typer.echo(f"coordinator is ready on {address}"))
        finally:
            await app.close()

    run_service(run, log_level=log_level, log_json=log_json)


def main() -> None:
    """Entry point."""
    cli()


if __name__ == "__main__":
    main()
