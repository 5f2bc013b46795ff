"""Records of blobs and of who holds them."""

from collections.abc import Sequence

from sqlalchemy import Row, delete, exists, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from covey_storage.domain.model import BlobRecord, BlobRef, JobHolder, Released, Totals
from covey_storage.state.database import Database
from covey_storage.state.tables import blobs, checkpoints, references, removals

__all__ = ["SqlBlobRecords", "SqlReferences", "batches"]

_BATCH = 500
"""Parameters in one statement: below every database's bound, and a millisecond of work."""


def batches(digests: Sequence[str]) -> list[Sequence[str]]:
    """Cuts a list into what fits one statement."""
    return [digests[start : start + _BATCH] for start in range(0, len(digests), _BATCH)]


def _not_held() -> "exists":  # type: ignore[valid-type]
    return ~exists().where(references.c.sha256 == blobs.c.sha256)


class SqlBlobRecords:
    """`BlobRecords` in SQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, sha256: str) -> BlobRecord | None:
        """Returns the record with its holders."""
        async with self._database.read() as connection:
            row = (await connection.execute(select(blobs).where(blobs.c.sha256 == sha256))).first()
            if row is None:
                return None
            return (await _with_holders(connection, [row]))[0]

    async def sizes(self, digests: Sequence[str]) -> dict[str, int]:
        """Returns the sizes of those that are visible."""
        found: dict[str, int] = {}
        async with self._database.read() as connection:
            for batch in batches(digests):
                rows = await connection.execute(
                    select(blobs.c.sha256, blobs.c.size_bytes).where(
                        blobs.c.sha256.in_(batch), blobs.c.quarantined.is_(False)
                    )
                )
                found.update((row.sha256, row.size_bytes) for row in rows)
        return found

    async def known(self, digests: Sequence[str]) -> set[str]:
        """Returns those that have a record, quarantined or not."""
        found: set[str] = set()
        async with self._database.read() as connection:
            for batch in batches(digests):
                found.update(
                    await connection.scalars(select(blobs.c.sha256).where(blobs.c.sha256.in_(batch)))
                )
        return found

    async def put(self, ref: BlobRef, now: float) -> None:
        """Makes a blob visible; one that was quarantined is so no more."""
        async with self._database.write() as connection:
            known = await connection.execute(
                update(blobs)
                .where(blobs.c.sha256 == ref.sha256)
                .values(quarantined=False, size_bytes=ref.size)
            )
            if known.rowcount == 0:
                await connection.execute(
                    insert(blobs).values(
                        sha256=ref.sha256,
                        size_bytes=ref.size,
                        create_time_us=round(now * 1e6),
                        quarantined=False,
                    )
                )
            await connection.execute(delete(removals).where(removals.c.sha256 == ref.sha256))

    async def quarantine(self, sha256: str) -> bool:
        """Marks a blob as damaged. False: there is no such record, or it was already marked."""
        async with self._database.write() as connection:
            marked = await connection.execute(
                update(blobs)
                .where(blobs.c.sha256 == sha256, blobs.c.quarantined.is_(False))
                .values(quarantined=True)
            )
            return marked.rowcount > 0

    async def remove(self, sha256: str) -> tuple[bool, tuple[str, ...]]:
        """Deletes the record of a blob that nobody holds and notes that its file must go."""
        async with self._database.write() as connection:
            held = await connection.scalars(
                select(references.c.holder).where(references.c.sha256 == sha256).order_by(references.c.holder)
            )
            holders = tuple(held)
            if holders:
                return False, holders
            gone = await connection.execute(delete(blobs).where(blobs.c.sha256 == sha256))
            if gone.rowcount == 0:
                return False, ()
            await _note_removals(connection, [sha256])
            return True, ()

    async def removals(self, limit: int) -> list[str]:
        """Returns digests whose files must still go."""
        async with self._database.read() as connection:
            return list(await connection.scalars(select(removals.c.sha256).limit(limit)))

    async def removed(self, digests: Sequence[str]) -> None:
        """Forgets that these files must go: they're gone."""
        async with self._database.write() as connection:
            for batch in batches(digests):
                await connection.execute(delete(removals).where(removals.c.sha256.in_(batch)))

    async def page(self, after: str, limit: int) -> list[BlobRecord]:
        """Returns the records behind a digest, by digest, with their holders."""
        async with self._database.read() as connection:
            rows = await connection.execute(
                select(blobs).where(blobs.c.sha256 > after).order_by(blobs.c.sha256).limit(limit)
            )
            return await _with_holders(connection, rows.all())

    async def totals(self) -> Totals:
        """Returns the sums."""
        size = func.coalesce(func.sum(blobs.c.size_bytes), 0)
        visible = blobs.c.quarantined.is_(False)
        async with self._database.read() as connection:
            count, total = (await connection.execute(select(func.count(), size).where(visible))).one()
            free, free_bytes = (
                await connection.execute(select(func.count(), size).where(visible, _not_held()))
            ).one()
            quarantined = await connection.scalar(
                select(func.count()).select_from(blobs).where(blobs.c.quarantined.is_(True))
            )
            recorded = await connection.scalar(select(func.count()).select_from(checkpoints))
        return Totals(count, int(total), free, int(free_bytes), quarantined or 0, recorded or 0)


