"""The database: one engine, its schema, its transactions."""

import asyncio
import secrets as random_secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, event, insert, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from covey_kit.errors import FailedPrecondition, Reason
from covey_storage.state.errors import world_errors
from covey_storage.state.sqlite import connect_args
from covey_storage.state.tables import SCHEMA_VERSION, metadata, schema_version, secrets

__all__ = ["Database", "sqlite_url"]

MIGRATIONS: Mapping[int, Callable[[AsyncConnection], Awaitable[None]]] = {}
"""How to get from version n to n + 1."""

_BUSY_MILLISECONDS = 10_000


class Database:
    """Reads run side by side; writes run one after the other, each whole or not at all.

    One process has the folder, so a lock in memory is enough to order its writes; SQLite would refuse a
    second writer anyway, and elsewhere it spares us retries.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, url: str | URL) -> "Database":
        """Connects and brings the schema up to date.

        Args:
            url: SQLAlchemy URL with an asyncio driver, such as `sqlite+aiosqlite:////data/storage.sqlite`.

        Raises:
            ValueError: the URL isn't one.
            FailedPrecondition: the database was made by a newer version.
            Unavailable: it can't be reached.
        """
        try:
            engine = create_async_engine(
                url, pool_pre_ping=not str(url).startswith("sqlite"), connect_args=connect_args(url)
            )
        except (ArgumentError, ModuleNotFoundError) as error:
            raise ValueError(f"the database URL can't be used: {error}") from error
        if engine.dialect.name == "sqlite":
            event.listen(engine.sync_engine, "connect", _set_pragmas)
        database = cls(engine)
        try:
            await database._migrate()
        except BaseException:
            await engine.dispose()
            raise
        return database

    async def _migrate(self) -> None:
        async with self.write() as connection:
            await connection.run_sync(metadata.create_all)
            found = await connection.scalar(select(schema_version.c.version))
            if found is None:
                await connection.execute(insert(schema_version).values(version=SCHEMA_VERSION))
                return
            if found > SCHEMA_VERSION:
                raise FailedPrecondition(
                    Reason.CONTRACT_VERSION,
                    f"the database has schema version {found}; this program knows {SCHEMA_VERSION}: "
                    "use the newer program, or another database",
                )
            for version in range(found, SCHEMA_VERSION):
                await MIGRATIONS[version](connection)
            await connection.execute(schema_version.update().values(version=SCHEMA_VERSION))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection to read with."""
        with world_errors():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: on disk when the block ends, undone when it raises."""
        with world_errors():
            async with self._writing, self._engine.begin() as connection:
                yield connection

    async def secret(self, name: str) -> bytes:
        """Returns 32 random bytes that stay the same for as long as the database lives."""
        async with self.write() as connection:
            value = await connection.scalar(select(secrets.c.value).where(secrets.c.name == name))
            if value is None:
                value = random_secrets.token_bytes(32)
                await connection.execute(insert(secrets).values(name=name, value=value))
            return bytes(value)

    async def close(self) -> None:
        """Closes all connections."""
        await self._engine.dispose()


def sqlite_url(path: Path) -> URL:
    """Returns the URL of a SQLite file, whatever characters its path has."""
    return URL.create("sqlite+aiosqlite", database=str(path))


def _set_pragmas(connection: Any, _record: object) -> None:
    """SQLite: readers beside the writer, and what was committed survives a loss of power."""
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={_BUSY_MILLISECONDS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
