"""Options that the commands which make jobs have in common."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "ChangesOption",
    "DataOption",
    "FilesOption",
    "JobArgument",
    "NameOption",
    "RequestOption",
    "RoundOption",
    "SettingsOption",
    "ValidateOnlyOption",
]

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
RoundOption = Annotated[
    int | None, typer.Option("--round", min=0, help="The round.  [default: the latest]", show_default=False)
]
DataOption = Annotated[
    Path | None, typer.Option("--data", metavar="FILE", help="The dataset's manifest.", show_default=False)
]
FilesOption = Annotated[
    Path | None,
    typer.Option("--files", metavar="DIR", help="Where the chunks lie.  [default: beside the manifest]"),
]
SettingsOption = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="JSON or TOML with JobSettings.")
]
ChangesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated."),
]
NameOption = Annotated[str, typer.Option("--name", help="What people will call the job.")]
RequestOption = Annotated[
    str | None, typer.Option("--request-id", help="The same id again gives the job made before.")
]
ValidateOnlyOption = Annotated[
    bool, typer.Option("--validate-only", help="Check everything, upload and make nothing.")
]
