"""The database: one engine, transactions that last, a schema version."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import URL, event, insert, make_url, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from covey_coordinator.state import tables
from covey_coordinator.state.assignments import SqlAssignments
from covey_coordinator.state.jobs import SqlHolders, SqlJobs, SqlRequests
from covey_coordinator.state.members import SqlInvitations, SqlParticipants
from covey_coordinator.state.rounds import SqlRounds, SqlValidations
from covey_kit.errors import FailedPrecondition, Reason

__all__ = ["Database", "SqlTransaction"]

T = TypeVar("T")

_BUSY_MILLISECONDS = 10_000


class SqlTransaction:
    """All tables on one connection."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.jobs = SqlJobs(connection)
        self.requests = SqlRequests(connection)
        self.participants = SqlParticipants(connection)
        self.invitations = SqlInvitations(connection)
        self.rounds = SqlRounds(connection)
        self.assignments = SqlAssignments(connection)
        self.validations = SqlValidations(connection)
        self.holders = SqlHolders(connection)


def _sqlite_pragmas(connection: Any, _record: object) -> None:
    """Makes a commit outlast a loss of power: write-ahead log, synced at each commit."""
    cursor = connection.cursor()
    try:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    finally:
        cursor.close()


class Database:
    """The coordinator's state. Made by `open`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._reading: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, folder: Path, url: str | None = None) -> Self:
        """Opens (and makes) the database: `coordinator.db` in the folder, or what the URL names.

        Raises:
            FailedPrecondition: CONTRACT_VERSION, the tables are those of another version of Covey.
        """
        target = (
            make_url(url) if url else URL.create("sqlite+aiosqlite", database=str(folder / "coordinator.db"))
        )
        engine = create_async_engine(target)
        if target.get_backend_name() == "sqlite":
            event.listen(engine.sync_engine, "connect", _sqlite_pragmas)
        database = cls(engine)
        try:
            await database._prepare()
        except BaseException:
            await engine.dispose()
            raise
        return database

    async def _prepare(self) -> None:
        async with self._engine.begin() as connection:
            # The version is looked at before a table of ours is added to another version's.
            await connection.run_sync(tables.settings.create, checkfirst=True)
            version = select(tables.settings.c.value).where(tables.settings.c.name == "schema_version")
            found = (await connection.execute(version)).scalar_one_or_none()
            if found is None:
                await connection.run_sync(tables.metadata.create_all)
                row = {"name": "schema_version", "value": str(tables.SCHEMA_VERSION)}
                await connection.execute(insert(tables.settings), row)
            elif found != str(tables.SCHEMA_VERSION):
                raise FailedPrecondition(
                    Reason.CONTRACT_VERSION,
                    f"the coordinator's database has schema version {found}, this program reads "
                    f"{tables.SCHEMA_VERSION}; use the program that wrote it, or another folder",
                )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[SqlTransaction]:
        """Begins a transaction: committed (and on disk) at the end of the block, rolled back on an error."""
        async with self._engine.begin() as connection:
            yield SqlTransaction(connection)

    async def read(self, query: Callable[[SqlTransaction], Awaitable[T]]) -> T:
        """Runs a query that only reads; to its end, also when the caller is cancelled.

        A driver that is cancelled in the middle of a statement leaves a connection that can only be
        thrown away, and closing such a one may hang.
        """

        async def run() -> T:
            async with self._engine.connect() as connection:
                return await query(SqlTransaction(connection))

        task = asyncio.create_task(run())
        self._reading.add(task)
        task.add_done_callback(self._read)
        return await asyncio.shield(task)

    def _read(self, task: asyncio.Task[T]) -> None:
        self._reading.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the caller got it, or has gone

    async def close(self) -> None:
        """Closes all connections. May be called twice."""
        await asyncio.gather(*self._reading, return_exceptions=True)
        await self._engine.dispose()
