"""The `covey-storage` command."""

from pathlib import Path
from typing import Annotated

import typer

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
from covey_kit.tokens import Verifier
from covey_kit.version import program_version
from covey_storage.app import StorageApp, StorageSettings

cli = typer.Typer(
    name="covey-storage",
    help="Keeps blobs by their SHA-256, and checkpoints.",
    no_args_is_help=True,
    add_completion=False,
)

_DEFAULTS = StorageSettings(Path("covey-storage"))


TrustedKeyOption = Annotated[
    list[Path],
    typer.Option(
        envvar="COVEY_TRUSTED_KEY",
        help="PEM of a public key whose tokens count: the coordinator's signing-key.pub. Repeatable.",
    ),
]
FolderOption = Annotated[
    Path, typer.Option(envvar="COVEY_STORAGE_FOLDER", help="State folder; of one process at a time.")
]
DatabaseUrlOption = Annotated[
    str | None,
    typer.Option(envvar="COVEY_STORAGE_DATABASE_URL", help="SQLAlchemy URL. Default: SQLite in the folder."),
]
BlobUrlOption = Annotated[
    str | None,
    typer.Option(envvar="COVEY_STORAGE_BLOB_URL", help="Such as s3://bucket/prefix. Default: the folder."),
]
MaxBlobBytesOption = Annotated[
    int, typer.Option(envvar="COVEY_STORAGE_MAX_BLOB_BYTES", min=1, help="Largest blob taken.")
]
MinFreeBytesOption = Annotated[
    int,
    typer.Option(envvar="COVEY_STORAGE_MIN_FREE_BYTES", min=0, help="Room that writes leave on the disk."),
]
StalePartSecondsOption = Annotated[
    float,
    typer.Option(
        envvar="COVEY_STORAGE_STALE_PART_SECONDS",
        min=0,
        help="A scrub drops writes that haven't grown for this long.",
    ),
]
MaxTransfersOption = Annotated[
    int,
    typer.Option(
        envvar="COVEY_STORAGE_MAX_TRANSFERS",
        min=1,
        help="Reads and writes of blobs at the same time; each holds up to 12 MiB of memory.",
    ),
]


@cli.command()
def serve(
    trusted_key: TrustedKeyOption,
    folder: FolderOption = _DEFAULTS.folder,
    listen: ListenOption = "127.0.0.1:7655",
    database_url: DatabaseUrlOption = None,
    blob_url: BlobUrlOption = None,
    max_blob_bytes: MaxBlobBytesOption = _DEFAULTS.max_blob_bytes,
    min_free_bytes: MinFreeBytesOption = _DEFAULTS.min_free_bytes,
    stale_part_seconds: StalePartSecondsOption = _DEFAULTS.stale_part_seconds,
    max_transfers: MaxTransfersOption = _DEFAULTS.max_transfers,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    insecure: InsecureOption = False,
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    del config  # read by its callback
    host, port = parse_listen(listen)
    settings = StorageSettings(
        folder, database_url, blob_url, max_blob_bytes, min_free_bytes, stale_part_seconds, max_transfers
    )
    options = ServeOptions(
        host, port, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure, blob_bytes=max_blob_bytes
    )

    async def main() -> None:
        verifier = Verifier([path.read_bytes() for path in trusted_key])
        app = await StorageApp.open(settings)
        try:
            await run_until_signal(Host([app], verifier, options), _ready)
        finally:
            await app.close()

    run_service(main, log_level=log_level, log_json=log_json)


def _ready(address: str) -> None:
    typer.echo(f"covey-storage is ready on {address}")


@cli.command()
def version() -> None:
    """Print the program's version."""
    typer.echo(program_version())


def main() -> None:
    """Entry point of the command."""
    cli()


if __name__ == "__main__":
    main()
