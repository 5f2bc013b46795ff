"""`covey participants`, `covey invite` and `covey storage`: what the mesh consists of."""

from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._command import client_command, group
from covey.cli._output import Out, plain
from covey.words import invitation_word, size

if TYPE_CHECKING:
    from covey.client import Client

__all__ = ["add_to"]

participants = group("participants", "See which devices joined.")
storage = group("storage", "See and check what is stored.")
top = typer.Typer()


def add_to(root: typer.Typer) -> None:
    """Adds the groups and the command."""
    root.add_typer(participants)
    client_command(root, "invite", "covey invite digits-4f7k2m9c --all")(invite)
    root.add_typer(storage)


@client_command(participants, "ls", "covey participants ls --connected")
async def ls(
    client: "Client",
    out: Out,
    connected: Annotated[bool, typer.Option("--connected", help="Only those connected now.")] = False,
) -> None:
    """List the devices that ever joined."""
    found = await client.participants.list(connected_only=connected)
    out.value([plain(one) for one in found])
    rows = [
        (
            one.participant_id,
            one.display_name,
            "yes" if one.connected else "no",
            one.device.platform,
            one.device.runtime,
            one.device.cpu_cores if one.device.HasField("cpu_cores") else None,
            size(one.device.memory_bytes) if one.device.HasField("memory_bytes") else None,
            ", ".join(adapter.name for adapter in one.device.adapters),
            ", ".join(one.job_ids),
        )
        for one in found
    ]
    columns = ("PARTICIPANT", "NAME", "CONNECTED", "PLATFORM", "RUNTIME", "#CORES", "#MEMORY", "GPU", "JOBS")
    hint = f"nobody joined yet; devices join with: covey join {client.server.address}"
    out.table(columns, rows, empty=hint)


async def invite(
    client: "Client",
    out: Out,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    who: Annotated[
        list[str] | None, typer.Argument(metavar="[PARTICIPANT]...", help="Ids of participants.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Invite everyone who is connected now.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until everyone invited has accepted.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Longest wait, in seconds.")] = 60,
) -> None:
    """Invite participants to a job."""
    from covey_kit.errors import FailedPrecondition, Reason

    if not who and not everyone:
        raise typer.BadParameter("name participants (see: covey participants ls), or say --all")
    after = await client.participants.invite(job, who or (), all_connected=everyone)
    if wait and not after.participants:
        raise FailedPrecondition(
            Reason.NOT_ENOUGH_PARTICIPANTS,
            "nobody is connected, so nobody was invited; devices join with: "
            f"covey join {client.server.address}",
        )
    if wait:
        after = await client.participants.accepted(job, len(after.participants), timeout=timeout)
    out.value(plain(after))
    for one in after.participants:
        out.line(f"{one.participant_id}  {one.display_name}  {invitation_word(one.invitation)}")
    if not after.participants:
        out.line(f"nobody is connected; devices join with: covey join {client.server.address}")


@client_command(storage, "inventory", "covey storage inventory --blobs")
async def inventory(
    client: "Client",
    out: Out,
    blobs: Annotated[bool, typer.Option("--blobs", help="List every blob, not only the totals.")] = False,
) -> None:
    """Show what is stored, and what nobody needs."""
    found = await client.storage.inventory()
    listed = list(found.blobs)
    if not blobs:
        del found.blobs[:]
    out.value(plain(found))
    out.facts(
        [
            ("blobs", f"{found.blob_count:,}, {size(found.blob_bytes)}"),
            ("unreferenced", f"{found.unreferenced_count:,}, {size(found.unreferenced_bytes)}"),
            ("checkpoints", f"{found.checkpoint_count:,}"),
            ("quarantined", f"{found.quarantined_count:,}"),
            ("unfinished writes", f"{found.partial_count:,}"),
        ]
    )
    if blobs:
        out.table(
            ("SHA-256", "#SIZE", "HOLDERS", "STATE"),
            [
                (
                    one.blob.sha256,
                    size(one.blob.size_bytes),
                    ", ".join(one.holders),
                    "quarantined" if one.quarantined else "good",
                )
                for one in listed
            ],
        )


@client_command(storage, "scrub", "covey storage scrub")
async def scrub(client: "Client", out: Out) -> None:
    """Hash every blob again, set damaged ones aside.

    Exit code 1 when there were any.
    """
    from covey_kit.errors import DataLoss, Reason

    damaged: list[str] = []
    last = None
    async for last in client.storage.scrub():
        damaged += last.damaged
        if not last.done:
            out.line(f"{last.blobs_checked:,} of {last.blobs_total:,} blobs, {size(last.bytes_checked)}")
    if last is None or not last.done:
        raise DataLoss(Reason.INTERNAL, "the scrub ended before it was done; run it again")
    out.value(plain(last) | {"damaged": damaged})
    out.line(
        f"checked {last.blobs_checked:,} blobs, {size(last.bytes_checked)}; "
        f"{len(damaged)} damaged, {last.orphans_removed:,} stray files removed"
    )
    if damaged:
        raise DataLoss(
            Reason.BLOB_CORRUPT, f"damaged and set aside: {', '.join(damaged)}; upload or restore them"
        )
