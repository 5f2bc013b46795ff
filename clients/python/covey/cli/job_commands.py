"""`covey job`: make, run and watch training runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from covey.cli._command import client_command, group
from covey.cli._job_options import (
    ChangesOption,
    FilesOption,
    JobArgument,
    NameOption,
    RequestOption,
    RoundOption,
    SettingsOption,
    ValidateOnlyOption,
)
from covey.cli._output import Out, plain
from covey.words import (
    duration,
    invitation_word,
    lineage_text,
    mean,
    mean_text,
    metric_text,
    size,
    stage_word,
    state_word,
    trained,
)

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from covey.client import Client, UploadProgress
    from covey.packages import Dataset, Package
    from covey.v1.job_pb2 import Job, JobSettings

__all__ = ["add_to", "app", "settings_of", "upload_bar"]

QUIET_SECONDS = 5.0
"""A round that lasts longer than this is followed assignment by assignment."""

ASSIGNMENT_DONE = 3
"""`ASSIGNMENT_STATUS_DONE`, known here without loading the contract."""

app = group("job", "Make, run and watch jobs.")


def add_to(root: typer.Typer) -> None:
    """Adds the group to the command."""
    root.add_typer(app)


@client_command(
    app,
    "create",
    "covey job create models/digits --data models/digits/data/dataset.json --set learningRate=0.05",
)
async def create(
    client: "Client",
    out: Out,
    package: Annotated[Path, typer.Argument(metavar="PACKAGE_DIR", help="Folder with manifest.json.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="The dataset's manifest.  [default: data/dataset.json in the package, where there is one]",
        ),
    ] = None,
    files: FilesOption = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes through the dataset.")] = None,
    target_round: Annotated[int | None, typer.Option("--target-round", help="The final round.")] = None,
    settings: SettingsOption = None,
    changes: ChangesOption = None,
    name: NameOption = "",
    request_id: RequestOption = None,
    validate_only: ValidateOnlyOption = False,
) -> None:
    """Make a job of a package and its data.

    Everything is checked here first, and what storage doesn't have yet is uploaded.
    """
    import asyncio

    from covey.packages import load, load_dataset

    if epochs is not None and target_round is not None:
        raise typer.BadParameter("--epochs and --target-round exclude each other; give one")
    wanted = settings_of(settings, changes or [], epochs, target_round)
    loaded = await asyncio.to_thread(load, package)
    if data is None and loaded.manifest.work_source.inputs == "dataset":
        data = package / "data" / "dataset.json"
        if not data.is_file():
            raise typer.BadParameter(
                f"--data is needed: {loaded.manifest.name} trains on a dataset, and there is no {data}"
            )
    dataset = await asyncio.to_thread(load_dataset, data, loaded, files) if data is not None else None
    if validate_only:
        await _validate_only(client, out, loaded, dataset, wanted, name)
        return
    with upload_bar(out) as progress:
        job = await client.jobs.create(
            loaded, dataset, wanted, display_name=name, request_id=request_id, on_progress=progress
        )
    out.value(plain(job))
    out.line(job.job_id)


def settings_of(
    file: Path | None, changes: list[str], epochs: int | None, target_round: int | None
) -> "JobSettings":
    """Returns the settings of a file, of the flags for a job's length, and of `--set`."""
    from covey.settings import parse_settings, read_settings

    value = read_settings(file) if file is not None else {}
    if epochs is not None or target_round is not None:
        # The flag decides alone how long the job is, whatever the file said.
        for key in ("epochs", "rounds", "targetRound", "target_round"):
            value.pop(key, None)
        value |= {"epochs": epochs} if epochs is not None else {"targetRound": target_round}
    return parse_settings(value, changes)


async def _validate_only(
    client: "Client",
    out: Out,
    package: "Package",
    dataset: "Dataset | None",
    settings: "JobSettings",
    name: str,
) -> None:
    """Prints what the job would be. Files that aren't uploaded yet are no fault: `create` uploads them."""
    from covey_kit.errors import FailedPrecondition, Reason

    try:
        job = await client.jobs.create(package, dataset, settings, display_name=name, validate_only=True)
    except FailedPrecondition as error:
        if error.reason is not Reason.BLOB_MISSING:
            raise
        out.value({"valid": True, "job": None, "missing_files": True})
        out.line("valid; files that aren't in storage yet are uploaded when the job is made")
        return
    out.value({"valid": True, "job": plain(job), "missing_files": False})
    out.line(f"valid: {job.display_name}, {job.progress.rounds_wanted} rounds")


