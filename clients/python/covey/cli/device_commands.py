"""`covey device`: the device that joined from this machine."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import JsonOption, example, group, run_async
from covey.cli._options import BackendOption, GpuMemoryOption, WorkersOption, check_backend
from covey.cli._output import Out, plain
from covey.words import backend_text, invitation_word, size, stage_word

if TYPE_CHECKING:
    from covey.client import Device
    from covey.v1.participant_service_pb2 import ParticipantState

__all__ = ["add_to"]

app = group("device", "See and steer the device that joined here.")

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        envvar="COVEY_PARTICIPANT_FOLDER",
        help="Its folder.  [default: the only one in the user's data folder]",
    ),
]
InvitationArgument = Annotated[
    str, typer.Argument(metavar="INVITATION", help="The invitation's id, or its job's.")
]


def add_to(root: typer.Typer) -> None:
    """Adds the group to the command."""
    root.add_typer(app)


def _with_device(folder: Path | None, body: "Callable[[Device], Awaitable[None]]") -> None:
    from covey.client import open_device
    from covey.context import device_folder

    chosen = folder or device_folder()

    async def opened() -> None:
        async with open_device(chosen) as device:
            await body(device)

    run_async(opened())


@app.command("show", epilog=example("covey device show"))
def show(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Show what the device does, what is set, and its invitations."""
    out = Out(as_json=as_json)

    async def body(device: "Device") -> None:
        state = await device.state()
        out.value(plain(state))
        _show(out, state)

    _with_device(folder, body)


def _show(out: Out, state: "ParticipantState") -> None:
    from covey.v1.common_pb2 import BackendPreference

    device, settings = state.device, state.settings
    snapshot, last = state.snapshot, state.last_run
    budgeted = settings.HasField("gpu_memory_budget_mib")
    preference = BackendPreference.Name(settings.backend_preference).removeprefix("BACKEND_PREFERENCE_")
    out.facts(
        [
            ("device", state.participant_id),
            ("name", state.display_name),
            ("coordinator", state.coordinator_address),
            ("connected", "yes" if state.connected else f"no: {state.disconnected_reason}"),
            ("does", stage_word(state.snapshot.stage)),
            ("runs on", f"{device.platform}, {device.runtime}"),
            ("cores", device.cpu_cores if device.HasField("cpu_cores") else None),
            ("memory", size(device.memory_bytes) if device.HasField("memory_bytes") else None),
            ("GPU", ", ".join(adapter.name for adapter in device.adapters)),
            ("preference", preference.lower()),
            ("GPU memory", f"{settings.gpu_memory_budget_mib} MiB" if budgeted else "any"),
            (
                "workers",
                settings.max_local_workers if settings.HasField("max_local_workers") else "all cores",
            ),
            ("runs now on", backend_text(snapshot.backend, snapshot.fallback_reason, snapshot.adapter.name)),
            (
                "ran last on",
                backend_text(last.backend, last.fallback_reason, last.adapter.name, last.message),
            ),
            ("accepts", "every invitation" if settings.accept_all else "what is accepted here"),
        ]
    )
    rows = [
        (
            one.invitation_id,
            invitation_word(one.state),
            one.job_id,
            f"{one.package_name} {one.package_version}",
            size(one.total_bytes),
        )
        for one in state.invitations
    ]
    out.table(("INVITATION", "STATE", "JOB", "PACKAGE", "#SIZE"), rows, empty="no invitations")


@app.command("accept", epilog=example("covey device accept digits-4f7k2m9c"))
def accept(invitation: InvitationArgument, folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Accept an invitation."""
    _answer(invitation, folder, Out(as_json=as_json), accepted=True)


@app.command("decline", epilog=example("covey device decline digits-4f7k2m9c"))
def decline(invitation: InvitationArgument, folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Decline an invitation."""
    _answer(invitation, folder, Out(as_json=as_json), accepted=False)


def _answer(invitation: str, folder: Path | None, out: Out, *, accepted: bool) -> None:
    async def body(device: "Device") -> None:
        known = {one.job_id: one.invitation_id for one in (await device.state()).invitations}
        after = await device.respond(known.get(invitation, invitation), accept=accepted)
        out.value(plain(after))
        out.line(f"{after.invitation_id} is {invitation_word(after.state)}")

    _with_device(folder, body)


@app.command("set", epilog=example("covey device set --backend cpu --max-workers 2"))
def change(
    folder: FolderOption = None,
    backend: BackendOption = None,
    max_workers: WorkersOption = None,
    gpu_memory: GpuMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set what the device may use.

    It holds from the next assignment on, and is kept.
    """
    from covey.v1.common_pb2 import BackendPreference

    out = Out(as_json=as_json)
    chosen = check_backend(backend)
    if chosen is None and max_workers is None and gpu_memory is None:
        raise typer.BadParameter("say what to set: --backend, --max-workers or --gpu-memory")

    async def body(device: "Device") -> None:
        if chosen is not None:
            await device.set_backend(BackendPreference.Value(f"BACKEND_PREFERENCE_{chosen.upper()}"))
        if max_workers is not None:
            await device.set_max_workers(max_workers)
        if gpu_memory is not None:
            await device.set_gpu_budget(gpu_memory)
        state = await device.state()
        out.value(plain(state.settings))
        _show(out, state)

    _with_device(folder, body)


@app.command("probe", epilog=example("covey device probe models/digits"))
def probe(
    package: Annotated[
        Path | None, typer.Argument(metavar="[PACKAGE]", help="A package's folder.", show_default=False)
    ] = None,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a package would run on, and why."""
    from covey.packages import load
    from covey.v1.common_pb2 import Backend

    out = Out(as_json=as_json)
    manifest = load(package).manifest if package is not None else None

    async def body(device: "Device") -> None:
        found = await device.probe(manifest)
        out.value(plain(found))
        out.line(": ".join(part for part in (Backend.Name(found.backend), found.message) if part))

    _with_device(folder, body)
