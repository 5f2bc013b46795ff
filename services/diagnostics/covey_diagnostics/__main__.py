"""`covey-diagnostics`: the diagnostics service as a process of its own."""

from pathlib import Path
from typing import Annotated

import typer

from covey_diagnostics.app import DiagnosticsApp, DiagnosticsSettings
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

__all__ = ["main"]

app = typer.Typer(add_completion=False, help="Shows what each device is really doing.")


@app.callback()
def _root() -> None:
    """Shows what each device is really doing."""


@app.command()
def serve(
    trusted_key: Annotated[
        list[Path],
        typer.Option(
            "--trusted-key",
            envvar="COVEY_TRUSTED_KEY",
            exists=True,
            dir_okay=False,
            help="Public key (PEM) whose tokens count: the coordinator's signing-key.pub. May be repeated.",
        ),
    ],
    listen: ListenOption = "127.0.0.1:7656",
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    insecure: InsecureOption = False,
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Serves diagnostics.

    Example: covey-diagnostics serve --listen 127.0.0.1:7656 --trusted-key coordinator/signing-key.pub
    """
    del config  # read by its callback
    host, port = parse_listen(listen)

    async def run() -> None:
        verifier = Verifier([path.read_bytes() for path in trusted_key])
        service = await DiagnosticsApp.open(DiagnosticsSettings())
        options = ServeOptions(host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, insecure=insecure)
        await run_until_signal(
            Host([service], verifier, options),
            lambda address: typer.echo(f"covey-diagnostics is ready on {address}"),
        )

    run_service(run, log_level=log_level, log_json=log_json)


def main() -> None:
    """Runs the command."""
    app()


if __name__ == "__main__":
    main()
