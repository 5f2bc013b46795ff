"""SQLite connections whose statements may be cancelled.

For SQLAlchemy: `create_async_engine(url, connect_args=connect_args(url))`.

When a task is cancelled in the middle of a statement, SQLAlchemy (2.1) begins to close the connection, is
cancelled, and stops aiosqlite's (0.22) thread at once. The close that has begun then stops the thread a
second time and waits for an answer that can't come any more: a task that never ends, on which the
shutdown of the event loop waits for ever. Here stopping twice is stopping once.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable
from typing import Any

import aiosqlite
from sqlalchemy import URL, make_url

__all__ = ["connect_args"]


class _Connection(aiosqlite.Connection):
    """A connection that may be stopped and closed in any order, any number of times."""

    _stopped: "asyncio.Future[Any] | None" = None

    def stop(self) -> "asyncio.Future[Any] | None":
        """Tells the thread to close the connection and end; returns when it has, as a future."""
        if self._stopped is None:
            self._stopped = super().stop()
        return self._stopped

    async def close(self) -> None:
        """Closes the connection after what was asked of it before."""
        if self._stopped is not None:
            await asyncio.shield(self._stopped)
            return
        await super().close()


def _open(database: str, **options: Any) -> Awaitable[aiosqlite.Connection]:
    connection = _Connection(lambda: sqlite3.connect(database, **options), 64)
    # A thread that waits for statements mustn't keep the process from ending.
    connection._thread.daemon = True  # noqa: SLF001 - as SQLAlchemy does it for its own connections
    return connection


def connect_args(url: str | URL) -> dict[str, Any]:
    """Returns what `create_async_engine` needs for `url`; nothing when it isn't SQLite's."""
    return {"async_creator_fn": _open} if make_url(url).drivername == "sqlite+aiosqlite" else {}