class upload_bar:  # noqa: N801 - used like a function, as a context manager
    """A progress bar on stderr while files are sent; nothing when stderr is no terminal."""

    def __init__(self, out: Out) -> None:
        self._bar: Any = None

    def __enter__(self) -> Self:
        import sys

        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("uploading", total=None)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: "UploadProgress") -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.bytes_done, total=progress.bytes_total)


def _command(name: str, summary: str) -> None:
    """Adds a command that takes a job and shows it afterwards."""

    async def body(client: "Client", out: Out, job: JobArgument) -> None:
        after = await getattr(client.jobs, name)(job)
        out.value(plain(after))
        out.line(f"{after.job_id} is {state_word(after.state)}")

    body.__doc__ = summary
    body.__name__ = name
    client_command(app, name, f"covey job {name} digits-4f7k2m9c")(body)


_command("start", "Start a job that was created.")
_command("pause", "Take the work back and hand out no more.")
_command("resume", "Go on with a paused job.")
_command("stop", "End a job; its checkpoints stay.")


@client_command(app, "delete", "covey job delete digits-4f7k2m9c")
async def delete(client: "Client", out: Out, job: JobArgument) -> None:
    """Forget an ended job and its checkpoints."""
    freed = await client.jobs.delete(job)
    out.value(
        {"job_id": job, "blobs_deleted": freed.blobs_deleted, "bytes_freed": freed.bytes_freed},
    )
    known = f": {freed.blobs_deleted} files, {size(freed.bytes_freed)}" if freed.blobs_deleted else ""
    out.line(f"{job} is deleted{known}")


@client_command(app, "ls", "covey job ls")
async def ls(client: "Client", out: Out) -> None:
    """List jobs, the newest first."""
    jobs = await client.jobs.list()
    out.value([plain(job) for job in jobs])
    rows = [
        (
            job.job_id,
            job.display_name,
            state_word(job.state),
            f"{job.progress.rounds_done}/{job.progress.rounds_wanted}",
            trained(job),
            len(job.participants),
            f"{job.create_time.ToDatetime():%Y-%m-%d %H:%M} UTC",
        )
        for job in jobs
    ]
    columns = ("JOB", "NAME", "STATE", "#ROUNDS", "#TRAINED", "#PARTICIPANTS", "CREATED")
    out.table(columns, rows, empty="no jobs; make one with: covey job create")


@client_command(app, "show", "covey job show digits-4f7k2m9c")
async def show(client: "Client", out: Out, job: JobArgument) -> None:
    """Show a job: how far, who, what it waits for."""
    found = await client.jobs.get(job)
    out.value(plain(found))
    _show(out, found)


def _show(out: Out, job: "Job") -> None:
    progress = job.progress
    latest = job.latest_round if job.HasField("latest_round") else None
    out.facts(
        [
            ("job", job.job_id),
            ("name", job.display_name),
            ("package", f"{job.package_name} {job.package_version}"),
            ("state", state_word(job.state)),
            ("rounds", f"{progress.rounds_done} of {progress.rounds_wanted}"),
            (
                "passes",
                f"{progress.passes_done} of {progress.passes_wanted}"
                if progress.HasField("passes_wanted")
                else None,
            ),
            ("trained", trained(job)),
            ("continued from", lineage_text(job)),
            ("latest metrics", metric_text(latest.metrics) if latest else None),
            ("held-out metrics", metric_text(latest.validation_metrics) if latest else None),
            ("failure", job.failure.message if job.HasField("failure") else None),
            ("last error", job.last_error.message if job.HasField("last_error") else None),
        ]
    )
    for wait in job.waits:
        out.line(f"waits: {wait.message}")
    out.table(
        ("PARTICIPANT", "NAME", "INVITATION", "CONNECTED", "DOES", "#DONE", "#FAILED"),
        [
            (
                one.participant_id,
                one.display_name,
                invitation_word(one.invitation),
                "yes" if one.connected else "no",
                stage_word(one.stage),
                one.assignments_done,
                one.failures,
            )
            for one in job.participants
        ],
        empty=f"nobody is invited; see: covey invite {job.job_id} --all",
    )