async def _with_holders(
    connection: AsyncConnection, rows: Sequence[Row[tuple[object, ...]]]
) -> list[BlobRecord]:
    holders: dict[str, list[str]] = {}
    for batch in batches([row.sha256 for row in rows]):
        found = await connection.execute(
            select(references).where(references.c.sha256.in_(batch)).order_by(references.c.holder)
        )
        for held in found:
            holders.setdefault(held.sha256, []).append(held.holder)
    return [
        BlobRecord(
            BlobRef(row.sha256, row.size_bytes),
            row.create_time_us / 1e6,
            row.quarantined,
            tuple(holders.get(row.sha256, ())),
        )
        for row in rows
    ]


async def _note_removals(connection: AsyncConnection, digests: Sequence[str]) -> None:
    for batch in batches(digests):
        await connection.execute(delete(removals).where(removals.c.sha256.in_(batch)))
        await connection.execute(insert(removals), [{"sha256": sha256} for sha256 in batch])


class SqlReferences:
    """`References` in SQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def holds(self, holder: str, sha256: str) -> bool:
        """Says whether the holder references the blob."""
        async with self._database.read() as connection:
            found = await connection.scalar(
                select(references.c.sha256).where(
                    references.c.holder == holder, references.c.sha256 == sha256
                )
            )
            return found is not None

    async def add(self, holder: str, digests: Sequence[str]) -> list[str]:
        """References all, or none: then returns those that aren't visible."""
        wanted = list(dict.fromkeys(digests))
        missing: list[str] = []
        async with self._database.write() as connection:
            for batch in batches(wanted):
                visible = set(
                    await connection.scalars(
                        select(blobs.c.sha256).where(
                            blobs.c.sha256.in_(batch), blobs.c.quarantined.is_(False)
                        )
                    )
                )
                missing += [sha256 for sha256 in batch if sha256 not in visible]
            if missing:
                return missing
            for batch in batches(wanted):
                await add_references(connection, holder, batch)
        return []

    async def release(self, holder: str, *, delete: bool) -> Released:
        """Drops what a holder references, its checkpoint records too."""
        async with self._database.write() as connection:
            job_id = JobHolder.job_of(holder)
            if job_id is not None:
                await connection.execute(checkpoints.delete().where(checkpoints.c.job_id == job_id))
            held = list(
                await connection.scalars(select(references.c.sha256).where(references.c.holder == holder))
            )
            await connection.execute(references.delete().where(references.c.holder == holder))
            freed: list[BlobRef] = []
            for batch in batches(held) if delete else ():
                rows = await connection.execute(
                    select(blobs.c.sha256, blobs.c.size_bytes).where(blobs.c.sha256.in_(batch), _not_held())
                )
                gone = [BlobRef(row.sha256, row.size_bytes) for row in rows]
                names = [ref.sha256 for ref in gone]
                await connection.execute(blobs.delete().where(blobs.c.sha256.in_(names)))
                await _note_removals(connection, names)
                freed += gone
            return Released(len(held), tuple(freed))


async def add_references(connection: AsyncConnection, holder: str, digests: Sequence[str]) -> None:
    """Inserts the references that aren't there yet. At most one statement's worth of digests."""
    there = set(
        await connection.scalars(
            select(references.c.sha256).where(references.c.holder == holder, references.c.sha256.in_(digests))
        )
    )
    new = [{"holder": holder, "sha256": sha256} for sha256 in digests if sha256 not in there]
    if new:
        await connection.execute(insert(references), new)
