"""`covey-participant`: takes part in the training of a coordinator's jobs."""

import asyncio
import os
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

AddressArgument = Annotated[
    str, typer.Argument(envvar="COVEY_COORDINATOR", help="HOST:PORT of the coordinator.")
]
FolderOption = Annotated[
    Path, typer.Option(envvar="COVEY_PARTICIPANT_FOLDER", help="Where identity, settings and cache lie.")
]
NameOption = Annotated[str, typer.Option(envvar="COVEY_NAME", help="What people call this device.")]
IdOption = Annotated[
    str, typer.Option("--id", envvar="COVEY_PARTICIPANT_ID", help="Id for a new folder; default: random.")
]
AcceptOption = Annotated[
    bool | None,
    typer.Option(
        "--accept-all/--ask",
        envvar="COVEY_ACCEPT_ALL",
        help="Accept every invitation, or wait for answers. Default: as before, at first --ask.",
    ),
]
BackendOption = Annotated[
    Preference | None,
    typer.Option(
        envvar="COVEY_BACKEND",
        case_sensitive=False,
        help="What to run on. Default: as before, at first AUTO.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Local workers of one assignment. Default: as before, at first all cores."
    ),
]
GpuBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        "--gpu-budget-mib",
        min=1,
        help="GPU memory in MiB that one assignment may use. Default: as before, at first any.",
    ),
]
MemoryOption = Annotated[
    int | None, typer.Option(min=1, help="Memory that a package may use. Default: 3/4 of the device's.")
]
StepOption = Annotated[
    float, typer.Option(min=0.01, max=3600, help="Longest call into a package that is allowed here.")
]
CacheOption = Annotated[int, typer.Option(min=1, help="Bound of the blob cache.")]
RootCertOption = Annotated[
    Path | None, typer.Option(envvar="COVEY_ROOT_CERT", help="PEM root certificate: connect with TLS.")
]
ControlOption = Annotated[
    str, typer.Option(help="HOST:PORT for local control; port 0 picks a free one; empty: none.")
]


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
            participant.kill_now()
            os._exit(130)
        participant.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

    def on_ready(control: str) -> None:
        where = f"; control at {control}" if control else ""
        typer.echo(f"participant {participant.identity.participant_id} in {settings.folder}{where}")

    await participant.run(on_ready)


@app.command()
def join(
    address: AddressArgument,
    *,
    config: ConfigOption = None,
    folder: FolderOption,
    name: NameOption = "",
    participant_id: IdOption = "",
    accept_all: AcceptOption = None,
    backend: BackendOption = None,
    max_workers: WorkersOption = None,
    gpu_budget_mib: GpuBudgetOption = None,
    memory_mib: MemoryOption = None,
    step_seconds: StepOption = 3600.0,
    cache_mib: CacheOption = DEFAULT_BYTES // MIB,
    root_cert: RootCertOption = None,
    control: ControlOption = "127.0.0.1:0",
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
) -> None:
    """Joins a coordinator, and joins again whenever the connection is lost, until SIGTERM or SIGINT."""
    del config  # read when the options were parsed
    try:
        split(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="ADDRESS") from error
    settings = ParticipantSettings(
        coordinator=address,
        folder=folder.absolute(),
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
        control=_control(control),
    )
    run_service(lambda: _run(settings), log_level=log_level, log_json=log_json)


def _control(value: str) -> ServeOptions | None:
    if not value:
        return None
    host, port = parse_listen(value)
    return ServeOptions(host=host, port=port)


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
