"""Puts storage together: the only module that knows all its rooms."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import structlog

from covey.v1 import storage_service_pb2_grpc
from covey_kit.clock import Clock, SystemClock
from covey_kit.folders import FolderLock
from covey_storage.domain.catalog import Catalog
from covey_storage.domain.gate import Gate
from covey_storage.domain.keeper import Keeper
from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.pages import PageTokens
from covey_storage.domain.reads import Reads
from covey_storage.domain.scrub import Scrubber
from covey_storage.domain.shelf import Shelf
from covey_storage.domain.writes import Limits, Writes
from covey_storage.state.checkpoints import FileExaminer, SqlCheckpointRecords
from covey_storage.state.database import Database, sqlite_url
from covey_storage.state.objects import BucketObjects, FolderObjects, open_bucket
from covey_storage.state.parts import FileParts
from covey_storage.state.records import SqlBlobRecords, SqlReferences
from covey_storage.transport.servicer import Rooms, StorageServicer

__all__ = ["StorageApp", "StorageSettings"]

log = structlog.get_logger()

_PARTIAL = "partial"
_SQLITE = "storage.sqlite"


@dataclass(frozen=True)
class StorageSettings:
    """What a storage is made of.

    Attributes:
        folder: its state folder, of one process at a time: blobs, parts and (unless elsewhere) the database.
        database_url: SQLAlchemy URL with an asyncio driver; None: SQLite in the folder.
        blob_url: where visible blobs lie, such as `s3://bucket/prefix`; None: in the folder.
        max_blob_bytes: largest blob taken.
        min_free_bytes: room that writes leave on the disk.
        stale_part_seconds: a scrub drops writes that haven't grown for this long.
        max_transfers: reads and writes of blobs at the same time; each holds up to 12 MiB of memory.
    """

    folder: Path
    database_url: str | None = None
    blob_url: str | None = None
    max_blob_bytes: int = 64 << 30
    min_free_bytes: int = 256 << 20
    stale_part_seconds: float = 24 * 3600.0
    max_transfers: int = 512


class StorageApp:
    """The storage service, to be hosted by `covey_kit.serve.Host`. Made by `open`."""

    service_names: Sequence[str] = ("covey.v1.StorageService",)

    def __init__(self, lock: FolderLock, database: Database, rooms: Rooms) -> None:
        self._lock = lock
        self._database = database
        self._rooms = rooms

    @classmethod
    async def open(cls, settings: StorageSettings, clock: Clock | None = None) -> "StorageApp":
        """Takes the folder and opens what is in it.

        Raises:
            FailedPrecondition: another process has the folder, or a newer version made the database.
            ValueError: a URL can't be used.
            OSError: the folder can't be made or written.
        """
        lock = FolderLock(settings.folder)
        try:
            parts_folder = settings.folder / _PARTIAL
            parts_folder.mkdir(exist_ok=True)
            objects = _objects(settings, parts_folder)
            database = await Database.open(settings.database_url or sqlite_url(settings.folder / _SQLITE))
        except BaseException:
            lock.release()
            raise
        try:
            tokens = PageTokens(await database.secret("page-tokens"))
            rooms = _build(
                settings, database, objects, FileParts(parts_folder), tokens, clock or SystemClock()
            )
        except BaseException:
            await database.close()
            lock.release()
            raise
        return cls(lock, database, rooms)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        storage_service_pb2_grpc.add_StorageServiceServicer_to_server(StorageServicer(self._rooms), server)

    async def start(self) -> None:
        """Brings files and records together after a crash."""
        removed = await self._rooms.catalog.finish_removals()
        mended = await self._rooms.scrubber.mend()
        if removed or mended.adopted or mended.dropped:
            log.info(
                "mended after a crash",
                removed=removed,
                adopted=len(mended.adopted),
                dropped=len(mended.dropped),
            )
        if mended.lost or mended.set_aside:
            log.error(
                "blobs are lost or damaged; write them again",
                lost=mended.lost[:20],
                damaged=mended.set_aside[:20],
                count=len(mended.lost) + len(mended.set_aside),
            )

    async def drain(self) -> None:
        """Stops transfers at their next block; what has arrived is kept."""
        self._rooms.gate.close()

    async def close(self) -> None:
        """Closes the database and lets go of the folder."""
        await self._database.close()
        self._lock.release()


def _objects(settings: StorageSettings, scratch: Path) -> BucketObjects:
    if settings.blob_url is None:
        return FolderObjects(settings.folder, scratch)
    return BucketObjects(open_bucket(settings.blob_url), scratch)


def _build(
    settings: StorageSettings,
    database: Database,
    objects: BucketObjects,
    parts: FileParts,
    tokens: PageTokens,
    clock: Clock,
) -> Rooms:
    locks, gate = KeyedLocks(), Gate(settings.max_transfers)
    records, references = SqlBlobRecords(database), SqlReferences(database)
    checkpoints = SqlCheckpointRecords(database)
    keeper = Keeper(records, objects, locks)
    limits = Limits(settings.max_blob_bytes, settings.min_free_bytes)
    writes = Writes(records, objects, parts, locks, clock, limits)
    return Rooms(
        writes=writes,
        reads=Reads(records, references, checkpoints, objects, keeper),
        catalog=Catalog(records, references, objects, parts, locks, clock, tokens),
        shelf=Shelf(checkpoints, records, objects, FileExaminer(), keeper, locks, tokens),
        scrubber=Scrubber(
            records,
            objects,
            parts,
            writes,
            keeper,
            locks,
            clock,
            gate,
            stale_part_seconds=settings.stale_part_seconds,
        ),
        gate=gate,
    )
