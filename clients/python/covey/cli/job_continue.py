"""`covey job continue`: a job that goes on from a checkpoint of another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import client_command
from covey.cli._job_options import (
    ChangesOption,
    DataOption,
    FilesOption,
    JobArgument,
    NameOption,
    RequestOption,
    RoundOption,
    SettingsOption,
    ValidateOnlyOption,
)
from covey.cli._output import Out, plain
from covey.cli.job_commands import app, settings_of, upload_bar

if TYPE_CHECKING:
    from covey.client import Client
    from covey.packages import Dataset, Package

__all__ = ["add_to"]

CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FILE", help="Go on from this file, not from a round of JOB."),
]
PackageOption = Annotated[
    Path | None, typer.Option("--package", metavar="DIR", help="The package with a new shader archive.")
]
NewQueueOption = Annotated[
    bool, typer.Option("--new-queue", help="Begin a new queue of chunks, or a new sequence of units.")
]


def add_to(root: typer.Typer) -> None:
    """Does nothing: importing this module added its command to `covey job`."""


@client_command(
    app,
    "continue",
    "covey job continue digits-4f7k2m9c --target 500",
    "covey job continue cartpole-1b2c3d4e --target 90 --round 30 --set learningRate=0.001 --new-queue",
)
async def continue_(
    client: "Client",
    out: Out,
    job: JobArgument,
    target: Annotated[int, typer.Option("--target", min=1, help="The final round of the new job.")],
    round_number: RoundOption = None,
    checkpoint: CheckpointOption = None,
    data: DataOption = None,
    files: FilesOption = None,
    package: PackageOption = None,
    new_queue: NewQueueOption = False,
    settings: SettingsOption = None,
    changes: ChangesOption = None,
    name: NameOption = "",
    request_id: RequestOption = None,
    validate_only: ValidateOnlyOption = False,
) -> None:
    """Make a job that goes on from a checkpoint.

    Settings that aren't given are those of JOB, and so are its data and participants, who are invited again.
    Without --new-queue the data must be the same: its queue goes on where the checkpoint stands.
    """
    import asyncio

    wanted = settings_of(settings, changes or [], None, None)
    loaded, dataset = await asyncio.to_thread(_load, package, data, files)
    with upload_bar(out) as progress:
        made = await client.jobs.continue_from(
            *(job, target),
            round_number=round_number,
            checkpoint=checkpoint,
            dataset=dataset,
            package=loaded,
            settings=wanted,
            new_queue=new_queue,
            display_name=name,
            request_id=request_id,
            validate_only=validate_only,
            on_progress=progress,
        )
    out.value(plain(made))
    if validate_only:
        out.line(f"valid: from round {made.lineage.round} to round {made.progress.rounds_wanted}")
    else:
        out.line(made.job_id)


def _load(
    package: Path | None, data: Path | None, files: Path | None
) -> "tuple[Package | None, Dataset | None]":
    """Loads what was given. Blocks."""
    from covey.packages import load, load_dataset

    loaded = load(package) if package is not None else None
    return loaded, load_dataset(data, loaded, files) if data is not None else None
