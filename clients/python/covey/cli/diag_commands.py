"""`covey diag`: what each device is really doing."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli._command import client_command, group
from covey.cli._output import Out, plain
from covey.words import ABSENT, backend_text, duration, size, stage_word

if TYPE_CHECKING:
    from rich.table import Table

    from covey.client import Client
    from covey.v1.diagnostics_service_pb2 import ParticipantExecution
    from covey.v1.snapshot_pb2 import Snapshot

__all__ = ["add_to"]

app = group("diag", "See what each device is doing.")

COLUMNS = (
    "PARTICIPANT",
    "STAGE",
    "BACKEND",
    "RUNTIME",
    "WORKERS",
    "#UNITS",
    "#BATCH",
    "#UNITS/S",
    "ASSIGNMENT",
    "AGE",
)

JobOption = Annotated[str, typer.Option("--job", metavar="JOB", help="Only devices that work for this job.")]


def add_to(root: typer.Typer) -> None:
    """Adds the group to the command."""
    root.add_typer(app)


def _known(snapshot: "Snapshot", field: str) -> Any:
    """Returns a field that may be absent; None when it is."""
    return getattr(snapshot, field) if snapshot.HasField(field) else None  # type: ignore[arg-type]  # an optional field


def _of(done: Any, total: Any) -> str | None:
    if total is None:
        return None
    return f"{ABSENT if done is None else f'{done:,}'} of {total:,}"


def _stale(one: "ParticipantExecution") -> str:
    from covey.v1 import diagnostics_service_pb2 as pb

    return {
        pb.ParticipantExecution.STALENESS_SILENT: "silent",
        pb.ParticipantExecution.STALENESS_DISCONNECTED: "gone",
    }.get(one.staleness, "")


def _age(one: "ParticipantExecution") -> str:
    """Returns how old the snapshot is by the server's clock, and why it is stale."""
    seconds = (datetime.now(UTC) - one.receive_time.ToDatetime(UTC)).total_seconds()
    stale = _stale(one)
    return f"{max(0.0, seconds):.0f} s{f', {stale}' if stale else ''}"


def _speed(snapshot: "Snapshot") -> str | None:
    found = _known(snapshot, "units_per_second")
    return None if found is None else f"{found:,.0f}"


def _backend(snapshot: "Snapshot") -> str:
    return backend_text(snapshot.backend, snapshot.fallback_reason, snapshot.adapter.name)


def _row(one: "ParticipantExecution") -> tuple[Any, ...]:
    snapshot = one.snapshot
    return (
        snapshot.participant_id,
        stage_word(snapshot.stage),
        _backend(snapshot),
        snapshot.runtime,
        _of(_known(snapshot, "workers"), _known(snapshot, "max_workers")),
        _of(_known(snapshot, "units_done"), _known(snapshot, "units")),
        _known(snapshot, "batch_size"),
        _speed(snapshot),
        _known(snapshot, "assignment_id"),
        _age(one),
    )


EMPTY = "no device has sent a snapshot yet; devices join with: covey join HOST:PORT"


@client_command(app, "ls", "covey diag ls --job digits-4f7k2m9c")
async def ls(client: "Client", out: Out, job: JobOption = "") -> None:
    """List what each device is doing now."""
    found = await client.diagnostics.list(job)
    out.value([plain(one) for one in found])
    out.table(COLUMNS, [_row(one) for one in found], empty=EMPTY)


@client_command(app, "watch", "covey diag watch")
async def watch(client: "Client", out: Out, job: JobOption = "") -> None:
    """Follow what each device is doing, until Ctrl-C.

    With --json: one JSON array of snapshots a line, at every change.
    """
    if not sys.stdout.isatty():
        async for present in client.diagnostics.watch(job):
            out.value([plain(one) for one in present.values()])
            out.table(COLUMNS, [_row(one) for one in present.values()], empty=EMPTY)
        return
    from rich.live import Live

    with Live(_table({}), auto_refresh=False) as live:
        async for present in client.diagnostics.watch(job):
            live.update(_table(present), refresh=True)


def _table(present: "Mapping[str, ParticipantExecution]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left")
    for one in present.values():
        cells = (ABSENT if cell is None or cell == "" else str(cell) for cell in _row(one))
        table.add_row(*cells, style="dim" if _stale(one) else None)
    return table


@client_command(app, "show", "covey diag show device-7f3k2a9c")
async def show(
    client: "Client",
    out: Out,
    participant: Annotated[str, typer.Argument(metavar="PARTICIPANT", help="Its id; see: covey diag ls.")],
) -> None:
    """Show everything that is known of one device."""
    one = await client.diagnostics.get(participant)
    snapshot = one.snapshot
    out.value(plain(one))
    budget = _known(snapshot, "gpu_memory_budget_mib")
    transfer = _known(snapshot, "transfer_bytes_total")
    out.facts(
        [
            ("participant", snapshot.participant_id),
            ("snapshot", _age(one)),
            ("stage", stage_word(snapshot.stage)),
            ("job", _known(snapshot, "job_id")),
            ("round", _known(snapshot, "round")),
            ("assignment", _known(snapshot, "assignment_id")),
            ("units", _of(_known(snapshot, "units_done"), _known(snapshot, "units"))),
            ("units per second", _speed(snapshot)),
            ("batch size", _known(snapshot, "batch_size")),
            ("local epochs", _known(snapshot, "local_epochs")),
            ("backend", _backend(snapshot)),
            ("runtime", snapshot.runtime),
            ("workers", _of(_known(snapshot, "workers"), _known(snapshot, "max_workers"))),
            (
                "transfer",
                None
                if transfer is None
                else f"{size(_known(snapshot, 'transfer_bytes_done'))} of {size(transfer)}",
            ),
            ("GPU", snapshot.adapter.name if snapshot.HasField("adapter") else None),
            ("GPU memory budget", None if budget is None else f"{budget:,} MiB"),
            ("module SHA-256", _known(snapshot, "module_sha256")),
            ("shaders SHA-256", _known(snapshot, "shader_archive_sha256")),
        ]
    )
    _bars(out, snapshot)


def _bars(out: Out, snapshot: "Snapshot") -> None:
    """Prints the time spent in each stage of the assignment as bars."""
    spent = [(stage_word(s.stage), s.duration.ToMilliseconds() / 1000) for s in snapshot.stage_durations]
    longest = max((seconds for _, seconds in spent), default=0.0)
    for name, seconds in spent:
        bar = "█" * round(30 * seconds / longest) if longest else ""
        out.line(f"  {name:<11} {duration(seconds):>9}  {bar}")