@client_command(app, "watch", "covey job watch digits-4f7k2m9c")
async def watch(client: "Client", out: Out, job: JobArgument) -> None:
    """Follow a job until it has ended.

    With --json: one object a line for each change. Exit code 1 when the job failed.
    """
    from covey.v1 import job_pb2
    from covey_kit.errors import FailedPrecondition, Reason

    last, now = "", None
    async for now in client.jobs.watch(job):
        out.value(plain(now))
        text = _line(now)
        if text != last:
            out.line(text)
        last = text
    if now is not None and now.state == job_pb2.JOB_STATE_FAILED:
        raise FailedPrecondition(Reason.JOB_STATE, f"{job} failed: {now.failure.message}")


def _line(job: "Job") -> str:
    """Returns where a job stands, in words that change when there is something to tell."""
    progress = job.progress
    parts = [f"{state_word(job.state)}, round {progress.rounds_done} of {progress.rounds_wanted}"]
    if job.HasField("latest_round"):
        held_out = metric_text(job.latest_round.validation_metrics)
        parts += [metric_text(job.latest_round.metrics) or "", f"held-out {held_out}" if held_out else ""]
    if job.HasField("current_round") and _seconds_since(job.current_round.start_time) > QUIET_SECONDS:
        done = sum(one.status == ASSIGNMENT_DONE for one in job.current_round.assignments)
        whole = len(job.current_round.assignments)
        parts.append(f"round {job.current_round.round}: {done} of {whole} assignments done")
    elif job.waits and state_word(job.state) != "running":
        parts.append(job.waits[0].message)
    return "; ".join(part for part in parts if part)


def _seconds_since(when: "Timestamp") -> float:
    import time

    return time.time() - when.ToNanoseconds() / 1e9


@client_command(app, "rounds", "covey job rounds digits-4f7k2m9c")
async def rounds(client: "Client", out: Out, job: JobArgument) -> None:
    """List a job's rounds with their metrics."""
    found = await client.jobs.rounds(job)
    out.value([plain(one) for one in found])
    names = list(dict.fromkeys(m.name for one in found for m in one.metrics))
    rows = []
    for one in found:
        seconds = (one.end_time.ToDatetime() - one.start_time.ToDatetime()).total_seconds()
        rows.append(
            (
                one.round,
                *(mean_text(one.metrics, name) for name in names),
                *(mean_text(one.validation_metrics, name) for name in names),
                f"{one.units:,}",
                len(one.participant_ids),
                duration(seconds) if one.HasField("end_time") and one.HasField("start_time") else None,
                one.checkpoint.sha256[:12],
            )
        )
    columns = ("#ROUND", *(f"#{n}" for n in names), *(f"#held-out {n}" for n in names))
    out.table(
        (*columns, "#UNITS", "#PARTICIPANTS", "#TIME", "CHECKPOINT"), rows, empty="no round is finished yet"
    )


@client_command(app, "validate", "covey job validate digits-4f7k2m9c --round 3 --wait")
async def validate(
    client: "Client",
    out: Out,
    job: JobArgument,
    round_number: RoundOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Longest wait, in seconds.")] = 600,
) -> None:
    """Evaluate a checkpoint on the held-out data."""
    asked = await client.jobs.validate(job, round_number)
    if not wait and not asked.done:
        out.value({"job_id": job, "round": asked.round, "done": False, "metrics": None})
        out.line(f"round {asked.round} will be validated; see: covey job rounds {job}")
        return
    summary = await client.jobs.validation_of(job, asked.round, timeout=timeout)
    metrics = {metric.name: mean([metric], metric.name) for metric in summary.validation_metrics}
    out.value({"job_id": job, "round": asked.round, "done": True, "metrics": metrics})
    out.line(f"round {asked.round}: {metric_text(summary.validation_metrics)}")
