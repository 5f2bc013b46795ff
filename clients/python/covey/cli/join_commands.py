"""`covey join`: let this device take part in a mesh."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import JsonOption, checked_address, example
from covey.cli._options import BackendOption, GpuMemoryOption, WorkersOption, preference_of
from covey.cli._output import Out

if TYPE_CHECKING:
    from covey_participant.app import ParticipantSettings

__all__ = ["add_to"]

MIB = 1 << 20


def add_to(root: typer.Typer) -> None:
    """Adds the command."""
    root.command("join", epilog=example("covey join 127.0.0.1:7654 --name laptop --accept-all"))(join)


FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        envvar="COVEY_PARTICIPANT_FOLDER",
        help="Where its identity and its cache lie.  [default: the user's data folder, by coordinator]",
    ),
]
AcceptOption = Annotated[
    bool | None,
    typer.Option(
        "--accept-all/--ask",
        envvar="COVEY_ACCEPT_ALL",
        help="Accept every invitation, or wait for answers.  [default: as before, at first --ask]",
    ),
]
MemoryOption = Annotated[
    int | None, typer.Option("--memory-mib", min=1, help="Memory that a package may use.")
]
RootCertOption = Annotated[
    Path | None,
    typer.Option("--root-cert", metavar="FILE", envvar="COVEY_ROOT_CERT", help="PEM certificates: TLS."),
]
LogLevelOption = Annotated[
    str, typer.Option("--log-level", envvar="COVEY_LOG_LEVEL", help="debug, info, warning or error.")
]


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The coordinator's HOST:PORT.")],
    name: Annotated[
        str, typer.Option("--name", envvar="COVEY_NAME", help="What people will call this device.")
    ] = "",
    folder: FolderOption = None,
    accept_all: AcceptOption = None,
    backend: BackendOption = None,
    max_workers: WorkersOption = None,
    gpu_memory: GpuMemoryOption = None,
    memory_mib: MemoryOption = None,
    root_cert: RootCertOption = None,
    log_level: LogLevelOption = "info",
    as_json: JsonOption = False,
) -> None:
    """Take part in a mesh, until Ctrl-C.

    It joins again by itself whenever the connection is lost. With --json one object is printed when it is
    ready: participant_id, folder, control_address.
    """
    from covey.context import device_folder
    from covey_participant.app import ParticipantSettings

    checked_address(address, "ADDRESS")
    settings = ParticipantSettings(
        coordinator=address,
        folder=(folder or device_folder(address)).absolute(),
        display_name=name,
        root_cert=root_cert,
        accept_all=accept_all,
        preference=preference_of(backend),
        max_local_workers=max_workers,
        gpu_memory_budget_mib=gpu_memory,
        memory_bytes=memory_mib * MIB if memory_mib is not None else None,
    )
    _run(settings, Out(as_json=as_json), log_level)


def _run(settings: "ParticipantSettings", out: Out, log_level: str) -> None:
    import asyncio

    from covey.join import run
    from covey.parent import tie_to_parent
    from covey_kit.logging import configure
    from covey_kit.memory import tune_malloc

    tie_to_parent()
    try:
        configure(log_level)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from error
    tune_malloc()

    def on_ready(participant_id: str, control: str) -> None:
        facts = {
            "participant_id": participant_id,
            "folder": str(settings.folder),
            "control_address": control or None,
        }
        out.value(facts)
        out.line(f"this device is {participant_id}; its state is in {settings.folder}; Ctrl-C leaves")

    asyncio.run(run(settings, on_ready))
