"""Records of checkpoints, and the files they are about."""

import asyncio
from pathlib import Path

from sqlalchemy import Row, insert, select

from covey_kit.checkpoints import examine
from covey_storage.convert import examined_from_kit, expectation_to_proto
from covey_storage.domain.model import BlobRef, CheckpointRecord, Examined, Expectation
from covey_storage.state.database import Database
from covey_storage.state.errors import world_errors
from covey_storage.state.records import add_references
from covey_storage.state.tables import checkpoints

__all__ = ["FileExaminer", "SqlCheckpointRecords"]


class SqlCheckpointRecords:
    """`CheckpointRecords` in SQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, record: CheckpointRecord, holder: str) -> CheckpointRecord:
        """Records a checkpoint and references its blob unless the round has one; returns the record."""
        async with self._database.write() as connection:
            there = await connection.execute(
                select(checkpoints).where(
                    checkpoints.c.job_id == record.job_id, checkpoints.c.round == record.round
                )
            )
            row = there.first()
            if row is not None and row.sha256 != record.blob.sha256:
                return _record(row)
            await add_references(connection, holder, [record.blob.sha256])
            if row is None:
                await connection.execute(
                    insert(checkpoints).values(
                        job_id=record.job_id,
                        round=record.round,
                        sha256=record.blob.sha256,
                        size_bytes=record.blob.size,
                        header=record.header,
                        weights_offset=record.weights_offset,
                        weights_bytes=record.weights_bytes,
                        weights_sha256=record.weights_sha256,
                    )
                )
            return record

    async def get(self, job_id: str, round_: int | None) -> CheckpointRecord | None:
        """Returns the checkpoint of a round; with None, of the latest."""
        query = select(checkpoints).where(checkpoints.c.job_id == job_id)
        if round_ is None:
            query = query.order_by(checkpoints.c.round.desc()).limit(1)
        else:
            query = query.where(checkpoints.c.round == round_)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
            return None if row is None else _record(row)

    async def page(self, job_id: str, after: int, limit: int) -> list[CheckpointRecord]:
        """Returns the checkpoints of a job behind a round, by round."""
        async with self._database.read() as connection:
            rows = await connection.execute(
                select(checkpoints)
                .where(checkpoints.c.job_id == job_id, checkpoints.c.round > after)
                .order_by(checkpoints.c.round)
                .limit(limit)
            )
            return [_record(row) for row in rows]

    async def of_blob(self, sha256: str) -> CheckpointRecord | None:
        """Returns a record of this file, if there is one."""
        async with self._database.read() as connection:
            found = await connection.execute(
                select(checkpoints).where(checkpoints.c.sha256 == sha256).limit(1)
            )
            row = found.first()
            return None if row is None else _record(row)


def _record(row: Row[tuple[object, ...]]) -> CheckpointRecord:
    return CheckpointRecord(
        row.job_id,
        row.round,
        BlobRef(row.sha256, row.size_bytes),
        row.header,
        row.weights_offset,
        row.weights_bytes,
        row.weights_sha256,
    )


class FileExaminer:
    """`CheckpointFiles` by the kit's codec, in threads.

    Args:
        at_once: files read at the same time; each takes up to two cores.
    """

    def __init__(self, at_once: int = 2) -> None:
        self._free = asyncio.Semaphore(at_once)

    async def examine(self, path: Path, expectation: Expectation | None, sha256: str) -> Examined:
        """Reads a file whole and says everything that is wrong with it."""
        wanted = None if expectation is None else expectation_to_proto(expectation)
        async with self._free:
            with world_errors():
                return examined_from_kit(await asyncio.to_thread(examine, path, wanted, sha256))
