"""`covey-participant`: takes part in the training of a coordinator's jobs."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from covey_kit.addresses import split
from covey_kit.options import ConfigOption, LogJsonOption, LogLevelOption, parse_listen, run_service
from covey_kit.serve import ServeOptions
from covey_participant.app import ParticipantApp, ParticipantSettings
from covey_participant.domain.values import Preference
from covey_participant.state.cache import DEFAULT_BYTES

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

MIB = 1 << 20


@app.callback()
def _group() -> None:
    """Takes part in the training of a coordinator's jobs."""


async def _run(settings: ParticipantSettings) -> None:
    participant = await ParticipantApp.open(settings)
    loop = asyncio.get_running_loop()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            participant.pool.kill_now()
            raise SystemExit(130)
        participant.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

    def on_ready(control: str) -> None:
        where = f"; control at {control}" if control else ""
        typer.echo(f"participant {participant.identity.participant_id} in {settings.folder}{where}")

    await participant.run(on_ready)


@app.command()
def join(
    address: Annotated[str, typer.Argument(envvar="COVEY_COORDINATOR", help="HOST:PORT of the coordinator.")],
    *,
    config: ConfigOption = None,
    folder: Annotated[
        Path, typer.Option(envvar="COVEY_PARTICIPANT_FOLDER", help="Where identity, settings and cache lie.")
    ],
    name: Annotated[str, typer.Option(envvar="COVEY_NAME", help="What people call this device.")] = "",
    participant_id: Annotated[
        str, typer.Option("--id", envvar="COVEY_PARTICIPANT_ID", help="Id for a new folder; default: random.")
    ] = "",
    accept_all: Annotated[
        bool | None,
        typer.Option(
            "--accept-all/--ask",
            envvar="COVEY_ACCEPT_ALL",
            help="Accept every invitation, or wait for answers. Default: as before, at first --ask.",
        ),
    ] = None,
    backend: Annotated[
        Preference | None,
        typer.Option(case_sensitive=False, help="What to run on. Default: as before, at first AUTO."),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Local workers of one assignment. Default: one per core."),
    ] = None,
    gpu_budget_mib: Annotated[
        int | None, typer.Option(min=1, help="GPU memory that one assignment may use. Default: no bound.")
    ] = None,
    memory_mib: Annotated[
        int | None, typer.Option(min=1, help="Memory that a package may use. Default: 3/4 of the device's.")
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(min=0.01, max=3600, help="Longest call into a package that is allowed here.")
    ] = 3600.0,
    cache_mib: Annotated[int, typer.Option(min=1, help="Bound of the blob cache.")] = DEFAULT_BYTES // MIB,
    root_cert: Annotated[
        Path | None, typer.Option(envvar="COVEY_ROOT_CERT", help="PEM root certificate: connect with TLS.")
    ] = None,
    control: Annotated[
        str, typer.Option(help="HOST:PORT for local control; port 0 picks a free one; empty: none.")
    ] = "127.0.0.1:0",
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
) -> None:
    """Joins a coordinator, and joins again whenever the connection is lost, until SIGTERM or SIGINT."""
    del config  # read when the options were parsed
    try:
        split(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="ADDRESS") from error
    host, port = parse_listen(control) if control else ("", 0)
    settings = ParticipantSettings(
        coordinator=address,
        folder=folder,
        display_name=name,
        participant_id=participant_id,
        root_cert=root_cert,
        accept_all=accept_all,
        preference=backend,
        max_local_workers=max_workers,
        gpu_memory_budget_mib=gpu_budget_mib,
        cache_bytes=cache_mib * MIB,
        memory_bytes=memory_mib * MIB if memory_mib else None,
        step_seconds=step_seconds,
        control=ServeOptions(host=host, port=port) if control else None,
    )
    run_service(lambda: _run(settings), log_level=log_level, log_json=log_json)


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
